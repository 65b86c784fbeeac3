"""Fakes that keep the contract: a transport and host groups between threads.

Messages are delivered by a thread that takes any sender's next message in a seeded random
order, and only once both sides have posted it. So a schedule that relies on timing, or
that touches a tensor before its message is gone, gives wrong sums here.
"""

from __future__ import annotations

import random
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Self, TypeVar

import torch

from geartrain.collectives.exchange.scheduled_collective import (
    ExchangeSettings,
    ScheduledCollective,
)
from geartrain.errors import CommunicationError
from geartrain.planner.exchange.schedule import CommSchedule, RackPart, ScheduleBook

R = TypeVar("R")
_DEADLINE_S = 10.0


@dataclass(eq=False)
class MemoryHandle:
    network: MemoryNetwork
    tensor: torch.Tensor
    done: bool = False

    def wait(self) -> None:
        network = self.network
        with network.changed:
            ended = network.changed.wait_for(
                lambda: self.done or network.over is not None, _DEADLINE_S
            )
            if self.done:
                return
            raise CommunicationError(network.over if ended else "deadline passed")


class MemoryNetwork:
    """Everything that is on the wire."""

    def __init__(self, seed: int = 0) -> None:
        self.changed = threading.Condition()
        self.over: str | None = None
        self.held_back: Callable[[str, int, int], bool] = lambda *_: False
        self.order: list[tuple[str, int, int]] = []
        self.num_bytes: dict[str, int] = defaultdict(int)
        self._random = random.Random(seed)
        self._sent: dict[tuple[str, int, int], deque[MemoryHandle]] = defaultdict(deque)
        self._awaited: dict[tuple[str, int, int], deque[MemoryHandle]] = defaultdict(deque)
        self._rings: dict[tuple[str, int], dict[int, MemoryHandle]] = defaultdict(dict)
        self._postman = threading.Thread(target=self._deliver, daemon=True)
        self._postman.start()

    def post(
        self, stage: str, sender: int, receiver: int, *, sends: bool
    ) -> deque[MemoryHandle]:
        return (self._sent if sends else self._awaited)[stage, sender, receiver]

    def ring(
        self,
        stage: str,
        members: tuple[int, ...],
        me: int,
        count: int,
        handle: MemoryHandle,
    ) -> None:
        with self.changed:
            parts = self._rings[stage, count]
            parts[me] = handle
            if len(parts) == len(members):
                total = sum(parts[member].tensor for member in members)
                for part in parts.values():
                    part.tensor.copy_(torch.as_tensor(total))
                    part.done = True
                self.changed.notify_all()

    def abort(self, reason: str) -> None:
        with self.changed:
            self.over = self.over or reason
            self.changed.notify_all()

    def await_posted(self, stage: str) -> None:
        """Block until somebody has sent something in that stage."""
        with self.changed:
            assert self.changed.wait_for(
                lambda: any(
                    r[0].startswith(stage) and sent for r, sent in self._sent.items()
                ),
                _DEADLINE_S,
            )

    def let_go(self) -> None:
        """Deliver what was held back."""
        with self.changed:
            self.held_back = lambda *_: False
            self.changed.notify_all()

    def _ready(self) -> list[tuple[str, int, int]]:
        return [
            route
            for route, sent in self._sent.items()
            if sent and self._awaited[route] and not self.held_back(*route)
        ]

    def _deliver(self) -> None:
        while True:
            with self.changed:
                self.changed.wait_for(lambda: self._ready() or self.over is not None)
                if self.over is not None:
                    return
                route = self._random.choice(sorted(self._ready()))
                sent, awaited = self._sent[route].popleft(), self._awaited[route].popleft()
                assert sent.tensor.shape == awaited.tensor.shape, route
                assert sent.tensor.dtype == awaited.tensor.dtype, route
                awaited.tensor.copy_(sent.tensor)
                sent.done = awaited.done = True
                self.order.append(route)
                self.num_bytes[route[0].rpartition("-")[0]] += sent.tensor.nbytes
                self.changed.notify_all()


@dataclass
class MemoryStage:
    network: MemoryNetwork
    name: str
    members: tuple[int, ...]
    me: int
    num_rings: int = 0

    def send(self, tensor: torch.Tensor, to_member: int) -> MemoryHandle:
        return self._post(tensor, self.me, to_member, sends=True)

    def receive(self, tensor: torch.Tensor, from_member: int) -> MemoryHandle:
        return self._post(tensor, from_member, self.me, sends=False)

    def all_reduce(self, tensor: torch.Tensor) -> MemoryHandle:
        handle = MemoryHandle(self.network, tensor)
        self.network.ring(self.name, self.members, self.me, self.num_rings, handle)
        self.num_rings += 1
        return handle

    def _post(
        self, tensor: torch.Tensor, sender: int, receiver: int, *, sends: bool
    ) -> MemoryHandle:
        assert {sender, receiver} <= set(self.members)
        assert sender != receiver
        assert tensor.is_contiguous()
        handle = MemoryHandle(self.network, tensor)
        with self.network.changed:
            if self.network.over is not None:
                raise CommunicationError(self.network.over)
            self.network.post(self.name, sender, receiver, sends=sends).append(handle)
            self.network.changed.notify_all()
        return handle


@dataclass
class MemoryTransport:
    network: MemoryNetwork
    me: int
    num_members: int
    epoch: int = 0

    def stage(
        self, name: str, members: Sequence[int], *, shares_links: bool = False
    ) -> MemoryStage:
        return MemoryStage(self.network, name, tuple(members), self.me)


