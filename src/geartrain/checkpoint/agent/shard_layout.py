"""Where each part of a shard lies in a buffer, and copying it there."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from geartrain.checkpoint.agent.messages import Json, ShardChunk, SlotPart, SnapshotFacts
from geartrain.checkpoint.chunks import cut_elements
from geartrain.checkpoint.manifest import TensorFacts
from geartrain.checkpoint.ranges import StateRange
from geartrain.errors import CheckpointError

_ALIGNMENT_BYTES = 64  # a cache line, and enough for every dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardLayout:
    """A shard laid out; made once, since neither names nor sizes change."""

    tensors: dict[str, TensorFacts]
    chunks: tuple[ShardChunk, ...]
    places: tuple[tuple[StateRange, int], ...]
    """Ranges and the offset of each, in bytes."""
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotLabel:
    """Which state a snapshot holds, and whose part of it."""

    member_id: str
    incarnation: str
    step: int
    lineage: str
    extras: dict[str, Json]


def lay_out(
    tensors: Mapping[str, torch.Tensor], owned: Iterable[StateRange]
) -> ShardLayout:
    """Lay the owned ranges out, one after the other.

    Args:
        tensors: Whole tensors of the state by name, contiguous.
        owned: What this member keeps; empty ranges are left out.

    Raises:
        CheckpointError: If a range is of no tensor, or a tensor is not contiguous.
    """
    facts: dict[str, TensorFacts] = {}
    chunks: list[ShardChunk] = []
    places: list[tuple[StateRange, int]] = []
    end = 0
    for part in owned:
        tensor = tensors.get(part.name)
        if tensor is None or part.stop > tensor.numel() or not tensor.is_contiguous():
            has = "is missing" if tensor is None else f"has shape {tuple(tensor.shape)}"
            msg = (
                f"{part} can't be copied: the tensor {has}; give ranges of contiguous "
                "tensors of the state"
            )
            raise CheckpointError(msg)
        facts[part.name] = describe_tensor(tensor)
        if not part.num_elements:
            continue
        begin, size = -(-end // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES, tensor.element_size()
        places.append((part, begin))
        for start, stop in cut_elements(part.start, part.stop, size):
            offset = begin + (start - part.start) * size
            chunks.append(ShardChunk(part.name, start, stop, offset, (stop - start) * size))
        end = begin + part.num_elements * size
    return ShardLayout(
        tensors=facts, chunks=tuple(chunks), places=tuple(places), num_bytes=end
    )


def copy_shard(
    layout: ShardLayout, tensors: Mapping[str, torch.Tensor], buffer: memoryview
) -> None:
    """Copy a shard into a buffer; training stands still for as long.

    Args:
        layout: Of these tensors.
        tensors: Whole tensors by name, on any device.
        buffer: At least ``layout.num_bytes`` long.
    """
    whole = torch.frombuffer(buffer, dtype=torch.uint8)
    for part, offset in layout.places:
        source = tensors[part.name].detach().view(-1)[part.start : part.stop]
        target = whole[offset : offset + source.numel() * source.element_size()]
        target.view(source.dtype).copy_(source)


def make_facts(
    layout: ShardLayout,
    label: SnapshotLabel,
    tensors: Mapping[str, TensorFacts] | None = None,
) -> SnapshotFacts:
    """What to seal the buffer with.

    Args:
        layout: Of the buffer.
        label: Which state it holds.
        tensors: All of that state, so that it is known when it is whole; None: those of
            which the layout has a part.
    """
    return SnapshotFacts(
        member_id=label.member_id,
        incarnation=label.incarnation,
        step=label.step,
        lineage=label.lineage,
        num_bytes=layout.num_bytes,
        tensors=layout.tensors if tensors is None else dict(tensors),
        chunks=layout.chunks,
        extras=label.extras,
    )


def copy_gradients(
    parts: Iterable[tuple[StateRange, torch.Tensor]], slot: memoryview
) -> tuple[SlotPart, ...]:
    """Copy parts of a reduced gradient, or buffers, into a log slot.

    Args:
        parts: Ranges and the elements of each, shape (range.num_elements,).
        slot: At least as long as all of them.

    Returns:
        What lies where.

    Raises:
        CheckpointError: If the slot is too short.
    """
    whole = torch.frombuffer(slot, dtype=torch.uint8)
    placed: list[SlotPart] = []
    end = 0
    for part, values in parts:
        size = values.element_size()
        begin = -(-end // size) * size
        end = begin + values.numel() * size
        if end > len(slot):
            msg = f"{part} ends at byte {end}, the log slot at {len(slot)}; reserve more"
            raise CheckpointError(msg)
        if values.numel():
            whole[begin:end].view(values.dtype).copy_(values.detach().reshape(-1))
        dtype = str(values.dtype).removeprefix("torch.")
        placed.append(SlotPart(part.name, part.start, part.stop, dtype, begin, end - begin))
    return tuple(placed)


def describe_tensor(tensor: torch.Tensor) -> TensorFacts:
    """A tensor's dtype and shape, as manifests have them."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    return TensorFacts(dtype=dtype, shape=tuple(tensor.shape))
