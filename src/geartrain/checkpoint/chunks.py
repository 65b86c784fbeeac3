"""Chunks: the objects that all tiers keep, and what a store of them must do.

A chunk's name is the hash of its bytes, so it never changes, is written once however
many versions hold it, and can be taken from any store that has one of that name. Torch
is not imported: the agent that writes chunks does without.
"""

from __future__ import annotations

import logging
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol, TypeVar, runtime_checkable

from blake3 import blake3

from geartrain.errors import CheckpointError

logger = logging.getLogger(__name__)

T = TypeVar("T")

MAX_CHUNK_BYTES = 4 * 2**20
"""Large enough that opening a file costs little beside writing it, small enough that a
damaged one is fetched again in no time."""

OBJECTS = "objects/"
MANIFESTS = "manifests/"
POINTER = "LATEST"
"""The one name in a store whose content changes."""

_CHUNK_ID = re.compile(r"[0-9a-f]{64}\Z")


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkFacts:
    """What a chunk's bytes are checked against, beside its name.

    Its name says more; the sum is for those that can't compute the name.
    """

    num_bytes: int
    crc32: int

    def __post_init__(self) -> None:
        if not 0 < self.num_bytes <= MAX_CHUNK_BYTES or not 0 <= self.crc32 < 2**32:
            msg = (
                f"a chunk of {self.num_bytes} bytes with crc32={self.crc32} is none; "
                f"expected 1 to {MAX_CHUNK_BYTES} bytes and 32 bits"
            )
            raise CheckpointError(msg)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkSpan:
    """Some bytes of a chunk: several small tensors share one."""

    chunk_id: str
    start_byte: int
    stop_byte: int

    def __post_init__(self) -> None:
        if not _CHUNK_ID.match(self.chunk_id) or not 0 <= self.start_byte < self.stop_byte:
            msg = (
                f"bytes {self.start_byte} to {self.stop_byte} of chunk {self.chunk_id!r} "
                "are none; expected a name of 64 hexadecimal digits and start < stop"
            )
            raise CheckpointError(msg)

    @property
    def num_bytes(self) -> int:
        """How many bytes it spans."""
        return self.stop_byte - self.start_byte


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredObject:
    """An object as a store lists it."""

    name: str
    num_bytes: int
    modified_at_s: float
    """Unix time at which it was written, or last found to be there already."""


class ObjectSink(Protocol):
    """Where objects are written to."""

    def put_if_absent(self, name: str, data: bytes | memoryview) -> bool:
        """Write an object whole or not at all; False where it was there already.

        One that was there counts as used now: its age begins anew, where the store can
        do that, so that nobody collects it as garbage meanwhile.
        """
        ...

    def sync(self) -> None:
        """Return when all that was put survives a power cut."""
        ...

    def publish_pointer(self, manifest_name: str) -> None:
        """Replace ``LATEST`` in one step, durably."""
        ...


class ObjectStore(ObjectSink, Protocol):
    """Where objects lie: a directory (tier 2), or anything that fsspec reaches (tier 3).

    Names are relative, with ``/``: ``objects/ab/<chunk id>``, ``manifests/<...>.json``.
    Every method raises ``CheckpointError`` where the store fails, and leaves what was
    there before as it was.
    """

    @property
    def label(self) -> str:
        """Where it is, for a person: a path or a URL without secrets."""
        ...

    def get(self, name: str) -> bytes:
        """Read an object; the caller checks its content."""
        ...

    def has(self, name: str) -> bool:
        """Say whether there is an object of that name."""
        ...

    def list_objects(self, prefix: str) -> Iterator[StoredObject]:
        """List the objects whose names begin so, in any order."""
        ...

    def delete(self, name: str) -> None:
        """Remove an object; one that is not there is no error."""
        ...

    def read_pointer(self) -> str | None:
        """Return what ``LATEST`` holds, None without one; the content is not checked."""
        ...


@runtime_checkable
class FillsBuffers(Protocol):
    """What a store may do besides: read to where the bytes are wanted, without a copy."""

    def get_into(self, name: str, buffer: memoryview) -> int:
        """Read an object of the buffer's size; return its own, and nothing more if other.

        Raises:
            CheckpointError: If there is none, or the store fails.
        """
        ...


def name_chunk(data: bytes | memoryview) -> str:
    """Return the id of a chunk: blake3 of its bytes, in hexadecimal."""
    return blake3(data).hexdigest()


