from __future__ import annotations

from pathlib import Path

import pytest
import torch

from geartrain.checkpoint.local_tier import LocalTier
from geartrain.checkpoint.manifest import TensorFacts
from geartrain.checkpoint.pieces import StateFacts, assemble_manifest
from geartrain.checkpoint.ranges import StateRange, split_ownership
from geartrain.checkpoint.reshard import (
    Shard,
    cut_shard,
    fill_shard,
    join_shards,
    load_shard,
    shard_pieces,
)
from geartrain.checkpoint.state_tensors import describe_tensor
from geartrain.errors import CheckpointError

TENSORS = {
    "model/embed": torch.randn(70, 33),
    "model/half": torch.randn(1001).bfloat16(),
    "model/complex": torch.randn(7, 5, dtype=torch.complex64),
    "model/empty": torch.zeros(3, 0),
    "optimizer/step": torch.tensor(17),
    "optimizer/codes": torch.arange(900).remainder(251).to(torch.uint8).reshape(30, 30),
    "optimizer/large": torch.randn(1_500_000, dtype=torch.float64),
    "optimizer/mask": torch.arange(11) % 3 == 0,
}
FACTS = {name: describe_tensor(tensor) for name, tensor in TENSORS.items()}
SIZES = {name: tensor.numel() for name, tensor in TENSORS.items()}


def same_bits(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    return tensor.dtype == other.dtype and torch.equal(
        tensor.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8)
    )


def save_shards(place: Path, shards: list[Shard], step: int) -> LocalTier:
    tier = LocalTier(place)
    # Every member with a writer of its own, then one puts the manifest together.
    parts = [LocalTier(place).write_part(FACTS, shard_pieces(shard)) for shard in shards]
    facts = StateFacts(step=step, lineage="x", created_at_s=float(step), tensors=FACTS)
    tier.publish(assemble_manifest(facts, parts))
    return tier


def test_unequal_shards_become_any_others_with_equal_bits(tmp_path: Path) -> None:
    weights = [
        {"fast": 5.0, "slow": 0.3, "middle": 2.0},
        {"a": 1.0, "b": 3.0},
        {"v": 1.0, "w": 1.0, "x": 0.0, "y": 8.0, "z": 2.0},
        {"alone": 1.0},
    ]
    owned = [split_ownership(SIZES, w) for w in weights]
    shards = [cut_shard(TENSORS, ranges) for ranges in owned[0].values()]

    for step, after in enumerate(owned[1:], start=1):
        tier = save_shards(tmp_path, shards, step)
        version = tier.latest()
        assert version is not None
        assert version.manifest.step == step
        shards = [
            load_shard(tier.reader(version), version.manifest, ranges)
            for ranges in after.values()
        ]
        for shard in shards:
            for part, tensor in shard.items():
                expected = TENSORS[part.name].reshape(-1)[part.start : part.stop]
                assert same_bits(tensor, expected)

    whole = join_shards(FACTS, shards)
    assert list(whole) == list(TENSORS)
    for name, tensor in TENSORS.items():
        assert whole[name].shape == tensor.shape
        assert same_bits(whole[name], tensor)


def test_another_division_writes_few_new_chunks(tmp_path: Path) -> None:
    tensors = {"optimizer/large": torch.randn(8 * 2**20)}
    facts = {name: describe_tensor(tensor) for name, tensor in tensors.items()}
    sizes = {"optimizer/large": 8 * 2**20}
    chunk_ids: list[set[str]] = []
    for weights in ({"a": 1.0}, {"a": 1.0, "b": 2.0}):
        chunk_ids.append(set())
        for ranges in split_ownership(sizes, weights).values():
            shard = cut_shard(tensors, ranges)
            part = LocalTier(tmp_path).write_part(facts, shard_pieces(shard))
            chunk_ids[-1] |= part.chunks.keys()

    assert len(chunk_ids[0]) == 8
    assert len(chunk_ids[1] - chunk_ids[0]) == 2  # both sides of the one new cut


def test_cut_shards_are_copies() -> None:
    tensor = torch.zeros(4)
    part = StateRange(name="w", start=0, stop=4)

    shard = cut_shard({"w": tensor}, [part])
    tensor.fill_(1)

    assert shard[part].tolist() == [0, 0, 0, 0]


def test_a_shard_is_read_into_the_tensors_that_are_there(tmp_path: Path) -> None:
    tier = save_shards(tmp_path, [cut_shard(TENSORS, all_ranges())], step=1)
    version = tier.latest()
    assert version is not None
    half = StateRange(name="optimizer/large", start=500_000, stop=1_500_000)
    weight = torch.nn.Parameter(torch.zeros(1000, dtype=torch.bfloat16))
    shard = {
        half: torch.zeros(1_000_000, dtype=torch.float64),
        StateRange(name="model/half", start=1, stop=1001): weight,
    }

    fill_shard(tier.reader(version), shard)

    assert same_bits(shard[half], TENSORS["optimizer/large"][500_000:])
    assert same_bits(weight, TENSORS["model/half"][1:])


def test_what_is_not_there_is_named(tmp_path: Path) -> None:
    tier = save_shards(tmp_path, [cut_shard(TENSORS, all_ranges())], step=1)
    version = tier.latest()
    assert version is not None
    reader, manifest = tier.reader(version), version.manifest
    unknown = StateRange(name="model/v", start=0, stop=1)
    beyond = StateRange(name="model/half", start=1000, stop=1002)

    with pytest.raises(CheckpointError, match=r"model/v\[0:1\] is not part"):
        load_shard(reader, manifest, [unknown])
    with pytest.raises(CheckpointError, match="the version has 1001 elements"):
        load_shard(reader, manifest, [beyond])
    for part in (unknown, beyond):
        with pytest.raises(CheckpointError, match="can't be cut"):
            cut_shard(TENSORS, [part])
    with pytest.raises(CheckpointError, match="is held as 1 elements"):
        list(shard_pieces({beyond: torch.zeros(1)}))


def test_shards_that_do_not_tile_are_not_joined() -> None:
    facts = {"w": TensorFacts(dtype="float32", shape=(4,))}
    half = cut_shard({"w": torch.zeros(4)}, [StateRange(name="w", start=0, stop=2)])

    with pytest.raises(CheckpointError, match=r"nobody holds w\[2:4\]"):
        join_shards(facts, [half])
    with pytest.raises(CheckpointError, match="overlap"):
        join_shards(facts, [half, half])


def all_ranges() -> tuple[StateRange, ...]:
    return split_ownership(SIZES, {"all": 1.0})["all"]
