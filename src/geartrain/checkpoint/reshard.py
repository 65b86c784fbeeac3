"""Take up a state with other owners than those that saved it.

Who held what is of no concern to a version: every member reads the ranges that it is to
hold now, three unequal shards or five or one, with equal bits.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from geartrain.checkpoint.manifest import StateManifest, TensorFacts
from geartrain.checkpoint.pieces import HeldPiece, StateReader
from geartrain.checkpoint.ranges import StateRange, check_tiling
from geartrain.checkpoint.state_tensors import empty_tensor, host_bytes
from geartrain.errors import CheckpointError

Shard = dict[StateRange, torch.Tensor]
"""What a member holds: elements of each range, shape (num_elements,)."""


def load_shard(
    reader: StateReader, manifest: StateManifest, ranges: Iterable[StateRange]
) -> Shard:
    """Read the ranges that a member is to hold; it reads no chunk that it doesn't need.

    Raises:
        CheckpointError: If a range is not part of the version, or undamaged in no store.
    """
    shard: Shard = {}
    for part in ranges:
        facts = manifest.tensors.get(part.name)
        if facts is None:
            msg = f"{part} is not part of the version of step {manifest.step}"
            raise CheckpointError(msg)
        shard[part] = empty_tensor(
            TensorFacts(dtype=facts.dtype, shape=(part.num_elements,))
        )
    fill_shard(reader, shard)
    return shard


def fill_shard(reader: StateReader, shard: Shard) -> None:
    """Read the ranges that a member holds into the tensors that it has for them.

    Args:
        reader: Of the version.
        shard: Tensors on the host, contiguous, of shape (num_elements,) and the dtype
            that was saved. They hold anything after an error.

    Raises:
        CheckpointError: If a range is not part of the version, or undamaged in no store.
    """
    reader.read(
        (part, tensor.detach().view(torch.uint8).numpy().data)
        for part, tensor in shard.items()
        if part.num_elements
    )


def cut_shard(tensors: Mapping[str, torch.Tensor], ranges: Iterable[StateRange]) -> Shard:
    """Take the ranges that a member is to hold out of whole tensors, as copies.

    Raises:
        CheckpointError: If a range is not part of them.
    """
    shard: Shard = {}
    for part in ranges:
        tensor = tensors.get(part.name)
        if tensor is None or part.stop > tensor.numel():
            has = "there is none" if tensor is None else f"it has {tensor.numel()} elements"
            msg = f"{part} can't be cut from {part.name}: {has}; correct the range"
            raise CheckpointError(msg)
        flat = tensor.detach().reshape(-1)
        shard[part] = flat[part.start : part.stop].clone()
    return shard


def shard_pieces(shard: Shard) -> Iterable[HeldPiece]:
    """Give out a shard's bytes, to be written.

    Raises:
        CheckpointError: If a tensor doesn't have the size of its range.
    """
    for part, tensor in sorted(shard.items(), key=lambda item: item[0]):
        if tensor.numel() != part.num_elements:
            msg = f"{part} is held as {tensor.numel()} elements; hold all of them"
            raise CheckpointError(msg)
        if part.num_elements:
            yield HeldPiece(range=part, data=host_bytes(tensor.reshape(-1)))


def join_shards(
    tensors: Mapping[str, TensorFacts], shards: Iterable[Shard]
) -> dict[str, torch.Tensor]:
    """Put whole tensors together from all members' shards.

    Raises:
        CheckpointError: If the shards do not tile the tensors.
    """
    held = [item for shard in shards for item in shard.items()]
    sizes = {name: facts.num_elements for name, facts in tensors.items()}
    check_tiling((part for part, _ in held), sizes)
    whole = {name: empty_tensor(facts) for name, facts in tensors.items()}
    for part, tensor in held:
        whole[part.name].view(-1)[part.start : part.stop] = tensor.to("cpu")
    return whole
