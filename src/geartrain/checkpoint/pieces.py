"""Write the pieces that one member holds as chunks, and read any range of a version.

Large pieces are cut into chunks, small ones share a chunk: an optimizer has hundreds of
tensors of a few bytes, and a file each would cost a flush of the disk each.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Literal

import msgspec

from geartrain.checkpoint.chunks import (
    MAX_CHUNK_BYTES,
    ChunkFacts,
    ChunkSpan,
    ObjectSink,
    ObjectStore,
    cut_elements,
    describe_chunk,
    name_chunk,
    object_name,
    read_chunk,
    read_chunk_into,
)
from geartrain.checkpoint.manifest import (
    Json,
    LogSegment,
    Piece,
    StateManifest,
    TensorFacts,
)
from geartrain.checkpoint.ranges import StateRange
from geartrain.errors import CheckpointError

_SHARES_A_CHUNK_BYTES = 2**20  # below it, a flush costs more than writing the bytes
_NUM_THREADS = 4  # hashing, checking and flushing leave Python's lock free


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldPiece:
    """Elements that a member holds."""

    range: StateRange
    data: memoryview
    """Their bytes, little-endian, one dimension of format ``B``; not copied."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredPart:
    """What one writer has stored; whoever writes the manifest gets one from each."""

    pieces: tuple[Piece, ...] = ()
    chunks: dict[str, ChunkFacts] = field(default_factory=dict)
    log_segments: tuple[LogSegment, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class StateFacts:
    """What a manifest says beside what its writers have stored; see ``StateManifest``."""

    step: int
    lineage: str
    created_at_s: float
    tensors: dict[str, TensorFacts]
    kind: Literal["full", "weights"] = "full"
    structure: dict[str, Json] = field(default_factory=dict)
    extras: dict[str, Json] = field(default_factory=dict)
    plan_fingerprint: str = ""
    config: dict[str, Json] = field(default_factory=dict)


def store_pieces(
    store: ObjectSink, tensors: Mapping[str, TensorFacts], pieces: Iterable[HeldPiece]
) -> StoredPart:
    """Write what one member holds; objects that are there already are not written again.

    Args:
        store: Where to.
        tensors: The whole tensors, of which the pieces are part.
        pieces: Taken one after the other, so that they may be made on the way.

    Returns:
        What to put into a manifest. It is durable only after the store's ``sync``.

    Raises:
        CheckpointError: If a piece does not fit its tensor, or the store fails.
    """
    with ThreadPoolExecutor(_NUM_THREADS, "geartrain-chunks") as pool:
        writer = _ChunkWriter(store, pool)
        try:
            for piece in pieces:
                writer.add(piece, _item_bytes(piece, tensors))
            return writer.finish()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def store_log_segment(
    store: ObjectSink, data: memoryview, segment: LogSegment
) -> StoredPart:
    """Write reduced gradients.

    Args:
        store: Where to.
        data: Bytes of the segment, in the codec that it names.
        segment: What they are; its spans are filled in.

    Raises:
        CheckpointError: If the store fails.
    """
    chunks: dict[str, ChunkFacts] = {}
    spans = []
    for start, stop in cut_elements(0, len(data), 1):
        chunk_id, facts = _put(store, data[start:stop])
        chunks[chunk_id] = facts
        spans.append(ChunkSpan(chunk_id=chunk_id, start_byte=0, stop_byte=facts.num_bytes))
    return StoredPart(chunks=chunks, log_segments=(replace(segment, spans=tuple(spans)),))


def assemble_manifest(facts: StateFacts, parts: Iterable[StoredPart]) -> StateManifest:
    """Put together what all writers have stored.

    Raises:
        CheckpointError: If the parts do not tile the tensors, naming what is missing or
            there twice.
    """
    pieces: list[Piece] = []
    chunks: dict[str, ChunkFacts] = {}
    segments: list[LogSegment] = []
    for part in parts:
        pieces += part.pieces
        chunks |= part.chunks
        segments += part.log_segments
    return StateManifest(
        step=facts.step,
        lineage=facts.lineage,
        created_at_s=facts.created_at_s,
        kind=facts.kind,
        tensors=facts.tensors,
        pieces=tuple(sorted(pieces, key=lambda piece: piece.range)),
        chunks=dict(sorted(chunks.items())),
        structure=facts.structure,
        extras=facts.extras,
        log_segments=tuple(sorted(segments, key=lambda segment: segment.first_step)),
        plan_fingerprint=facts.plan_fingerprint,
        config=facts.config,
    )


def encode_part(part: StoredPart) -> bytes:
    """Write a part as JSON, to send it to whoever puts the manifest together."""
    return msgspec.json.encode(part)


def decode_part(data: bytes) -> StoredPart:
    """Read a part.

    Raises:
        CheckpointError: If it is none.
    """
    try:
        return msgspec.json.decode(data, type=StoredPart)
    except (msgspec.DecodeError, CheckpointError) as error:
        msg = f"what a writer has stored can't be read: {error}; let it write again"
        raise CheckpointError(msg) from error


class StateReader:
    """Reads any ranges of one version, from whichever store has them undamaged.

    Args:
        stores: The preferred one first.
        manifest: The version.
    """

    def __init__(self, stores: Sequence[ObjectStore], manifest: StateManifest) -> None:
        self._stores = tuple(stores)
        self._manifest = manifest
        self._pieces: dict[str, list[Piece]] = defaultdict(list)
        for piece in sorted(manifest.pieces, key=lambda piece: piece.range):
            self._pieces[piece.name].append(piece)

    def read(self, targets: Iterable[tuple[StateRange, memoryview]]) -> None:
        """Fill buffers; a chunk that several share is read and checked once.

        Args:
            targets: Ranges, and where to put the bytes of each: one dimension of format
                ``B``, as long as the range.

        Raises:
            CheckpointError: If a range is not part of the version, or a chunk is
                undamaged in no store. The buffers hold anything then.
        """
        copies: dict[str, list[tuple[memoryview, int]]] = defaultdict(list)
        for part, buffer in targets:
            self._plan(part, buffer, copies)
        with ThreadPoolExecutor(_NUM_THREADS, "geartrain-chunks") as pool:
            pending = [
                pool.submit(self._copy, chunk_id, places)
                for chunk_id, places in copies.items()
            ]
            try:
                for future in pending:
                    future.result()
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise

    def read_spans(self, spans: Iterable[ChunkSpan]) -> Iterator[bytes]:
        """Read bytes of chunks one after the other, such as those of a log segment.

        Raises:
            CheckpointError: If a chunk is undamaged in no store.
        """
        for span in spans:
            facts = self._manifest.chunks[span.chunk_id]
            data = read_chunk(self._stores, span.chunk_id, facts)
            yield data[span.start_byte : span.stop_byte]

    def _plan(
        self,
        part: StateRange,
        buffer: memoryview,
        copies: dict[str, list[tuple[memoryview, int]]],
    ) -> None:
        facts = self._manifest.tensors.get(part.name)
        if facts is None or part.stop > facts.num_elements:
            has = "no such tensor" if facts is None else f"{facts.num_elements} elements"
            msg = f"{part} does not exist: the version has {has}; ask for what it holds"
            raise CheckpointError(msg)
        size = facts.item_bytes
        if len(buffer) != part.num_elements * size:
            msg = (
                f"{part} has {part.num_elements * size} bytes, but the buffer has "
                f"{len(buffer)}; give one of that size"
            )
            raise CheckpointError(msg)
        pieces = self._pieces[part.name]
        index = bisect_right(pieces, part.start, key=lambda piece: piece.start) - 1
        for piece in pieces[max(index, 0) :]:
            if piece.start >= part.stop:
                break
            first, last = max(part.start, piece.start), min(part.stop, piece.stop)
            if first < last:
                target = buffer[(first - part.start) * size : (last - part.start) * size]
                _plan_spans(piece, (first - piece.start) * size, target, copies)

    def _copy(self, chunk_id: str, places: list[tuple[memoryview, int]]) -> None:
        facts = self._manifest.chunks[chunk_id]
        first, start = places[0]
        if len(places) == 1 and start == 0 and len(first) == facts.num_bytes:
            read_chunk_into(self._stores, chunk_id, facts, first)
            return
        data = read_chunk(self._stores, chunk_id, facts)
        for target, start in places:
            target[:] = memoryview(data)[start : start + len(target)]


def _plan_spans(
    piece: Piece,
    offset: int,
    target: memoryview,
    copies: dict[str, list[tuple[memoryview, int]]],
) -> None:
    """Note which bytes of which chunks go into a target.

    Args:
        piece: Where they lie.
        offset: Of the target's first byte within the piece.
        target: Where they go.
        copies: Places to fill and the first byte within the chunk, by chunk.
    """
    position = 0  # of the span within the piece
    for span in piece.spans:
        start, stop = max(offset, position), position + span.num_bytes
        stop = min(stop, offset + len(target))
        if start < stop:
            within = span.start_byte + start - position
            copies[span.chunk_id].append((target[start - offset : stop - offset], within))
        position += span.num_bytes


@dataclass(frozen=True, slots=True)
class _Slot:
    """Bytes of a chunk that is still being written."""

    stored: Future[tuple[str, ChunkFacts]]
    start_byte: int
    stop_byte: int


class _ChunkWriter:
    """Cuts and packs pieces, and writes a few chunks at a time."""

    def __init__(self, store: ObjectSink, pool: ThreadPoolExecutor) -> None:
        self._store = store
        self._pool = pool
        self._slots: list[tuple[StateRange, list[_Slot]]] = []
        self._running: deque[Future[tuple[str, ChunkFacts]]] = deque()
        self._pack: list[HeldPiece] = []
        self._pack_bytes = 0

    def add(self, piece: HeldPiece, item_bytes: int) -> None:
        """Take a piece; it is written now, or with others of its kind later."""
        num_bytes = len(piece.data)
        if num_bytes >= _SHARES_A_CHUNK_BYTES:
            self._cut(piece, item_bytes)
        elif num_bytes:
            is_other = self._pack and _component(self._pack[-1]) != _component(piece)
            if is_other or self._pack_bytes + num_bytes > MAX_CHUNK_BYTES:
                self._write_pack()
            self._pack.append(piece)
            self._pack_bytes += num_bytes

    def finish(self) -> StoredPart:
        """Wait for what is being written, and say what it is."""
        self._write_pack()
        chunks: dict[str, ChunkFacts] = {}
        pieces = []
        for part, slots in self._slots:
            spans = []
            for slot in slots:
                chunk_id, facts = slot.stored.result()
                chunks[chunk_id] = facts
                spans.append(
                    ChunkSpan(
                        chunk_id=chunk_id,
                        start_byte=slot.start_byte,
                        stop_byte=slot.stop_byte,
                    )
                )
            pieces.append(
                Piece(name=part.name, start=part.start, stop=part.stop, spans=tuple(spans))
            )
        return StoredPart(pieces=tuple(pieces), chunks=chunks)

    def _cut(self, piece: HeldPiece, item_bytes: int) -> None:
        slots = []
        begin = piece.range.start
        for start, stop in cut_elements(begin, piece.range.stop, item_bytes):
            data = piece.data[(start - begin) * item_bytes : (stop - begin) * item_bytes]
            slots.append(_Slot(self._submit(data), 0, len(data)))
        self._slots.append((piece.range, slots))

    def _write_pack(self) -> None:
        if not self._pack:
            return
        stored = self._submit(memoryview(b"".join(piece.data for piece in self._pack)))
        position = 0
        for piece in self._pack:
            end = position + len(piece.data)
            self._slots.append((piece.range, [_Slot(stored, position, end)]))
            position = end
        self._pack, self._pack_bytes = [], 0

    def _submit(self, data: memoryview) -> Future[tuple[str, ChunkFacts]]:
        # Few at a time: pieces may be copied from a device as they are taken.
        while len(self._running) >= 2 * _NUM_THREADS:
            self._running.popleft().result()
        future = self._pool.submit(_put, self._store, data)
        self._running.append(future)
        return future


def _put(store: ObjectSink, data: memoryview) -> tuple[str, ChunkFacts]:
    chunk_id = name_chunk(data)
    store.put_if_absent(object_name(chunk_id), data)
    return chunk_id, describe_chunk(data)


def _component(piece: HeldPiece) -> str:
    # What changes with every step and what is frozen should not share a chunk.
    return piece.range.name.partition("/")[0]


def _item_bytes(piece: HeldPiece, tensors: Mapping[str, TensorFacts]) -> int:
    facts = tensors.get(piece.range.name)
    if facts is None or piece.range.stop > facts.num_elements:
        has = "no such tensor" if facts is None else f"only {facts.num_elements} elements"
        msg = f"{piece.range} is no part of the state, which has {has}; name it otherwise"
        raise CheckpointError(msg)
    expected = piece.range.num_elements * facts.item_bytes
    if len(piece.data) != expected or piece.data.format != "B":
        msg = (
            f"{piece.range} came with {len(piece.data)} items of format "
            f"{piece.data.format!r}, expected {expected} bytes; cast the view to 'B'"
        )
        raise CheckpointError(msg)
    return facts.item_bytes
