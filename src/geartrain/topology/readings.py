"""What was measured between pairs of hosts, the best of every repeat. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from geartrain.topology.arrivals import RateReading

_NEAR = 0.6
_ALIKE = 0.85
LONG_ENOUGH_S = 0.003
"""A slope over less than this may lie inside a shaper's bucket (4 ms of its rate)."""

_BEYOND_DOUBT_S = 0.04
"""Ten times what shapers commonly hold."""


@dataclass(slots=True)
class PairReadings:
    """Rates and latencies by (source, target) position.

    Other work on a host only ever slows a burst, so of two readings the higher one is
    nearer to the truth, unless one of them is a guess or may lie inside a bucket.
    """

    num_hosts: int
    rates: dict[tuple[int, int], RateReading] = field(default_factory=dict)
    latencies_s: dict[tuple[int, int], float] = field(default_factory=dict)

    def record(
        self, source: int, target: int, rate: RateReading | None, latency_s: float
    ) -> None:
        """Take in a reading."""
        key = (source, target)
        if rate is not None:
            self.rates[key] = better_reading(self.rates.get(key), rate)
        self.latencies_s[key] = min(latency_s, self.latencies_s.get(key, float("inf")))

    def rate(self, source: int, target: int) -> float | None:
        """The rate in bytes/s; None where it was not measured."""
        reading = self.rates.get((source, target))
        return None if reading is None else reading.bytes_per_s

    def unread_pairs(self) -> tuple[tuple[int, int], ...]:
        """Pairs that were measured, but too little was seen to tell a rate."""
        unread = self.latencies_s.keys() - self.rates.keys()
        return tuple(sorted({(min(key), max(key)) for key in unread}))

    def best_sends(self) -> list[float]:
        """What each host was seen to send where nothing was in the way, bytes/s."""
        return self._best(0)

    def best_receives(self) -> list[float]:
        """What each host was seen to receive where nothing was in the way, bytes/s."""
        return self._best(1)

    def _best(self, end: int) -> list[float]:
        """The median of what comes near the fastest, 0 where nothing was read.

        Not the fastest itself: one reading that is too high, by a burst that a shaper's
        bucket let pass, would make all other links of a host look slow.
        """
        rows: list[list[RateReading]] = [[] for _ in range(self.num_hosts)]
        for key, reading in self.rates.items():
            rows[key[end]].append(reading)
        typical = [typical_reading(row) for row in rows]
        return [0.0 if reading is None else reading.bytes_per_s for reading in typical]


def better_reading(known: RateReading | None, found: RateReading) -> RateReading:
    """Of two readings of one thing the surer one, and of two as sure the higher."""
    if known is None:
        return found
    return max(known, found, key=lambda r: (is_sure(r), r.is_steady, r.bytes_per_s))


def is_sure(reading: RateReading) -> bool:
    """Whether it is no guess, and lasted longer than a shaper's bucket does."""
    return reading.is_steady and reading.window_s >= LONG_ENOUGH_S


def typical_reading(readings: Sequence[RateReading]) -> RateReading | None:
    """The median (the lower of two) of the readings that come near the fastest.

    Args:
        readings: Of links to several others, of which some may be slower.
    """
    # Not only those that are long enough: fast links are read in less time than slow ones.
    sure = [r for r in readings if r.is_steady] or readings
    if not sure:
        return None
    fastest = max(reading.bytes_per_s for reading in sure)
    near = sorted(
        (r for r in sure if r.bytes_per_s >= _NEAR * fastest),
        key=lambda r: r.bytes_per_s,
    )
    return near[(len(near) - 1) // 2]


def confirmed_reading(readings: Sequence[RateReading]) -> RateReading | None:
    """The highest steady reading of one thing that can be believed, if any.

    A burst that a shaper's bucket let pass after a halt reads far too high, but hardly
    twice the same, and not for long; a busy moment reads too low.
    """
    long = [r for r in readings if r.is_steady and r.window_s >= _BEYOND_DOUBT_S]
    if long:
        return max(long, key=lambda r: r.bytes_per_s)
    steady = sorted((r for r in readings if r.is_steady), key=lambda r: -r.bytes_per_s)
    for one, two in pairwise(steady):
        if two.bytes_per_s >= _ALIKE * one.bytes_per_s:
            return two
    return None


def middle_reading(readings: Sequence[RateReading]) -> RateReading | None:
    """The median, of steady ones where there are any."""
    ordered = sorted(
        [r for r in readings if r.is_steady] or readings, key=lambda r: r.bytes_per_s
    )
    return ordered[(len(ordered) - 1) // 2] if ordered else None
