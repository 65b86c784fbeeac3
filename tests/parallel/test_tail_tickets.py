"""Sharing a tail, with ranks that compute in simulated time."""

from __future__ import annotations

import heapq
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed import HashStore  # type: ignore[attr-defined]  # not re-exported

from geartrain.parallel.tail_tickets import TailPace, TailTickets


def paces(rates: list[float]) -> list[TailPace]:
    """Ranks whose samples take 1 / rate, whatever the micro-batch."""
    return [
        TailPace(
            samples_per_s=rate,
            others_samples_per_s=math.fsum(r for i, r in enumerate(rates) if i != rank),
            sample_s=1 / rate,
            least_sample_s=1 / max(rates),
        )
        for rank, rate in enumerate(rates)
    ]


def share(
    rates: list[float], free_at_s: list[float], num_samples: int, largest_take: int = 8
) -> tuple[list[list[tuple[int, int]]], float]:
    """What each rank took, and when the last one was done."""
    store = HashStore()
    ranks = [
        TailTickets(
            store=store,
            step=1,
            num_samples=num_samples,
            pace=pace,
            largest_take=largest_take,
        )
        for pace in paces(rates)
    ]
    taken: list[list[tuple[int, int]]] = [[] for _ in rates]
    free = [(at_s, rank) for rank, at_s in enumerate(free_at_s)]
    heapq.heapify(free)
    done_at_s = 0.0
    while free:
        at_s, rank = heapq.heappop(free)
        done_at_s = max(done_at_s, at_s)
        span = ranks[rank].take()
        if span is not None:
            taken[rank].append(span)
            seconds = (span[1] - span[0]) / rates[rank]
            heapq.heappush(free, (at_s + seconds, rank))
    return taken, done_at_s


@given(
    ranks=st.lists(
        st.tuples(st.floats(0.1, 100), st.floats(0, 10)), min_size=1, max_size=6
    ),
    num_samples=st.integers(1, 60),
    largest_take=st.integers(1, 9),
)
def test_every_sample_is_taken_once_whatever_the_speeds(
    ranks: list[tuple[float, float]], num_samples: int, largest_take: int
) -> None:
    rates, free_at_s = (list(column) for column in zip(*ranks, strict=True))

    taken, _ = share(rates, free_at_s, num_samples, largest_take)

    spans = [span for spans in taken for span in spans]
    positions = sorted(i for start, stop in spans for i in range(start, stop))
    assert positions == list(range(num_samples))
    assert all(stop - start <= largest_take for start, stop in spans)


def test_a_slow_rank_takes_no_sample_that_the_others_end_sooner() -> None:
    taken, done_at_s = share([80.0, 40.0, 1.0], [0.0, 0.0, 0.0], 12)

    assert not taken[2]
    assert done_at_s < 0.15  # 12 samples at 120 a second, and not the 1 s of one there


def test_a_slow_rank_helps_where_much_is_left() -> None:
    taken, done_at_s = share([80.0, 40.0, 10.0], [0.0, 0.0, 0.0], 60)

    assert taken[2]
    assert done_at_s < 1.1 * 60 / 130


def test_equal_ranks_share_to_the_last_sample() -> None:
    taken, done_at_s = share([1.0] * 4, [0.0] * 4, 4)

    assert [len(spans) for spans in taken] == [1, 1, 1, 1]
    assert done_at_s == pytest.approx(1.0)


def test_the_others_take_the_part_of_a_rank_that_is_late() -> None:
    taken, done_at_s = share([1.0, 1.0], [10.0, 0.0], 10)

    assert not taken[0]
    assert done_at_s == pytest.approx(10.0)


def test_a_rank_that_was_told_none_is_left_gets_no_more() -> None:
    slow, fast = (
        TailTickets(store=store, step=1, num_samples=4, pace=pace, largest_take=4)
        for store in [HashStore()]
        for pace in paces([1.0, 100.0])
    )

    assert slow.none_left()  # so it may send its gradients
    assert not fast.none_left()
    assert slow.take() is None
    assert fast.take() is not None
