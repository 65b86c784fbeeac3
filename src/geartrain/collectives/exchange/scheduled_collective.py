"""All-reduces carried out as a schedule book says, many at once, none blocking the caller.

A tensor is cut into chunks. Each chunk goes through the stages host sum, rack sum, slow
hop, hand-out and publication; every stage has a thread and sockets of its own, so all of
them work at the same time, on the chunks of one tensor and of the next.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Protocol

import torch

from geartrain.collectives.exchange.accepted import bytes_on_wire
from geartrain.collectives.exchange.buffers import BufferPool
from geartrain.collectives.exchange.chunk_jobs import STAGES, BucketRun, Machinery, Route
from geartrain.collectives.exchange.links import LinkTable
from geartrain.collectives.exchange.observation import ExchangeObservation
from geartrain.collectives.exchange.pending_exchange import PendingExchange
from geartrain.collectives.exchange.pipeline import Pipeline
from geartrain.collectives.exchange.predicted_time import predict_s
from geartrain.collectives.exchange.routes import place_of, plan_routes
from geartrain.collectives.exchange.slow_coding import CodecFactory, CoderTable, Feedback
from geartrain.errors import CommunicationError, ConfigError
from geartrain.planner.exchange.ownership import chunk_bounds
from geartrain.planner.exchange.schedule import EXACT, CommSchedule, ScheduleBook

if TYPE_CHECKING:
    from geartrain.collectives.exchange.protocol import Transport
    from geartrain.collectives.host_groups.protocol import HostGroup

_MAX_IN_FLIGHT = 16
"""Chunks. Links don't serve all flows alike: with 8, four racks waited for whichever flow
was behind (83 instead of 88 % of the bound). Receive buffers are at most this many chunks
large, so at most one more tensor where it is cut into 16."""
_FIRST_IN_FLIGHT = 3
"""After a pause, growing by one with each chunk that is done. All 16 at once fill the NICs
for 0.2 s, and the slow hop's first messages queue behind them while TCP is still finding
its rate: 2 racks of 4, 500 and 50 Mbit/s, took about 2 % longer."""
_KEPT_OBSERVATIONS = 4096
_UNCUT_S_PER_S = 4.0
"""Nothing shows that a ring or a host's sum that isn't cut into chunks moves, so it is
given the time of links (or cores) that became four times slower."""
_JOIN_S = 5.0
_GRACE = 1.1
"""A message's own deadline comes first, with a better message."""


