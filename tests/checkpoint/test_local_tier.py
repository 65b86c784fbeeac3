"""Saving to a directory, also when the disk does not want to."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from geartrain.checkpoint.chunks import object_name
from geartrain.checkpoint.local_tier import LocalTier
from geartrain.checkpoint.pieces import HeldPiece, StoredPart, assemble_manifest
from geartrain.checkpoint.ranges import StateRange
from geartrain.errors import CheckpointError
from small_disk import small_disk
from stored_versions import (
    describe,
    facts_of,
    make_content,
    pieces_of,
    read_content,
    save,
)

SIZES = {"model/w": 2_500_000, "model/b": 10, "optimizer/m": 300_000}


def files_of(directory: Path) -> dict[str, int]:
    return {
        path.relative_to(directory).as_posix(): path.stat().st_ino
        for path in directory.rglob("*")
        if path.is_file()
    }


def test_the_latest_version_is_read_back_and_earlier_ones_stay(tmp_path: Path) -> None:
    contents = [make_content(SIZES, seed=seed) for seed in range(3)]
    versions = [save(LocalTier(tmp_path), c, step=i) for i, c in enumerate(contents)]

    tier = LocalTier(tmp_path)

    assert tier.versions() == tuple(version.name for version in versions)
    assert tier.latest() == versions[2]
    for name, content in zip(tier.versions(), contents, strict=True):
        version = tier.read(name)
        assert read_content(tier.reader(version), version) == content


def test_a_place_without_versions_has_no_latest(tmp_path: Path) -> None:
    assert LocalTier(tmp_path / "new").latest() is None
    assert LocalTier(tmp_path / "new").versions() == ()
    assert not (tmp_path / "new").exists()


def test_chunks_that_did_not_change_are_not_written_again(tmp_path: Path) -> None:
    content = make_content(SIZES)
    tier = LocalTier(tmp_path)
    save(tier, content, step=1)
    before = files_of(tmp_path / "objects")

    save(LocalTier(tmp_path), content | make_content({"optimizer/m": 300_000}, 9), step=2)

    after = files_of(tmp_path / "objects")
    assert before.items() <= after.items()
    assert len(after) == len(before) + 1


def test_a_version_is_not_built_on_a_damaged_chunk(tmp_path: Path) -> None:
    content = make_content(SIZES)
    version = save(LocalTier(tmp_path), content, step=1)
    for index, chunk_id in enumerate(version.manifest.chunks):
        path = tmp_path / object_name(chunk_id)
        data = bytearray(path.read_bytes())
        data[7] ^= 1
        path.write_bytes(data[: -index or None])

    tier = LocalTier(tmp_path)
    version = save(tier, content, step=2)

    assert read_content(tier.reader(version), version) == content


def test_a_damaged_pointer_gives_the_version_saved_last(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tier = LocalTier(tmp_path)
    newest = tier.save(facts_of({}, step=7, created_at_s=1.0), [])
    # The run went back to step 3 and saved later.
    newest = tier.save(facts_of({}, step=3, created_at_s=2.0), [])
    pointer = tmp_path / "LATEST"

    for text in ("", "manifests/0", "../secret", "objects/aa\n", "x" * 10_000, "\0", "é"):
        pointer.write_text(text)
        assert tier.latest() == newest
    pointer.write_bytes(b"\xff\xfe")
    assert tier.latest() == newest
    pointer.unlink()
    assert tier.latest() == newest
    assert "can't be followed" in caplog.text


def test_a_damaged_manifest_gives_the_version_before(tmp_path: Path) -> None:
    tier = LocalTier(tmp_path)
    first = save(tier, make_content(SIZES), step=1)
    second = save(tier, make_content(SIZES, seed=1), step=2)
    (tmp_path / second.name).write_text("{}")

    assert tier.latest() == first

    (tmp_path / first.name).write_text("{}")
    with pytest.raises(CheckpointError, match="no version can be read"):
        tier.latest()


def test_another_store_helps_out(tmp_path: Path) -> None:
    content = make_content(SIZES)
    tier = LocalTier(tmp_path / "a", others=[LocalTier(tmp_path / "b").store])
    version = save(tier, content)
    save(LocalTier(tmp_path / "b"), content)
    shutil.rmtree(tmp_path / "a")

    latest = tier.latest()

    assert latest == version
    assert read_content(tier.reader(version), version) == content


def test_a_save_that_fails_on_the_way_takes_back_what_it_wrote(tmp_path: Path) -> None:
    tier = LocalTier(tmp_path)
    content = make_content(SIZES)
    first = save(tier, content, step=1)
    before = files_of(tmp_path)
    changed = make_content(SIZES, seed=1)

    def fails() -> Iterator[HeldPiece]:
        yield from pieces_of(changed)[:2]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tier.save(facts_of(changed, step=2), fails())

    assert files_of(tmp_path) == before
    assert tier.latest() == first
    again = save(tier, changed, step=2)
    assert read_content(tier.reader(again), again) == changed


def test_what_another_writer_builds_on_is_not_taken_back(tmp_path: Path) -> None:
    content = make_content(SIZES)
    tier, other = LocalTier(tmp_path), LocalTier(tmp_path)

    def fails() -> Iterator[HeldPiece]:
        yield from pieces_of(content)
        # The other has found the chunks there, and not yet published its manifest.
        parts.append(other.write_part(describe(content), pieces_of(content)))
        raise KeyboardInterrupt

    parts: list[StoredPart] = []
    with pytest.raises(KeyboardInterrupt):
        tier.save(facts_of(content), fails())

    version = other.publish(assemble_manifest(facts_of(content), parts))
    assert read_content(other.reader(version), version) == content


def test_a_version_that_lacks_a_tensor_is_not_published(tmp_path: Path) -> None:
    content = make_content(SIZES)
    tier = LocalTier(tmp_path)
    held = [StateRange(name="model/w", start=0, stop=10)]

    with pytest.raises(CheckpointError, match="nobody holds model/b"):
        tier.save(facts_of(content), pieces_of(content, held))

    assert tier.latest() is None


def test_writers_beside_each_other_all_publish(tmp_path: Path) -> None:
    contents = [make_content({"model/w": 400_000 + i, "model/b": 5}, i) for i in range(6)]
    errors: list[BaseException] = []

    def write(index: int) -> None:
        try:
            for step in range(4):
                save(LocalTier(tmp_path), contents[(index + step) % 6], step=step)
        except BaseException as error:  # noqa: BLE001 - told below
            errors.append(error)

    threads = [threading.Thread(target=write, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)

    assert not errors
    tier = LocalTier(tmp_path)
    assert len(tier.versions()) == 24
    for name in tier.versions():
        version = tier.read(name)
        assert read_content(tier.reader(version), version) in contents


REFUSED_BY_THE_SYSTEM = """
import resource, sys
from geartrain.checkpoint.local_tier import LocalTier
from geartrain.errors import CheckpointError
sys.path.append(sys.argv[2])
from stored_versions import make_content, read_content, save

