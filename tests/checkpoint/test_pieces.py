from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from geartrain.checkpoint.chunk_store import FileStore
from geartrain.checkpoint.chunks import MAX_CHUNK_BYTES, cut_elements, object_name
from geartrain.checkpoint.local_tier import LocalTier
from geartrain.checkpoint.manifest import LogSegment
from geartrain.checkpoint.pieces import (
    HeldPiece,
    StateReader,
    assemble_manifest,
    decode_part,
    encode_part,
    store_log_segment,
    store_pieces,
)
from geartrain.checkpoint.ranges import StateRange, split_ownership
from geartrain.errors import CheckpointError
from stored_versions import (
    describe,
    facts_of,
    make_content,
    pieces_of,
    read_content,
    read_ranges,
    save,
)

SIZES = {
    "model/large": 5_000_000,  # several chunks
    "model/bias": 7,
    "model/empty": 0,
    "optimizer/moment": 300_000,  # more than shares a chunk
    "optimizer/step": 1,
}


@given(st.integers(0, 3 * 2**20), st.integers(0, 3 * 2**20), st.sampled_from([1, 2, 4, 16]))
def test_cuts_tile_a_range_at_bounds_that_all_divisions_share(
    start: int, length: int, item_bytes: int
) -> None:
    cuts = cut_elements(start, start + length, item_bytes)

    bounds = [start, *(stop for _, stop in cuts)]
    assert [first for first, _ in cuts] == bounds[:-1]
    assert bounds[-1] == start + length
    for first, stop in cuts:
        assert 0 < (stop - first) * item_bytes <= MAX_CHUNK_BYTES
    for inner in bounds[1:-1]:
        assert inner * item_bytes % MAX_CHUNK_BYTES == 0


def test_any_members_write_and_any_others_read(tmp_path: Path) -> None:
    content = make_content(SIZES)
    tier = LocalTier(tmp_path)
    writers = split_ownership(SIZES, {"a": 1.0, "b": 0.2, "c": 3.0})

    parts = [
        decode_part(encode_part(tier.write_part(describe(content), pieces_of(content, o))))
        for o in writers.values()
    ]
    version = tier.publish(assemble_manifest(facts_of(content), parts))

    for count in (2, 5, 1):
        readers = split_ownership(SIZES, {str(i): i + 1.0 for i in range(count)})
        for owned in readers.values():
            read = read_ranges(tier.reader(version), owned)
            assert read == [bytes(piece.data) for piece in pieces_of(content, owned)]


def test_small_pieces_share_a_chunk_within_their_component(tmp_path: Path) -> None:
    content = make_content({f"{c}/{i}": 3 for c in ("model", "ema") for i in range(500)})

    version = save(LocalTier(tmp_path), content)

    assert len(version.manifest.chunks) == 2


def test_packs_stay_within_the_size_of_a_chunk(tmp_path: Path) -> None:
    content = make_content({f"model/{i}": 200_000 for i in range(12)})

    version = save(LocalTier(tmp_path), content)

    sizes = sorted(facts.num_bytes for facts in version.manifest.chunks.values())
    assert sizes == [1_600_000, 4_000_000, 4_000_000]
    assert read_content(LocalTier(tmp_path).reader(version), version) == content


def test_a_part_that_is_missing_or_there_twice_is_named(tmp_path: Path) -> None:
    content = make_content({"model/w": 10})
    first, second = (StateRange(name="model/w", start=i, stop=i + 5) for i in (0, 5))
    store = FileStore(tmp_path)
    part = store_pieces(store, describe(content), pieces_of(content, [first]))
    other = store_pieces(store, describe(content), pieces_of(content, [second]))

    with pytest.raises(CheckpointError, match=r"nobody holds model/w\[5:10\]"):
        assemble_manifest(facts_of(content), [part])
    with pytest.raises(CheckpointError, match="overlap"):
        assemble_manifest(facts_of(content), [part, other, part])
    assert len(assemble_manifest(facts_of(content), [other, part]).pieces) == 2


@pytest.mark.parametrize(
    ("name", "stop", "data", "problem"),
    [
        ("model/v", 1, b"0000", "no such tensor"),
        ("model/w", 11, b"0" * 44, "only 10 elements"),
        ("model/w", 10, b"0" * 39, "39 items of format 'B', expected 40 bytes"),
    ],
)
def test_a_piece_that_does_not_fit_is_named(
    tmp_path: Path, name: str, stop: int, data: bytes, problem: str
) -> None:
    piece = HeldPiece(
        range=StateRange(name=name, start=0, stop=stop), data=memoryview(data)
    )

    with pytest.raises(CheckpointError, match=problem):
        store_pieces(FileStore(tmp_path), describe({"model/w": bytes(40)}), [piece])