class Watch(Protocol):
    """Who knows what the other members have entered."""

    def entered(self, index: int, predicted_s: float) -> None:
        """This member has begun the all-reduce of that index."""

    def left(self, index: int) -> None:
        """It was done here."""

    def moved(self) -> None:
        """A chunk of one is done here."""

    def all_entered_at_s(self, index: int) -> float | None:
        """When all members had begun it (``time.monotonic``), as far as known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeSettings:
    """What an exchange needs besides its members and its book."""

    make_codec: CodecFactory | None = None
    """A codec by its name; None refuses books that code."""
    partial_feedback: Feedback | None = None
    """Where the losses of coded partial sums are kept; used by one thread."""
    total_feedback: Feedback | None = None
    """Of coded totals (more than two racks); used by another thread."""
    timeout_s: float = 300.0
    """How long nothing may move before a wait gives up."""
    watch: Watch | None = None
    """Told what is begun and done."""
    on_error: Callable[[CommunicationError], None] | None = None
    """Told the first failure, once, from a stage thread."""


class ScheduledCollective:
    """Satisfies ``Collective``: sums tensors over all members of an epoch.

    Tensors are float64, float32, float16 or bfloat16, of any shape, on the devices that
    the host group takes. 16-bit tensors are added in float32 and rounded once. Lossy
    codecs are applied to float32 (and 16-bit) tensors that were given a ``key``, that is
    to gradients, never to counts and statistics.

    Args:
        transport: Of this epoch. The caller ends it, also after a failure.
        host_group: The processes of this host as one member; the caller closes it.
        book: The schedule of every size, the same on all members.
        member_ids: What to call the members in an error, in order of position.
        settings: Codecs, deadline, and who is told what.

    Raises:
        CommunicationError: If the stages could not be made in time.
        ConfigError: If the book is not for these members, or codes without codecs.
    """

    def __init__(
        self,
        transport: Transport,
        host_group: HostGroup,
        book: ScheduleBook,
        member_ids: Sequence[str],
        settings: ExchangeSettings | None = None,
    ) -> None:
        self._me = transport.me
        self._num_members = transport.num_members
        self._host_group = host_group
        self._book = book
        self._settings = settings or ExchangeSettings()
        self._watch = self._settings.watch
        self._check(book, member_ids)
        self._links = LinkTable(transport, tuple(member_ids))
        self._links.connect(book.schedules)
        self._machinery = Machinery(
            pool=BufferPool(),
            partial_coders=self._coders(self._settings.partial_feedback),
            add_coders=self._coders(self._settings.total_feedback),
            total_coders=self._coders(None),
        )
        # As many sizes as a model has buckets; cutting takes as long as a message.
        self._routes = lru_cache(maxsize=4096)(self._cut)
        self._lock = threading.Lock()
        self._pending: dict[int, PendingExchange] = {}
        self._next_index = 0
        self._over: CommunicationError | None = None
        self._moved_at_s = time.monotonic()
        self._last_done_at_s = -math.inf
        self._observations: deque[ExchangeObservation] = deque(maxlen=_KEPT_OBSERVATIONS)
        self._pipeline = Pipeline(STAGES, _MAX_IN_FLIGHT, _FIRST_IN_FLIGHT)
        self._pipeline.start()

    @property
    def num_members(self) -> int:
        """Ranks that take part."""
        return self._num_members

    @property
    def book(self) -> ScheduleBook:
        """How every size is carried out."""
        return self._book

    def predict_s(self, num_bytes: int) -> float:
        """Predicted duration of one all-reduce of this size (float32 bytes)."""
        return predict_s(self._book, num_bytes)

    def all_reduce(
        self, tensor: torch.Tensor, weight: float = 1.0, *, key: str | None = None
    ) -> PendingExchange:
        """Start replacing the tensor by its weighted sum over all members.

        All members must start the same all-reduces in the same order. The result has the
        same bits on every member, and from run to run for the same book.

        Args:
            tensor: This member's part; don't touch it until waited for.
            weight: What this part is multiplied by; 0 counts it as zeros without reading
                it, whatever it holds.
            key: Name of a gradient, the same in every step. What a codec loses of it is
                added in the next step; without a key the sum is exact.

        Raises:
            ConfigError: If its dtype or layout can't be summed.
            CommunicationError: If the epoch is over.
        """
        num_bytes = bytes_on_wire(tensor)
        schedule = self._book.schedule_for(num_bytes)
        key = None if tensor.dtype == torch.float64 else key
        with self._lock:
            if self._over is not None:
                raise CommunicationError(str(self._over)) from self._over
            pending = PendingExchange(
                index=self._next_index,
                tensor=tensor,
                key=key,
                schedule=schedule,
                num_bytes=num_bytes,
                overdue=self._overdue,
            )
            self._queue(pending, weight)
            self._next_index += 1
        return pending

    def observations(self) -> tuple[ExchangeObservation, ...]:
        """What was done since this was last asked, oldest first."""
        taken = []
        while self._observations:
            taken.append(self._observations.popleft())
        return tuple(taken)

    def abort(self, reason: str) -> None:
        """Fail all that is under way, at once, from any thread; idempotent.

        Stage threads end when their sockets are cut, which is the transport's part. What
        is in flight may still land in the tensors: don't use their memory again before.
        """
        msg = (
            f"gradient exchange stopped: {reason}. The step was not applied; look at the "
            "logs of the workers named"
        )
        self._end(CommunicationError(msg))

    def close(self) -> bool:
        """Fail what is left and end the threads.

        Where nothing is left here, other processes of this host may still be busy with
        the last sum, and are not disturbed.

        Returns:
            False if a thread still waits for a peer: abort the transport to wake it.
        """
        self._end(
            CommunicationError("gradient exchange stopped: it was closed"),
            wakes_host=bool(self._pending),
        )
        ended = self._pipeline.join(_JOIN_S)
        if ended:
            self._machinery.pool.clear()
        return ended

    # -- inside -----------------------------------------------------------------

    def _queue(self, pending: PendingExchange, weight: float) -> None:
        route = self._routes(
            pending.schedule, pending.flat.numel(), pending.key is not None
        )
        if not route.bounds:
            pending.succeed()
            return
        # In the caller's thread: a device's copies follow what it has queued so far.
        host = self._host_group.open(pending.flat, route.bounds, weight)
        self._pending[pending.index] = pending
        if len(self._pending) == 1:
            self._moved_at_s = time.monotonic()
        run = BucketRun(
            pending=pending,
            route=route,
            machinery=self._machinery,
            host=host,
            on_begin=self._began,
            on_move=self._move,
            on_done=self._done,
            on_fail=self._failed,
        )
        for job in run.jobs():
            self._pipeline.put(job)

    def _cut(self, schedule: CommSchedule, num_elements: int, has_key: bool) -> Route:
        coded = has_key and schedule.codec != EXACT
        row = self._row_elements(schedule) if coded else 1
        place = place_of(schedule, self._me)
        staged = place.is_leader and schedule.algorithm in {"leader", "hierarchical"}
        return Route(
            schedule=schedule,
            place=place,
            bounds=chunk_bounds(num_elements, schedule.num_chunks, row),
            chunks=plan_routes(schedule, place, num_elements, row) if staged else (),
            links=self._links.links(schedule, place),
        )

    def _row_elements(self, schedule: CommSchedule) -> int:
        make_codec = self._settings.make_codec
        names = {rack.codec for rack in schedule.racks} - {EXACT}
        assert make_codec is not None or not names
        return math.lcm(*(make_codec(name).row_elements for name in names if make_codec))

    def _coders(self, feedback: Feedback | None) -> CoderTable | None:
        make_codec = self._settings.make_codec
        return CoderTable(make_codec, feedback) if make_codec is not None else None

    def _check(self, book: ScheduleBook, member_ids: Sequence[str]) -> None:
        for schedule in book.schedules:
            if not schedule.num_members == self._num_members == len(member_ids):
                msg = (
                    f"the schedule is for {schedule.num_members} members, the epoch has "
                    f"{self._num_members} and {len(member_ids)} names; plan it anew"
                )
                raise ConfigError(msg)
            if schedule.algorithm == "local" and len(schedule.leaders) > 1:
                msg = (
                    f"the schedule stays on one host but has {len(schedule.leaders)}; plan "
                    "it anew"
                )
                raise ConfigError(msg)
            if schedule.codec != EXACT and self._settings.make_codec is None:
                msg = (
                    f"the schedule codes with {schedule.codec} but no codecs were given; "
                    "pass ExchangeSettings(make_codec=...)"
                )
                raise ConfigError(msg)

    def _began(self, pending: PendingExchange) -> None:
        if self._watch is None:
            return
        schedule = pending.schedule
        is_uncut = schedule.algorithm in {"local", "ring"} and schedule.num_chunks == 1
        factor = _UNCUT_S_PER_S if is_uncut else 1.0
        self._watch.entered(pending.index, factor * self.predict_s(pending.num_bytes))

    def _move(self) -> None:
        self._moved_at_s = time.monotonic()
        if self._watch is not None:
            # Chunks that stay inside a host send no message that would tell it.
            self._watch.moved()

    def _done(
        self, pending: PendingExchange, began_at_s: float, stage_s: dict[str, float]
    ) -> None:
        done_at_s = time.monotonic()
        all_at_s = None
        if self._watch is not None:
            self._watch.left(pending.index)
            all_at_s = self._watch.all_entered_at_s(pending.index)
        entered_at_s = began_at_s if all_at_s is None else max(all_at_s, began_at_s)
        self._observations.append(
            ExchangeObservation(
                index=pending.index,
                num_bytes=pending.num_bytes,
                algorithm=pending.schedule.algorithm,
                codec=pending.schedule.codec if pending.key is not None else EXACT,
                fingerprint=pending.schedule.fingerprint,
                key=pending.key,
                queued_at_s=pending.queued_at_s,
                started_at_s=min(max(entered_at_s, self._last_done_at_s), done_at_s),
                done_at_s=done_at_s,
                predicted_s=self.predict_s(pending.num_bytes),
                stage_s=stage_s,
            )
        )
        self._last_done_at_s = done_at_s
        with self._lock:
            self._pending.pop(pending.index, None)
        try:
            pending.succeed()
        except Exception as error:
            # Nobody else knows it any more, and somebody may wait for it.
            pending.fail(CommunicationError(f"the sum was not stored: {error}"))
            raise

    def _failed(self, where: str, error: Exception) -> None:
        reason = str(error) if isinstance(error, CommunicationError) else repr(error)
        msg = (
            f"gradient exchange failed: {where}: {reason}. The step was not applied; look "
            "at the logs of the workers it waited for"
        )
        failure = CommunicationError(msg)
        failure.__cause__ = error
        on_error = self._settings.on_error
        if self._end(failure) and on_error is not None:
            on_error(failure)

    def _end(self, error: CommunicationError, *, wakes_host: bool = True) -> bool:
        with self._lock:
            first = self._over is None
            if first:
                self._over = error
            error = self._over or error
            failed, self._pending = self._pending, {}
        self._pipeline.stop()
        if first and wakes_host:
            self._host_group.abort()
        for pending in failed.values():
            pending.fail(error)
        return first

    def _overdue(self) -> tuple[float, str | None]:
        """Seconds until nothing may have moved for too long, or that it has not."""
        give_up_at_s = self._moved_at_s + self._settings.timeout_s * _GRACE
        left_s = give_up_at_s - time.monotonic()
        if left_s > 0:
            return left_s, None
        waiting = "; ".join(f"{what} waits for {whom}" for what, whom in self._waiting())
        msg = (
            f"gradient exchange failed: nothing moved for {self._settings.timeout_s:g} s "
            f"({waiting or 'no stage waits for a peer'}). The step was not applied; look "
            "at those workers' logs"
        )
        self.abort(msg)
        return 0.0, msg

    def _waiting(self) -> list[tuple[str, str]]:
        return sorted(self._links.waiting.copy().items())
