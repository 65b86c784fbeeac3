from __future__ import annotations

import os
from pathlib import Path

import pytest

from geartrain.checkpoint.chunk_store import FileStore
from geartrain.checkpoint.chunks import (
    ChunkFacts,
    ChunkSpan,
    describe_chunk,
    find_damage,
    name_chunk,
    object_name,
)
from geartrain.errors import CheckpointError


def test_an_object_is_put_once_and_read_back(tmp_path: Path) -> None:
    store = FileStore(tmp_path / "a" / "b")

    assert store.put_if_absent("objects/aa/x", memoryview(b"data"))
    assert not store.put_if_absent("objects/aa/x", b"data")
    assert not FileStore(tmp_path / "a" / "b").put_if_absent("objects/aa/x", b"data")

    assert store.get("objects/aa/x") == b"data"
    assert store.has("objects/aa/x")
    assert not store.has("objects/aa/y")
    assert not store.has("objects/aa/x/below")


def test_listing_tells_names_sizes_and_times(tmp_path: Path) -> None:
    store = FileStore(tmp_path)
    for name in ("objects/aa/x", "objects/bb/y", "manifests/z"):
        store.put_if_absent(name, name.encode())
    os.utime(tmp_path / "objects/aa/x", (5.0, 5.0))

    found = {one.name: one for one in store.list_objects("objects/")}

    assert set(found) == {"objects/aa/x", "objects/bb/y"}
    assert found["objects/aa/x"].num_bytes == 12
    assert found["objects/aa/x"].modified_at_s == 5.0
    assert list(store.list_objects("nothing/")) == []


def test_an_object_is_removed_and_put_again(tmp_path: Path) -> None:
    store = FileStore(tmp_path)
    store.put_if_absent("objects/aa/x", b"data")

    store.delete("objects/aa/x")
    store.delete("objects/aa/x")
    store.delete("objects/aa/x/below")

    assert not store.has("objects/aa/x")
    assert store.put_if_absent("objects/aa/x", b"data")


@pytest.mark.parametrize(
    "name", ["", "/etc/passwd", "../x", "objects/../../x", "a\nb", "\0"]
)
def test_names_that_lead_elsewhere_are_refused(tmp_path: Path, name: str) -> None:
    store = FileStore(tmp_path / "store")

    for act in (store.get, store.has, store.delete, lambda n: store.put_if_absent(n, b"")):
        with pytest.raises(CheckpointError, match="no name of an object"):
            act(name)


def test_the_pointer_is_replaced_and_read(tmp_path: Path) -> None:
    store = FileStore(tmp_path)
    assert store.read_pointer() is None

    for name in ("manifests/1", "manifests/2"):
        store.publish_pointer(name)
        assert store.read_pointer() == name

    assert not list((tmp_path / "drafts").iterdir())


def test_only_what_nobody_has_touched_since_is_taken_back(tmp_path: Path) -> None:
    store = FileStore(tmp_path)
    for name in ("objects/aa/x", "objects/aa/y"):
        store.put_if_absent(name, b"data")

    FileStore(tmp_path).put_if_absent("objects/aa/y", b"data")
    for name in ("objects/aa/x", "objects/aa/y", "objects/aa/z"):
        store.delete_untouched(name)

    assert not store.has("objects/aa/x")
    assert store.has("objects/aa/y")


def test_what_flushing_refuses_is_flushed_the_next_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = FileStore(tmp_path)
    store.put_if_absent("objects/aa/x", b"data")
    flushed: list[str] = []

    def refuse(handle: int) -> None:
        raise OSError(5, "Input/output error")

    def note(handle: int) -> None:
        flushed.append(str(Path(f"/proc/self/fd/{handle}").readlink()))

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(CheckpointError, match=r"cannot flush objects/ .*Input/output"):
        store.sync()
    monkeypatch.setattr(os, "fsync", note)
    store.sync()
    store.sync()

    # Each folder that got an entry, the inner ones first, and each once.
    folders = [str(tmp_path / name) for name in ("objects/aa", "objects", "drafts")]
    assert [folder for folder in flushed if folder in folders[:2]] == folders[:2]
    assert str(tmp_path) in flushed
    assert len(flushed) == len(set(flushed))


def test_a_write_that_is_not_flushed_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = FileStore(tmp_path)

    def refuse(handle: int) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(CheckpointError, match=r"needs 4 B, free"):
        store.put_if_absent("objects/aa/x", b"data")
    with pytest.raises(CheckpointError, match="cannot write LATEST"):
        store.publish_pointer("manifests/1")

    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_damage_is_told_by_length_sum_and_name() -> None:
    data = b"some bytes"
    chunk_id, facts = name_chunk(data), describe_chunk(data)

    assert find_damage(data, chunk_id, facts) is None
    assert find_damage(data[:-1], chunk_id, facts) == "it has 9 bytes instead of 10"
    assert "crc32" in str(find_damage(b"some_bytes", chunk_id, facts))
    # Bytes of the same sum, as an attacker might choose them, under another name.
    assert "name" in str(find_damage(data, name_chunk(b"x"), facts))


def test_a_name_in_a_store_is_spread_over_folders() -> None:
    assert object_name("ab" + "0" * 62) == "objects/ab/ab" + "0" * 62


@pytest.mark.parametrize(("num_bytes", "crc32"), [(0, 1), (-1, 1), (2**23, 1), (1, 2**32)])
def test_bad_facts_cannot_exist(num_bytes: int, crc32: int) -> None:
    with pytest.raises(CheckpointError, match="is none"):
        ChunkFacts(num_bytes=num_bytes, crc32=crc32)


@pytest.mark.parametrize(
    ("chunk_id", "start", "stop"),
    [("ab", 0, 1), ("../" + "0" * 61, 0, 1), ("0" * 64, 1, 1), ("0" * 64, -1, 1)],
)
def test_bad_spans_cannot_exist(chunk_id: str, start: int, stop: int) -> None:
    with pytest.raises(CheckpointError, match="are none"):
        ChunkSpan(chunk_id=chunk_id, start_byte=start, stop_byte=stop)
