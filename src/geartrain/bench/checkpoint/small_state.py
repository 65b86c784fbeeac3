"""States of named bytes, saved and read without torch."""

from __future__ import annotations

from collections.abc import Mapping

from geartrain.checkpoint.local_tier import LocalTier
from geartrain.checkpoint.manifest import TensorFacts
from geartrain.checkpoint.pieces import HeldPiece, StateFacts
from geartrain.checkpoint.ranges import whole_ranges
from geartrain.checkpoint.versions import Version

_FLOAT32_BYTES = 4


def save_bytes(tier: LocalTier, content: Mapping[str, bytes], step: int) -> Version:
    """Save bytes of float32 tensors as the latest version."""
    sizes = {name: len(data) // _FLOAT32_BYTES for name, data in content.items()}
    facts = StateFacts(
        step=step,
        lineage=f"{step:x}",
        created_at_s=float(step),
        tensors={
            name: TensorFacts(dtype="float32", shape=(size,))
            for name, size in sizes.items()
        },
    )
    pieces = [
        HeldPiece(range=part, data=memoryview(content[part.name]))
        for part in whole_ranges(sizes)
    ]
    return tier.save(facts, pieces)


def read_all(tier: LocalTier, version: Version) -> dict[str, bytes]:
    """Read a version whole.

    Raises:
        CheckpointError: If it is damaged.
    """
    facts = version.manifest.tensors
    ranges = whole_ranges({name: one.num_elements for name, one in facts.items()})
    buffers = {part: bytearray(_FLOAT32_BYTES * part.num_elements) for part in ranges}
    tier.reader(version).read(
        (part, memoryview(buffer)) for part, buffer in buffers.items()
    )
    return {part.name: bytes(buffer) for part, buffer in buffers.items()}
