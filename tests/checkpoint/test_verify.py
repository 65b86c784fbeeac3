from __future__ import annotations

from pathlib import Path

import pytest

from geartrain.checkpoint.chunk_store import FileStore
from geartrain.checkpoint.chunks import object_name
from geartrain.checkpoint.local_tier import LocalTier
from geartrain.checkpoint.verify import verify_store
from geartrain.errors import CheckpointError
from stored_versions import make_content, read_content, save

SMALL = {"model/w": 40, "model/b": 3, "optimizer/m": 40}


def files_of(directory: Path) -> list[Path]:
    return sorted(p for p in directory.rglob("*") if p.is_file() and p.name != ".lock")


def test_every_flip_of_any_byte_of_any_file_is_found(tmp_path: Path) -> None:
    tier = LocalTier(tmp_path)
    save(tier, make_content({"model/w": 9, "optimizer/m": 5}))
    assert verify_store(tier.store).is_sound
    num_flips = 0

    for path in files_of(tmp_path):
        sound = path.read_bytes()
        for index in range(len(sound)):
            flipped = bytearray(sound)
            flipped[index] ^= 1 << index % 8
            path.write_bytes(flipped)

            damages = verify_store(tier.store).damages

            name = path.relative_to(tmp_path).as_posix()
            assert name in {damage.name for damage in damages}, (path, index)
            num_flips += 1
        path.write_bytes(sound)
    assert verify_store(tier.store).is_sound
    assert num_flips > 1000


def test_a_flip_is_found_by_whoever_reads(tmp_path: Path) -> None:
    tier = LocalTier(tmp_path)
    version = save(tier, make_content(SMALL))
    for path in files_of(tmp_path / "objects"):
        sound = path.read_bytes()
        for index in range(len(sound)):
            flipped = bytearray(sound)
            flipped[index] ^= 0x80
            path.write_bytes(flipped)
            with pytest.raises(CheckpointError, match="is damaged"):
                read_content(tier.reader(version), version)
        path.write_bytes(sound)


def test_damage_is_named_by_what_it_hits(tmp_path: Path) -> None:
    tier = LocalTier(tmp_path)
    content = make_content(SMALL)
    old = save(tier, content, step=1)
    new = save(tier, content | make_content({"model/w": 40}, seed=1), step=2)
    (shared,) = old.manifest.chunks.keys() & new.manifest.chunks.keys()
    (tmp_path / object_name(shared)).unlink()

    (damage,) = verify_store(tier.store).damages

    assert damage.name == object_name(shared)
    assert "No such file" in damage.problem
    assert damage.versions == (old.name, new.name)
    assert [str(part) for part in damage.ranges] == ["optimizer/m[0:40]"]


def test_everything_is_repaired_from_another_store(tmp_path: Path) -> None:
    content = make_content({"model/w": 1_200_000} | SMALL | {"model/v": 1_000_000})
    tier = LocalTier(tmp_path / "a")
    version = save(tier, content)
    save(LocalTier(tmp_path / "b"), content)
    paths = files_of(tmp_path / "a")
    for index, path in enumerate(paths):
        path.write_bytes(b"" if index % 2 else path.read_bytes()[::-1])
    (tmp_path / "a" / "objects" / "zz").mkdir()
    spare = tmp_path / "a" / "objects" / "zz" / "spare"
    spare.write_text("left over")

    report = verify_store(tier.store, repair_from=[FileStore(tmp_path / "b")])

    assert {damage.name for damage in report.damages} == {
        path.relative_to(tmp_path / "a").as_posix() for path in (*paths, spare)
    }
    assert report.is_sound
    assert verify_store(tier.store).damages == ()
    assert tier.latest() == version
    assert read_content(tier.reader(version), version) == content


def test_what_no_store_can_repair_is_told(tmp_path: Path) -> None:
    tier = LocalTier(tmp_path / "a")
    version = save(tier, make_content(SMALL))
    path = tmp_path / "a" / object_name(next(iter(version.manifest.chunks)))
    path.write_bytes(b"x")

    report = verify_store(tier.store, repair_from=[FileStore(tmp_path / "b")])

    assert not report.is_sound
    assert "instead of" in report.damages[0].problem
    assert "no store has chunk" in report.damages[0].problem
    assert path.read_bytes() == b"x"


def test_an_empty_store_is_sound_and_progress_is_told(tmp_path: Path) -> None:
    assert verify_store(FileStore(tmp_path / "none")).is_sound
    save(LocalTier(tmp_path), make_content(SMALL))
    told: list[tuple[int, int]] = []

    report = verify_store(
        FileStore(tmp_path), on_progress=lambda done, total: told.append((done, total))
    )

    assert told == [(1, 2), (2, 2)]
    assert (report.num_versions, report.num_chunks) == (1, 2)
    assert report.num_bytes == 4 * 83
