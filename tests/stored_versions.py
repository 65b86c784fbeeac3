"""Small states of named bytes, for tests that need no torch."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping

from geartrain.checkpoint.local_tier import LocalTier
from geartrain.checkpoint.manifest import TensorFacts
from geartrain.checkpoint.pieces import HeldPiece, StateFacts, StateReader
from geartrain.checkpoint.ranges import StateRange, whole_ranges
from geartrain.checkpoint.versions import Version

Content = dict[str, bytes]


def make_content(num_elements: Mapping[str, int], seed: int = 0) -> Content:
    """Bytes of float32 tensors by name."""
    source = random.Random(seed)
    return {name: source.randbytes(4 * count) for name, count in num_elements.items()}


def describe(content: Content) -> dict[str, TensorFacts]:
    return {
        name: TensorFacts(dtype="float32", shape=(len(data) // 4,))
        for name, data in content.items()
    }


def facts_of(content: Content, step: int = 1, created_at_s: float = 1.0) -> StateFacts:
    return StateFacts(
        step=step,
        lineage=f"line{step}",
        created_at_s=created_at_s,
        tensors=describe(content),
    )


def pieces_of(
    content: Content, ranges: Iterable[StateRange] | None = None
) -> list[HeldPiece]:
    if ranges is None:
        ranges = whole_ranges({name: len(data) // 4 for name, data in content.items()})
    return [
        HeldPiece(
            range=part,
            data=memoryview(content[part.name])[4 * part.start : 4 * part.stop],
        )
        for part in ranges
    ]


def save(tier: LocalTier, content: Content, step: int = 1) -> Version:
    return tier.save(
        facts_of(content, step=step, created_at_s=float(step)), pieces_of(content)
    )


def read_ranges(reader: StateReader, ranges: Iterable[StateRange]) -> list[bytes]:
    ordered = list(ranges)
    buffers = [bytearray(4 * part.num_elements) for part in ordered]
    reader.read(
        (part, memoryview(data)) for part, data in zip(ordered, buffers, strict=True)
    )
    return [bytes(data) for data in buffers]


def read_content(reader: StateReader, version: Version) -> Content:
    facts = version.manifest.tensors
    ranges = whole_ranges({name: fact.num_elements for name, fact in facts.items()})
    read = dict(
        zip((part.name for part in ranges), read_ranges(reader, ranges), strict=True)
    )
    return {name: read.get(name, b"") for name in facts}
