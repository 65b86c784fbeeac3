"""When an exchange counts as stuck. A pure decision; the clock is an argument."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from geartrain.collectives.faults.frames import Count

_LEAST_S = 2.0
_FACTOR = 4.0
_KEPT_TIMES = 4096


@dataclass(frozen=True, slots=True)
class Overdue:
    """An exchange that is stuck."""

    index: int
    waited_s: float
    limit_s: float
    not_entered: tuple[int, ...]
    """Positions of the members that have not begun it; empty where all have."""


@dataclass(slots=True)
class _Open:
    predicted_s: float
    entered_at_s: float


@dataclass(slots=True)
class OperationWatch:
    """Watches the exchanges of one epoch; all members begin the same ones in order.

    The deadline of an exchange, max(2 s, 4 x predicted), counts from the time at which
    all members have begun it, the exchanges before it are done here, and nobody has
    finished another message: a device that computes longer, or a link that became
    slow, is no fault. Until all have begun it only the outer limit holds.

    Args:
        me: This process's position.
        num_members: Processes that take part.
        timeout_s: Outer limit of waiting for somebody to begin.
        clock: Monotonic.
    """

    me: int
    num_members: int
    timeout_s: float
    clock: Callable[[], float] = time.monotonic
    _entered: list[int] = field(init=False)
    _moved: list[int] = field(init=False)
    _open: dict[int, _Open] = field(default_factory=dict, init=False)
    _all_entered_at_s: dict[int, float] = field(default_factory=dict, init=False)
    _all_entered: int = field(default=0, init=False)
    _latest_at_s: float = field(default=0.0, init=False)
    _moved_at_s: float = field(default=0.0, init=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)

    def __post_init__(self) -> None:
        self._entered = [0] * self.num_members
        self._moved = [0] * self.num_members

    def entered(self, index: int, predicted_s: float) -> None:
        """This process has begun the exchange of that index; they count from 0."""
        now_s = self.clock()
        with self._lock:
            self._open[index] = _Open(predicted_s, now_s)
            self._entered[self.me] = max(self._entered[self.me], index + 1)
            self._latest_at_s = now_s
            self._note_all_entered(now_s)

    def left(self, index: int) -> None:
        """It is done here."""
        with self._lock:
            self._open.pop(index, None)
            self._moved_at_s = self.clock()

    def moved(self) -> None:
        """A message or collective is done here."""
        with self._lock:
            self._moved[self.me] += 1
            self._moved_at_s = self.clock()

    def all_entered_at_s(self, index: int) -> float | None:
        """When all members had begun it, as far as is known; None if not yet."""
        with self._lock:
            return self._all_entered_at_s.get(index)

    def heard(self, count: Count, entered_ago_s: float = 0.0) -> None:
        """Take in how far another member is."""
        member = count.member
        if not 0 <= member < self.num_members or member == self.me:
            return
        now_s = self.clock()
        with self._lock:
            if count.moved > self._moved[member]:
                self._moved[member] = count.moved
                self._moved_at_s = now_s
            if count.entered > self._entered[member]:
                self._entered[member] = count.entered
                self._note_all_entered(now_s - max(entered_ago_s, 0.0))

    def counts(self, *, of_all: bool) -> tuple[tuple[Count, ...], float]:
        """What to tell the others: counts, and how long ago the latest was begun."""
        with self._lock:
            members = range(self.num_members) if of_all else (self.me,)
            counts = tuple(Count(m, self._entered[m], self._moved[m]) for m in members)
            return counts, self.clock() - self._latest_at_s

    def overdue(self) -> Overdue | None:
        """The oldest exchange that is open here, if it is stuck."""
        now_s = self.clock()
        with self._lock:
            if not self._open:
                return None
            index = min(self._open)
            operation = self._open[index]
            if index >= self._all_entered:
                late = tuple(m for m, n in enumerate(self._entered) if n <= index)
                begun_at_s, limit_s = operation.entered_at_s, self.timeout_s
            else:
                late = ()
                begun_at_s = max(
                    operation.entered_at_s,
                    self._moved_at_s,
                    self._all_entered_at_s.get(index, operation.entered_at_s),
                )
                limit_s = max(_LEAST_S, _FACTOR * operation.predicted_s)
            waited_s = now_s - begun_at_s
            return Overdue(index, waited_s, limit_s, late) if waited_s > limit_s else None

    def _note_all_entered(self, at_s: float) -> None:
        everybody = min(self._entered)
        for index in range(self._all_entered, everybody):
            # Not before this process began it itself, whatever the clocks' drift.
            mine = self._open.get(index)
            self._all_entered_at_s[index] = max(at_s, mine.entered_at_s if mine else at_s)
            self._all_entered_at_s.pop(index - _KEPT_TIMES, None)
        self._all_entered = max(self._all_entered, everybody)