tier = LocalTier(sys.argv[1])
small, large = make_content({"model/w": 10}), make_content({"model/w": 3_000_000})
first = save(tier, small, step=1)
soft = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, soft[1]))
try:
    save(tier, large, step=2)
except CheckpointError as error:
    print(error)
assert tier.latest() == first
resource.setrlimit(resource.RLIMIT_FSIZE, soft)
second = save(tier, large, step=2)
assert tier.latest() == second and read_content(tier.reader(second), second) == large
"""


def test_a_write_that_the_system_refuses_leaves_the_old_version(tmp_path: Path) -> None:
    ended = subprocess.run(
        [
            *(sys.executable, "-c", REFUSED_BY_THE_SYSTEM),
            *(str(tmp_path), str(Path(__file__).parents[1])),
        ],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )

    assert ended.returncode == 0, ended.stderr
    assert "File too large (needs 4.0 MiB" in ended.stdout


@pytest.mark.root
def test_a_full_disk_is_named_and_the_next_save_succeeds(tmp_path: Path) -> None:
    content, other = make_content(SIZES), make_content(SIZES, seed=1)
    with small_disk(tmp_path, "24m") as disk:
        tier = LocalTier(disk / "tier")
        first = save(tier, content, step=1)
        filler = disk / "filler"
        filler.write_bytes(bytes(4_000_000))
        before = files_of(disk)

        with pytest.raises(CheckpointError, match="No space left on device"):
            save(tier, other, step=2)

        assert files_of(disk) == before
        assert tier.latest() == first
        assert read_content(tier.reader(first), first) == content
        filler.unlink()
        # It fits only where nothing was left of the save that failed.
        second = save(tier, make_content(SIZES, seed=2), step=2)
        assert tier.latest() == second


@pytest.mark.root
def test_a_read_only_disk_is_named_and_the_next_save_succeeds(tmp_path: Path) -> None:
    content = make_content({"model/w": 10})
    with small_disk(tmp_path, "4m") as disk:
        tier = LocalTier(disk / "tier")
        first = save(tier, content, step=1)
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)

        with pytest.raises(CheckpointError, match="Read-only file system"):
            save(tier, content, step=2)

        assert tier.latest() == first
        assert read_content(tier.reader(first), first) == content
        subprocess.run(["mount", "-o", "remount,rw", str(disk)], check=True)
        save(tier, content, step=2)


def test_a_directory_that_vanished_is_named_and_made_again(tmp_path: Path) -> None:
    place = tmp_path / "tier"
    tier = LocalTier(place)
    content = make_content(SIZES)
    version = save(tier, content, step=1)
    shutil.rmtree(place)

    assert tier.latest() is None
    with pytest.raises(CheckpointError, match="No such file"):
        tier.read(version.name)
    place.write_text("something else")
    with pytest.raises(CheckpointError, match="cannot lock"):
        save(tier, content, step=2)
    place.unlink()
    second = save(tier, content, step=2)
    assert read_content(tier.reader(second), second) == content


@pytest.mark.parametrize("umask", [0o022, 0o077])
def test_who_may_read_is_up_to_the_umask(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        save(LocalTier(tmp_path / "tier"), make_content(SIZES))
    finally:
        os.umask(before)

    for path in (tmp_path / "tier").rglob("*"):
        assert (path.stat().st_mode & 0o044) == 0o044 & ~umask, path
