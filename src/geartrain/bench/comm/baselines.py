"""What torch offers: Gloo's ring, and a hierarchy of its stock collectives."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from geartrain.bench.comm.messages import Member

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_TIMEOUT_S = 300.0


class Baselines:
    """Gloo groups of this rank, made when first used; all members use them alike."""

    def __init__(self, member: Member, store: Store) -> None:
        self._member = member
        self._store = store
        self._groups: dict[str, Any] = {}  # Any: torch's stubs lack most methods

    def barrier(self) -> None:
        """Wait until every rank is here."""
        self._group("barrier", range(self._member.world_size)).barrier().wait()

    def ring(self, tensor: torch.Tensor, ranks: Sequence[int], name: str) -> None:
        """Gloo's all-reduce, in the order of ``ranks``."""
        self._group(name, ranks).allreduce([tensor]).wait()

    def stock_hierarchy(self, tensor: torch.Tensor) -> None:
        """Reduce-scatter in the rack, all-reduce across, all-gather in the rack.

        Racks must have the same size, and the tensor a multiple of it.
        """
        racks = self._member.racks
        own = next(rack for rack in racks if self._member.rank in rack)
        position = own.index(self._member.rank)
        inner = self._group(f"inner{racks.index(own)}", own)
        outer = self._group(f"outer{position}", [rack[position] for rack in racks])
        part = torch.empty(tensor.numel() // len(own))
        inner._reduce_scatter_base(part, tensor).wait()  # noqa: SLF001 - no public name
        outer.allreduce([part]).wait()
        inner._allgather_base(tensor, part).wait()  # noqa: SLF001 - as above

    def _group(self, name: str, ranks: Sequence[int]) -> Any:  # Any: as above
        if name not in self._groups:
            gloo: Any = dist.ProcessGroupGloo  # its options are missing in torch's stubs
            options = gloo._Options()  # noqa: SLF001 - no public way, 2.11-2.14
            options._devices = [  # noqa: SLF001 - as above
                gloo.create_device(hostname=self._member.address)
            ]
            options._timeout = timedelta(seconds=_TIMEOUT_S)  # noqa: SLF001 - as above
            self._groups[name] = gloo(
                PrefixStore(f"baseline/{name}", self._store),
                list(ranks).index(self._member.rank),
                len(ranks),
                options,
            )
        return self._groups[name]
