"""A service over real Gloo whose exchange is one ring; what the tests' ranks run."""

from __future__ import annotations

import os
import queue
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from geartrain.collectives.exchange.gloo_group import TransportSettings
from geartrain.collectives.faults.fault import Fault
from geartrain.collectives.service import EpochParts, ExchangeService, ServiceSettings


@dataclass
class Ring:
    """All-reduces over one stage, told to the watch."""

    parts: EpochParts
    predicted_s: float = 0.0
    num_begun: int = 0
    over: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        members = range(self.parts.membership.num_members)
        self.stage = self.parts.transport.stage("ring", members)

    def add(self, tensor: torch.Tensor) -> torch.Tensor:
        index, self.num_begun = self.num_begun, self.num_begun + 1
        self.parts.watch.entered(index, self.predicted_s)
        self.stage.all_reduce(tensor).wait()
        self.parts.watch.left(index)
        return tensor

    def abort(self, reason: str) -> None:
        self.over.append(reason)

    def close(self) -> None:
        pass


@dataclass
class Rank:
    """One process of a test."""

    rank: int
    service: ExchangeService[float, Ring]
    faults: queue.SimpleQueue[Fault]

    def ring(self, members: list[int], epoch: int, limit_s: float | None = None) -> Ring:
        return self.service.rebuild(members, epoch, 0.0, limit_s)

    def fault(self, deadline_s: float = 20.0) -> Fault:
        return self.faults.get(timeout=deadline_s)


def make_rank(
    rank: int, world_size: int, store: Store | None = None, **settings: object
) -> Rank:
    faults: queue.SimpleQueue[Fault] = queue.SimpleQueue()
    service = ExchangeService(
        store or dist.distributed_c10d._get_default_store(),
        rank,
        ServiceSettings(
            member_ids=tuple(f"cpu#{r}" for r in range(world_size)),
            make_exchange=Ring,
            transport=TransportSettings(**settings),  # type: ignore[arg-type]  # any of them
        ),
        faults.put,
    )
    return Rank(rank, service, faults)


def longest_silence_s() -> float:
    """Within what a silence must be known; heartbeats of a starved machine are late."""
    num_cores = os.cpu_count() or 1
    return 3.0 if os.getloadavg()[0] < 2 * num_cores else 20.0
