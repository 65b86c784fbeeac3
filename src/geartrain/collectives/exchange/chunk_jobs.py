"""From one all-reduce to the jobs of its chunks."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import torch

from geartrain.collectives.exchange.pipeline import Job
from geartrain.collectives.exchange.routes import (
    ChunkRoute,
    Place,
    slow_codec,
    total_codec,
)
from geartrain.collectives.exchange.slow_hop import SlowCoders
from geartrain.collectives.exchange.staged_chunk import (
    ChunkWork,
    IdleChunk,
    RingChunk,
    StagedChunk,
)

if TYPE_CHECKING:
    from geartrain.collectives.exchange.buffers import BufferPool
    from geartrain.collectives.exchange.links import Links
    from geartrain.collectives.exchange.pending_exchange import PendingExchange
    from geartrain.collectives.exchange.slow_coding import Coder, CoderTable
    from geartrain.collectives.host_groups.protocol import HostExchange
    from geartrain.planner.exchange.schedule import CommSchedule

_NARROW = (torch.float16, torch.bfloat16)

_SHORT_BYTES = 256 * 2**10
"""Below it leader-only exchanges won over staged ones in measurements, for latency."""

STAGES = ("host sum", "rack sum", "slow hop", "hand out", "publish")
"""One thread each, in the order in which a chunk passes them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """How tensors of one size go, cut once and used every step."""

    schedule: CommSchedule
    place: Place
    bounds: tuple[tuple[int, int], ...]
    """``(start, stop)`` of each chunk."""
    chunks: tuple[ChunkRoute, ...]
    """One a chunk, where this member takes part in the staged exchange."""
    links: Links


@dataclass(frozen=True, slots=True, kw_only=True)
class Machinery:
    """What all exchanges of an epoch use."""

    pool: BufferPool
    partial_coders: CoderTable | None
    """Of the thread that sends partial sums."""
    add_coders: CoderTable | None
    """Of the thread that adds partial sums and sends totals."""
    total_coders: CoderTable | None
    """Of the thread that receives totals."""

    def slow_coders(self, schedule: CommSchedule, rack: int, key: str | None) -> SlowCoders:
        """Who codes what of a bucket."""
        total = total_codec(schedule)
        others = range(len(schedule.racks))

        def coders(table: CoderTable | None) -> tuple[Coder | None, ...]:
            names = [slow_codec(schedule, rack, other) for other in others]
            return tuple(table.coder(name, key) if table else None for name in names)

        if schedule.algorithm == "leader":
            # Small messages: latency decides, and whole sums are swapped by all racks.
            nothing = (None,) * len(schedule.racks)
            return SlowCoders(
                partial_out=nothing, partial_in=nothing, total_out=None, total_in=None
            )
        return SlowCoders(
            partial_out=coders(self.partial_coders),
            partial_in=coders(self.add_coders),
            total_out=self.add_coders.coder(total, key) if self.add_coders else None,
            total_in=self.total_coders.coder(total, key) if self.total_coders else None,
        )


