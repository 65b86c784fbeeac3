"""Two members save a state, three load it: geartrain and ``dcp``, in turn.

Dims: the tensors are cut along their first dim for DCP, into runs of elements here.
"""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_loader import load as load_dcp
from torch.distributed.checkpoint.state_dict_saver import save as save_dcp
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from geartrain.bench.checkpoint.orders import (
    LOADED_BY,
    SAVED_BY,
    ReshardFound,
    ReshardOrder,
)
from geartrain.bench.checkpoint.worker_process import read_order, write_result
from geartrain.checkpoint.local_tier import LocalTier
from geartrain.checkpoint.pieces import StateFacts, StoredPart, assemble_manifest
from geartrain.checkpoint.ranges import StateRange, split_ownership
from geartrain.checkpoint.reshard import cut_shard, fill_shard, shard_pieces
from geartrain.checkpoint.state_tensors import describe_tensor

_LIMIT = timedelta(seconds=120)
_NUM_TENSORS = 12
"""Weights and two moments of four layers."""

State = dict[str, torch.Tensor]


class _Reshard:
    def __init__(self, order: ReshardOrder) -> None:
        self._rank = order.rank
        self._folder = Path(order.state.folder)
        store = dist.FileStore(  # type: ignore[attr-defined]  # not in its __all__
            str(self._folder / "store"), LOADED_BY
        )
        dist.init_process_group(
            "gloo", store=store, rank=order.rank, world_size=LOADED_BY, timeout=_LIMIT
        )
        self._savers = dist.new_group(list(range(SAVED_BY)))
        torch.manual_seed(0)
        dim = order.state.dim
        self._state = {f"model/w{i}": torch.randn(dim, dim) for i in range(_NUM_TENSORS)}
        self._sizes = {name: tensor.numel() for name, tensor in self._state.items()}
        self.state_bytes = 4 * sum(self._sizes.values())
        self._dcp_folder = self._folder / "dcp"
        self._facts = {name: describe_tensor(t) for name, t in self._state.items()}

    def save_dcp(self) -> None:
        """By the first two."""
        mesh = DeviceMesh("cpu", list(range(SAVED_BY)))
        if self._rank < SAVED_BY:
            state = _cut(self._state, mesh)
            save_dcp(state, checkpoint_id=self._dcp_folder, process_group=self._savers)

    def save(self) -> None:
        """By the first two; one of them publishes."""
        if self._rank < SAVED_BY:
            shard = cut_shard(self._state, self._owned(SAVED_BY))
            part = LocalTier(self._folder / "ours").write_part(
                self._facts, shard_pieces(shard)
            )
            self._part_path(self._rank).write_bytes(msgspec.json.encode(part))
        dist.barrier()
        if self._rank == 0:
            parts = [
                msgspec.json.decode(self._part_path(rank).read_bytes(), type=StoredPart)
                for rank in range(SAVED_BY)
            ]
            facts = StateFacts(step=1, lineage="", created_at_s=1.0, tensors=self._facts)
            LocalTier(self._folder / "ours").publish(assemble_manifest(facts, parts))

    def load_dcp(self, target: dict[str, DTensor]) -> None:
        """By all three."""
        load_dcp(dict(target), checkpoint_id=self._dcp_folder)

    def load(self, target: dict[StateRange, torch.Tensor]) -> None:
        """By all three; the manifest is read and checked, too."""
        tier = LocalTier(self._folder / "ours")
        version = tier.latest()
        assert version is not None
        fill_shard(tier.reader(version), target)

    def measure(self, num_rounds: int) -> tuple[list[float], list[float], bool]:
        """Load in turn; whether all bits were those that were saved, each time."""
        owned = self._owned(LOADED_BY)
        mesh = DeviceMesh("cpu", list(range(LOADED_BY)))
        expected = _cut(self._state, mesh)
        dcp_s: list[float] = []
        ours_s: list[float] = []
        is_equal = True
        for index in range(num_rounds + 1):
            cut: dict[str, DTensor] = {
                name: torch.zeros_like(one)  # type: ignore[misc]  # torch says Tensor
                for name, one in expected.items()
            }
            held = {part: torch.zeros(part.num_elements) for part in owned}
            measures = [
                (dcp_s, lambda cut=cut: self.load_dcp(cut)),
                (ours_s, lambda held=held: self.load(held)),
            ]
            for times_s, load in measures if index % 2 else reversed(measures):
                seconds = self.timed(load)
                if index:  # the first one reads what nobody has read
                    times_s.append(seconds)
            is_equal &= all(
                torch.equal(cut[name].to_local(), expected[name].to_local())
                for name in expected
            )
            is_equal &= all(
                torch.equal(tensor, self._state[part.name].view(-1)[part.start : part.stop])
                for part, tensor in held.items()
            )
        verdict = torch.tensor(float(is_equal))
        dist.all_reduce(verdict, dist.ReduceOp.MIN)
        return dcp_s, ours_s, bool(verdict.item())

    def timed(self, act: Callable[[], None]) -> float:
        """Seconds of the slowest member."""
        dist.barrier()
        start_s = time.perf_counter()
        act()
        seconds = torch.tensor(time.perf_counter() - start_s)
        dist.all_reduce(seconds, dist.ReduceOp.MAX)
        return float(seconds.item())

    def _part_path(self, rank: int) -> Path:
        return self._folder / f"part-{rank}.json"

    def _owned(self, num_members: int) -> tuple[StateRange, ...]:
        names = {f"m{index}": 1.0 for index in range(num_members)}
        return tuple(split_ownership(self._sizes, names)[f"m{self._rank}"])


def _cut(state: State, mesh: DeviceMesh) -> dict[str, DTensor]:
    # Every member has the whole state: nothing needs to be sent.
    return {
        name: distribute_tensor(tensor, mesh, [Shard(0)], src_data_rank=None)
        for name, tensor in state.items()
    }


def main() -> None:
    """Save both ways, then load in turn."""
    order = read_order(ReshardOrder)
    warnings.simplefilter("ignore")
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // LOADED_BY))
    reshard = _Reshard(order)
    dcp_save_s = reshard.timed(reshard.save_dcp)
    save_s = reshard.timed(reshard.save)
    dcp_s, ours_s, is_equal = reshard.measure(order.state.num_rounds)
    if order.rank == 0:
        found = ReshardFound(
            state_bytes=reshard.state_bytes,
            dcp_save_s=dcp_save_s,
            save_s=save_s,
            dcp_load_s=tuple(dcp_s),
            load_s=tuple(ours_s),
            is_equal=is_equal,
        )
        write_result(order.state.result, found)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