def describe_chunk(data: bytes | memoryview) -> ChunkFacts:
    """Return what a chunk will be checked against."""
    return ChunkFacts(num_bytes=len(data), crc32=zlib.crc32(data))


def object_name(chunk_id: str) -> str:
    """Return a chunk's name in a store; 256 folders keep each of them small.

    >>> object_name("ab" * 32)[:14]
    'objects/ab/aba'
    """
    return f"{OBJECTS}{chunk_id[:2]}/{chunk_id}"


def find_damage(data: bytes | memoryview, chunk_id: str, facts: ChunkFacts) -> str | None:
    """Say what is wrong with a chunk's bytes, None where they are what was saved."""
    if len(data) != facts.num_bytes:
        return _describe_length(len(data), facts)
    if name_chunk(data) == chunk_id:  # as fast as the sum, and proves more than it
        return None
    crc32 = zlib.crc32(data)
    if crc32 != facts.crc32:
        return f"its crc32 is {crc32:08x} instead of {facts.crc32:08x}"
    return "its content does not match its name"


def read_chunk(stores: Sequence[ObjectStore], chunk_id: str, facts: ChunkFacts) -> bytes:
    """Read a chunk from the first store that has it undamaged.

    Raises:
        CheckpointError: If none has, saying what is wrong in each.
    """
    name = object_name(chunk_id)

    def get(store: ObjectStore) -> tuple[bytes, str | None]:
        data = store.get(name)
        return data, find_damage(data, chunk_id, facts)

    return _first_undamaged(stores, chunk_id, get)


def read_chunk_into(
    stores: Sequence[ObjectStore], chunk_id: str, facts: ChunkFacts, buffer: memoryview
) -> None:
    """Read a chunk to where it is wanted, from the first store that has it undamaged.

    Args:
        stores: The preferred one first.
        chunk_id: Which.
        facts: What it is checked against.
        buffer: As long as the chunk. It holds anything after an error.

    Raises:
        CheckpointError: If none has it, saying what is wrong in each.
    """
    name = object_name(chunk_id)

    def get(store: ObjectStore) -> tuple[None, str | None]:
        if not isinstance(store, FillsBuffers):
            data = store.get(name)
            damage = find_damage(data, chunk_id, facts)
            if damage is None:
                buffer[:] = data
            return None, damage
        num_bytes = store.get_into(name, buffer)
        if num_bytes != len(buffer):
            return None, _describe_length(num_bytes, facts)
        return None, find_damage(buffer, chunk_id, facts)

    _first_undamaged(stores, chunk_id, get)


def _first_undamaged(
    stores: Sequence[ObjectStore],
    chunk_id: str,
    get: Callable[[ObjectStore], tuple[T, str | None]],
) -> T:
    problems = []
    for store in stores:
        try:
            data, damage = get(store)
        except CheckpointError as error:
            problems.append(str(error))
            continue
        if damage is None:
            if problems:
                logger.warning("Took a chunk from %s: %s", store.label, "; ".join(problems))
            return data
        problems.append(f"{store.label}/{object_name(chunk_id)} is damaged: {damage}")
    msg = (
        f"no store has chunk {chunk_id[:12]} undamaged ({'; '.join(problems)}); add a "
        "store that holds this version, or load another version"
    )
    raise CheckpointError(msg)


def _describe_length(num_bytes: int, facts: ChunkFacts) -> str:
    return f"it has {num_bytes} bytes instead of {facts.num_bytes}"


def cut_elements(start: int, stop: int, item_bytes: int) -> tuple[tuple[int, int], ...]:
    """Cut a range of elements into chunks.

    Cuts lie at multiples of the chunk size within the whole tensor, not within the range,
    so that another division of the same tensor shares most of its chunks with this one.

    Args:
        start: First element.
        stop: One after the last element.
        item_bytes: Size of an element, a power of two.

    Returns:
        (start, stop) of each chunk, in elements.

    >>> cut_elements(1, 3 * 2**20, 4)
    ((1, 1048576), (1048576, 2097152), (2097152, 3145728))
    """
    stride = MAX_CHUNK_BYTES // item_bytes
    bounds = [start, *range((start // stride + 1) * stride, stop, stride), stop]
    return tuple((first, last) for first, last in pairwise(bounds) if first < last)
