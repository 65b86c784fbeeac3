"""What was measured between pairs of hosts, the best of every repeat. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from geartrain.topology.arrivals import RateReading

LONG_ENOUGH_S = 0.003
"""A slope over less than this may lie inside a shaper's bucket (4 ms of its rate)."""


@dataclass(slots=True)
class PairReadings:
    """Rates and latencies by (source, target) position.

    Other work on a host only ever slows a burst, so of two readings the higher one is
    nearer to the truth.
    """

    num_hosts: int
    rates: dict[tuple[int, int], RateReading] = field(default_factory=dict)
    latencies_s: dict[tuple[int, int], float] = field(default_factory=dict)

    def record(
        self, source: int, target: int, rate: RateReading | None, latency_s: float
    ) -> None:
        """Take in a reading."""
        key = (source, target)
        known = self.rates.get(key)
        if rate is not None and (known is None or rate.bytes_per_s > known.bytes_per_s):
            self.rates[key] = rate
        self.latencies_s[key] = min(latency_s, self.latencies_s.get(key, float("inf")))

    def rate(self, source: int, target: int) -> float | None:
        """The rate in bytes/s; None where it was not measured."""
        reading = self.rates.get((source, target))
        return None if reading is None else reading.bytes_per_s

    def best_sends(self) -> list[float]:
        """The fastest that each host was seen to send, bytes/s; 0 where never."""
        return self._best(0)

    def best_receives(self) -> list[float]:
        """The fastest that each host was seen to receive, bytes/s; 0 where never."""
        return self._best(1)

    def _best(self, end: int) -> list[float]:
        best = [0.0] * self.num_hosts
        for key, reading in self.rates.items():
            best[key[end]] = max(best[key[end]], reading.bytes_per_s)
        return best

    def longest_window(self, keys: Iterable[tuple[int, int]]) -> float:
        """The longest slope among these links, seconds."""
        return max((self.rates[k].window_s for k in keys if k in self.rates), default=0.0)