@dataclass
class MemoryHost:
    """What the processes of one host share."""

    num_members: int
    changed: threading.Condition = field(default_factory=threading.Condition)
    parts: dict[tuple[int, int], dict[int, torch.Tensor]] = field(
        default_factory=lambda: defaultdict(dict)
    )
    totals: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)
    over: bool = False

    def wait_for(self, ready: Callable[[], bool]) -> None:
        if not self.changed.wait_for(lambda: ready() or self.over, _DEADLINE_S):
            msg = "the host's processes: deadline passed"
            raise CommunicationError(msg)
        if self.over and not ready():
            msg = "the host group was aborted"
            raise CommunicationError(msg)


@dataclass
class MemoryGroup:
    """One process's end of a host group; the first one leads."""

    host: MemoryHost
    index: int
    num_opened: int = 0
    aborted: bool = False

    @property
    def is_leader(self) -> bool:
        return self.index == 0

    @property
    def num_members(self) -> int:
        return self.host.num_members

    def open(
        self, tensor: torch.Tensor, chunks: Sequence[tuple[int, int]], weight: float = 1.0
    ) -> MemoryExchange:
        self.num_opened += 1
        return MemoryExchange(self, tensor, tuple(chunks), weight, self.num_opened)

    def abort(self) -> None:
        self.aborted = True
        with self.host.changed:
            self.host.over = True
            self.host.changed.notify_all()

    def close(self) -> None:
        """Nothing is held."""


@dataclass
class MemoryExchange:
    group: MemoryGroup
    tensor: torch.Tensor
    chunks: tuple[tuple[int, int], ...]
    weight: float
    number: int
    finished: bool = False

    @property
    def host_tensor(self) -> torch.Tensor | None:
        return self.tensor if self.group.is_leader else None

    def reduce(self, chunk_index: int) -> None:
        host, own = self.group.host, self._chunk(chunk_index)
        if self.weight == 0:
            own.zero_()
        elif self.weight != 1:
            own.mul_(self.weight)
        with host.changed:
            parts = host.parts[self.number, chunk_index]
            parts[self.group.index] = own.clone()
            host.changed.notify_all()
            if self.group.is_leader:
                host.wait_for(lambda: len(parts) == host.num_members)
                for index in range(1, host.num_members):
                    own += parts[index]

    def publish(self, chunk_index: int) -> None:
        host, place = self.group.host, (self.number, chunk_index)
        with host.changed:
            if self.group.is_leader:
                host.totals[place] = self._chunk(chunk_index).clone()
                host.changed.notify_all()
            host.wait_for(lambda: place in host.totals)
            self._chunk(chunk_index).copy_(host.totals[place])

    def finish(self) -> None:
        assert not self.finished
        self.finished = True

    def _chunk(self, index: int) -> torch.Tensor:
        start, stop = self.chunks[index]
        return self.tensor[start:stop]


@dataclass
class World:
    """All members of an exchange, each with threads of its own."""

    book: ScheduleBook
    seed: int = 0
    settings: Callable[[int], ExchangeSettings] = lambda _: ExchangeSettings()
    network: MemoryNetwork = field(init=False)
    members: list[ScheduledCollective] = field(init=False)
    groups: dict[int, MemoryGroup] = field(default_factory=dict)

    def __enter__(self) -> Self:
        schedule = self.book.schedules[0]
        self.network = MemoryNetwork(self.seed)
        for rack in schedule.racks:
            for positions in rack.hosts:
                host = MemoryHost(len(positions))
                for index, position in enumerate(positions):
                    self.groups[position] = MemoryGroup(host, index)
        self.members = [
            ScheduledCollective(
                MemoryTransport(self.network, me, schedule.num_members),
                self.groups[me],
                self.book,
                [f"w{i}" for i in range(schedule.num_members)],
                self.settings(me),
            )
            for me in range(schedule.num_members)
        ]
        return self

    def __exit__(self, *_: object) -> None:
        self.network.abort("the test is over")
        ended = [member.close() for member in self.members]
        assert all(ended), "a stage thread did not end"

    def each(self, function: Callable[[int, ScheduledCollective], R]) -> list[R]:
        """Run on every member at once; the results in order."""

        def run(index: int, member: ScheduledCollective) -> R:
            try:
                return function(index, member)
            except BaseException as error:
                self.network.abort(f"member {index}: {error!r}")  # nobody waits for it
                raise

        with ThreadPoolExecutor(len(self.members)) as pool:
            running = [pool.submit(run, i, m) for i, m in enumerate(self.members)]
            return [future.result(_DEADLINE_S) for future in running]


def one_size(schedule: CommSchedule) -> ScheduleBook:
    """A book with the same schedule for every size."""
    return ScheduleBook(up_to_bytes=(2**40,), schedules=(schedule,))


def racks_of(
    sizes: Sequence[Sequence[int]],
    host_shares: Sequence[Sequence[float]] | None = None,
    rack_shares: Sequence[float] | None = None,
    codecs: Sequence[str] | None = None,
) -> tuple[RackPart, ...]:
    """Racks whose hosts hold that many processes, equal shares unless given."""
    position, racks = 0, []
    for index, hosts in enumerate(sizes):
        members = []
        for size in hosts:
            members.append(tuple(range(position, position + size)))
            position += size
        shares = host_shares[index] if host_shares else [1 / len(hosts)] * len(hosts)
        racks.append(
            RackPart(
                rack_id=f"r{index}",
                hosts=tuple(members),
                share=rack_shares[index] if rack_shares else 1 / len(sizes),
                host_shares=tuple(shares),
                codec=codecs[index] if codecs else "none",
            )
        )
    return tuple(racks)
