"""Deadlines of exchanges, with a clock that is set by hand."""

from __future__ import annotations

from dataclasses import dataclass

from geartrain.collectives.faults.frames import Count
from geartrain.collectives.faults.operation_watch import OperationWatch


@dataclass
class Clock:
    now_s: float = 100.0

    def __call__(self) -> float:
        return self.now_s


def watch_of(clock: Clock, num_members: int = 3) -> OperationWatch:
    return OperationWatch(0, num_members, timeout_s=300.0, clock=clock)


def all_enter(watch: OperationWatch, index: int, predicted_s: float = 0.0) -> None:
    watch.entered(index, predicted_s)
    for member in (1, 2):
        watch.heard(Count(member, index + 1, 0))


def test_waiting_for_a_device_that_computes_longer_is_no_fault() -> None:
    clock = Clock()
    watch = watch_of(clock)
    watch.entered(0, 0.5)
    watch.heard(Count(1, 1, 0))

    clock.now_s += 299.0

    assert watch.overdue() is None


def test_who_never_begins_is_named_after_the_outer_limit() -> None:
    clock = Clock()
    watch = watch_of(clock)
    watch.entered(0, 0.5)
    watch.heard(Count(1, 1, 0))

    clock.now_s += 301.0

    overdue = watch.overdue()
    assert overdue is not None
    assert overdue.not_entered == (2,)


def test_the_deadline_counts_from_when_all_have_begun() -> None:
    clock = Clock()
    watch = watch_of(clock)
    watch.entered(0, 1.0)
    clock.now_s += 100.0
    all_enter(watch, 0, 1.0)

    clock.now_s += 3.9
    assert watch.overdue() is None
    clock.now_s += 0.2
    overdue = watch.overdue()
    assert overdue is not None
    assert (overdue.index, overdue.limit_s, overdue.not_entered) == (0, 4.0, ())


def test_short_exchanges_have_two_seconds() -> None:
    clock = Clock()
    watch = watch_of(clock)
    all_enter(watch, 0, 0.001)

    clock.now_s += 1.9
    assert watch.overdue() is None
    clock.now_s += 0.2
    assert watch.overdue() is not None


def test_a_message_that_is_done_anywhere_gives_more_time() -> None:
    clock = Clock()
    watch = watch_of(clock)
    all_enter(watch, 0)

    for _ in range(10):
        clock.now_s += 1.5
        watch.moved()
        clock.now_s += 1.5
        watch.heard(Count(2, 1, int(clock.now_s)))

    assert watch.overdue() is None


def test_an_exchange_behind_another_counts_from_its_end() -> None:
    clock = Clock()
    watch = watch_of(clock)
    all_enter(watch, 0, 10.0)
    all_enter(watch, 1, 0.1)
    clock.now_s += 30.0
    watch.left(0)

    clock.now_s += 1.9
    assert watch.overdue() is None
    clock.now_s += 0.2
    overdue = watch.overdue()
    assert overdue is not None
    assert overdue.index == 1


def test_what_is_done_is_never_late() -> None:
    clock = Clock()
    watch = watch_of(clock)
    all_enter(watch, 0)
    watch.left(0)

    clock.now_s += 1000.0

    assert watch.overdue() is None


def test_the_time_of_the_last_to_begin_is_kept() -> None:
    clock = Clock()
    watch = watch_of(clock)
    watch.entered(0, 1.0)
    watch.heard(Count(1, 1, 0))
    assert watch.all_entered_at_s(0) is None
    clock.now_s += 5.0

    watch.heard(Count(2, 1, 0), entered_ago_s=1.5)

    assert watch.all_entered_at_s(0) == 103.5


def test_counts_of_nobody_are_ignored() -> None:
    clock = Clock()
    watch = watch_of(clock)
    watch.entered(0, 1.0)
    for member in (-1, 0, 3, 10**9):
        watch.heard(Count(member, 5, 5))

    assert watch.counts(of_all=True)[0] == (Count(0, 1, 0), Count(1, 0, 0), Count(2, 0, 0))