@dataclass(slots=True, kw_only=True)
class BucketRun:
    """Carries one all-reduce through the stage threads.

    Args:
        pending: What the caller waits for.
        route: How tensors of this size go.
        host: The tensor on its way through the host group.
        on_begin: Called when the first chunk begins.
        on_move: Called after each chunk's last step.
        on_done: Called with when it began and each stage's seconds.
        on_fail: Called with where and the error.
    """

    pending: PendingExchange
    route: Route
    machinery: Machinery
    host: HostExchange
    on_begin: Callable[[PendingExchange], None]
    on_move: Callable[[], None]
    on_done: Callable[[PendingExchange, float, dict[str, float]], None]
    on_fail: Callable[[str, Exception], None]
    _wide: torch.Tensor | None = None
    _tensor: torch.Tensor | None = None
    _coders: SlowCoders | None = None
    _began_at_s: float = 0.0
    stage_s: list[float] = field(default_factory=lambda: [0.0] * len(STAGES))
    """How long each stage's thread worked and waited on it; each writes its own."""

    def jobs(self) -> list[Job]:
        """One job a chunk, in index order."""
        return [ChunkRun(self, index).job() for index in range(len(self.route.bounds))]

    @property
    def is_short(self) -> bool:
        """Whether latency decides, not bandwidth."""
        return len(self.route.bounds) == 1 and self.pending.num_bytes <= _SHORT_BYTES

    def begin(self) -> None:
        """Before the first chunk, in the first thread."""
        self._began_at_s = time.monotonic()
        self.on_begin(self.pending)
        whole = self.host.host_tensor
        if whole is None:
            return
        if whole.dtype in _NARROW:
            self._wide = self.machinery.pool.take(whole.numel(), torch.float32)
        self._tensor = whole if self._wide is None else self._wide
        self._coders = self.machinery.slow_coders(
            self.route.schedule, self.route.place.rack_index, self.pending.key
        )

    def work(self, index: int) -> ChunkWork:
        """The chunk's exchange with other hosts."""
        schedule, place = self.route.schedule, self.route.place
        if self._tensor is None or len(schedule.leaders) == 1:
            return IdleChunk()
        if schedule.algorithm == "ring":
            start, stop = self.route.bounds[index]
            return RingChunk(
                values=self._tensor[start:stop], links=self.route.links, whom="all hosts"
            )
        assert self._coders is not None
        return StagedChunk(
            route=self.route.chunks[index],
            place=place,
            leaders=schedule.racks[place.rack_index].leaders,
            tensor=self._tensor,
            coders=self._coders,
            links=self.route.links,
            pool=self.machinery.pool,
        )

    def reduce(self, index: int) -> None:
        """Have the host's sum of a chunk."""
        self.host.reduce(index)
        if self._wide is not None:
            start, stop = self.route.bounds[index]
            whole = self.host.host_tensor
            assert whole is not None
            self._wide[start:stop].copy_(whole[start:stop])

    def publish(self, index: int) -> None:
        """Give the total of a chunk to all processes of the host."""
        if self._wide is not None:
            start, stop = self.route.bounds[index]
            whole = self.host.host_tensor
            assert whole is not None
            whole[start:stop].copy_(self._wide[start:stop])
        self.host.publish(index)
        self.on_move()

    def fail(self, index: int, stage: str, error: Exception) -> None:
        """Say where it failed."""
        pending, schedule = self.pending, self.route.schedule
        where = (
            f"all-reduce {pending.index} ({pending.num_bytes} bytes, "
            f"{schedule.algorithm}), chunk {index + 1} of {len(self.route.bounds)}, {stage}"
        )
        self.on_fail(where, error)

    def finish(self) -> None:
        """After the last chunk: give memory back and tell the caller."""
        self.host.finish()
        if self._wide is not None:
            self.machinery.pool.give(self._wide)
        self._wide = self._tensor = None
        stage_s = dict(zip(STAGES, self.stage_s, strict=True))
        self.on_done(self.pending, self._began_at_s, stage_s)


class ChunkRun:
    """One chunk's steps, a stage thread each."""

    def __init__(self, run: BucketRun, index: int) -> None:
        self._run = run
        self._index = index
        self._work: ChunkWork | None = None

    def job(self) -> Job:
        """What the pipeline carries."""
        steps = (
            self._host_sum,
            self._rack_sum,
            self._slow_hop,
            self._hand_out,
            self._publish,
        )
        return Job(
            steps=[partial(self._timed, i, step) for i, step in enumerate(steps)],
            fail=lambda stage, error: self._run.fail(self._index, stage, error),
            is_short=self._run.is_short,
        )

    def _timed(self, stage_index: int, step: Callable[[ChunkWork], None]) -> None:
        began_at_s = time.perf_counter()
        if stage_index == 0:
            if self._index == 0:
                self._run.begin()
            self._work = self._run.work(self._index)
        assert self._work is not None
        step(self._work)
        self._run.stage_s[stage_index] += time.perf_counter() - began_at_s
        if stage_index == len(STAGES) - 1:
            self._work = None
            if self._index == len(self._run.route.bounds) - 1:
                self._run.finish()

    def _host_sum(self, work: ChunkWork) -> None:
        work.post_receives()
        self._run.reduce(self._index)
        work.send_in()

    def _rack_sum(self, work: ChunkWork) -> None:
        work.add_rack()

    def _slow_hop(self, work: ChunkWork) -> None:
        work.add_across()

    def _hand_out(self, work: ChunkWork) -> None:
        work.hand_out()

    def _publish(self, work: ChunkWork) -> None:
        work.collect()
        self._run.publish(self._index)