@pytest.mark.parametrize(
    ("name", "stop", "length", "problem"),
    [
        ("model/v", 1, 4, "no such tensor"),
        ("model/w", 11, 44, "the version has 10 elements"),
        ("model/w", 10, 36, "has 40 bytes, but the buffer has 36"),
    ],
)
def test_a_read_of_what_is_not_there_is_refused(
    tmp_path: Path, name: str, stop: int, length: int, problem: str
) -> None:
    tier = LocalTier(tmp_path)
    version = save(tier, make_content({"model/w": 10}))
    part = StateRange(name=name, start=0, stop=stop)

    with pytest.raises(CheckpointError, match=problem):
        tier.reader(version).read([(part, memoryview(bytearray(length)))])


class CountingStore(FileStore):
    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.names: list[str] = []

    def get(self, name: str) -> bytes:
        self.names.append(name)
        return super().get(name)


def test_only_the_chunks_needed_are_read_and_each_once(tmp_path: Path) -> None:
    content = make_content(SIZES | {f"model/{i}": 9 for i in range(50)})
    version = save(LocalTier(tmp_path), content)
    store = CountingStore(tmp_path)
    wanted = [StateRange(name=f"model/{i}", start=2, stop=7) for i in range(50)]
    wanted.append(StateRange(name="model/large", start=1_048_000, stop=1_049_000))

    read = read_ranges(StateReader([store], version.manifest), wanted)

    assert read == [bytes(piece.data) for piece in pieces_of(content, wanted)]
    assert len(store.names) == len(set(store.names)) == 3


def test_a_bad_chunk_comes_from_the_next_store_that_has_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    content = make_content(SIZES)
    version = save(LocalTier(tmp_path / "a"), content)
    save(LocalTier(tmp_path / "b"), content)
    chunk_ids = sorted(version.manifest.chunks)
    damage(tmp_path / "a" / object_name(chunk_ids[0]), b"short")
    flip(tmp_path / "a" / object_name(chunk_ids[1]))
    (tmp_path / "a" / object_name(chunk_ids[2])).unlink()
    (tmp_path / "b" / object_name(chunk_ids[3])).unlink()
    stores = [FileStore(tmp_path / name) for name in ("a", "b")]

    read = read_content(StateReader(stores, version.manifest), version)

    assert read == content
    for chunk_id in chunk_ids[:3]:
        assert chunk_id in caplog.text
    assert chunk_ids[3] not in caplog.text


def test_a_chunk_that_no_store_has_undamaged_is_named_with_every_reason(
    tmp_path: Path,
) -> None:
    content = make_content({"model/w": 10})
    version = save(LocalTier(tmp_path / "a"), content)
    chunk_id = next(iter(version.manifest.chunks))
    flip(tmp_path / "a" / object_name(chunk_id))
    stores = [FileStore(tmp_path / "a"), FileStore(tmp_path / "gone")]

    with pytest.raises(CheckpointError, match=r"its crc32 is .*; .*No such file") as caught:
        read_content(StateReader(stores, version.manifest), version)

    assert chunk_id[:12] in str(caught.value)


def test_what_a_store_refuses_ends_the_writing_and_its_threads(tmp_path: Path) -> None:
    class Refusing(FileStore):
        def put_if_absent(self, name: str, data: bytes | memoryview) -> bool:
            msg = "full"
            raise CheckpointError(msg)

    content = make_content({f"model/{i}": 300_000 for i in range(40)})

    with pytest.raises(CheckpointError, match="full"):
        store_pieces(Refusing(tmp_path), describe(content), pieces_of(content))

    assert not [t for t in threading.enumerate() if t.name.startswith("geartrain-chunks")]


def test_log_segments_are_part_of_the_manifest(tmp_path: Path) -> None:
    content = make_content({"model/w": 10})
    tier = LocalTier(tmp_path)
    log = bytes(range(256)) * 20_000
    segment = LogSegment(first_step=2, last_step=9, lineage="x", codec="raw", spans=())

    state = tier.write_part(describe(content), pieces_of(content))
    gradients = store_log_segment(tier.store, memoryview(log), segment)
    version = tier.publish(assemble_manifest(facts_of(content), [state, gradients]))

    (found,) = tier.read(version.name).manifest.log_segments
    assert replace(found, spans=()) == segment
    assert b"".join(tier.reader(version).read_spans(found.spans)) == log


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    damage(path, bytes(data))


def damage(path: Path, data: bytes) -> None:
    path.write_bytes(data)
