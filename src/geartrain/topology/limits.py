"""What a probe may cost, and how it tells how far it is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from geartrain.errors import ConfigError

_DEFAULT_MAX_BYTES = 64_000_000
_HOSTS_OF_DEFAULT = 8
_SMALLEST_PAIR_BYTES = 1 << 16
_LARGEST_PAIR_BYTES = 1_000_000
_TEST_BYTES = 600_000
_TESTED_PART = 10
_LARGEST_GROUP_BYTES = 4_000_000
_PAIR_PART = 0.5
_UPLINK_PART = 0.2
_ROUND_TRIPS_OF_BURST = 24
"""One-way latencies that a burst lasts: TCP doubles its window once a round trip, and
needs about ten to fill a long path."""
_LONGEST_BURST_S = 2.0

Stage = Literal["connect", "pairs", "racks", "nics", "uplinks", "memory"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeLimits:
    """What a probe may send and how long it waits."""

    max_bytes: int | None = None
    """Sent in all, by all hosts. None: 64 MB, and as much again for every 8 hosts more."""
    pair_burst_s: float = 0.04
    group_burst_s: float = 0.08
    """Of several hosts at once, to fill an uplink."""
    timeout_s: float = 5.0
    """For connecting, and for an agent's answer."""
    landmarks_above: int = 64
    """With more hosts than this only some are measured against all."""
    memory_bytes: int = 1 << 24
    """Of a copy through shared memory on each host; 0 leaves that out."""

    def __post_init__(self) -> None:
        if self.max_bytes is not None and self.max_bytes <= 0:
            msg = f"max_bytes={self.max_bytes} must be > 0; a probe sends about 64 MB"
            raise ConfigError(msg)
        for name in ("pair_burst_s", "group_burst_s", "timeout_s"):
            if not 0 < getattr(self, name) <= 60:  # noqa: PLR2004 - a minute
                msg = f"{name}={getattr(self, name)} must be > 0 and at most 60 seconds"
                raise ConfigError(msg)

    def budget_bytes(self, num_hosts: int) -> int:
        """What may be sent in all."""
        if self.max_bytes is not None:
            return self.max_bytes
        return _DEFAULT_MAX_BYTES * max(num_hosts, _HOSTS_OF_DEFAULT) // _HOSTS_OF_DEFAULT

    def pair_bytes(self, num_hosts: int, sent_bytes: int, num_flows: int) -> int:
        """The longest burst of one flow while pairs are measured.

        Args:
            num_hosts: Of the probe.
            sent_bytes: So far.
            num_flows: Still to come. Slow links use less than their part, so that later
                ones may have more.
        """
        left = self.budget_bytes(num_hosts) - sent_bytes
        share = int(_PAIR_PART * self.budget_bytes(num_hosts) - sent_bytes) // num_flows
        wanted = min(max(share, _SMALLEST_PAIR_BYTES), _LARGEST_PAIR_BYTES)
        return min(wanted, max(left, 0) // num_flows)

    def test_bytes(self, left_bytes: int) -> int:
        """The longest burst of a flow in a test of what was found.

        Args:
            left_bytes: Of the budget.
        """
        return min(left_bytes // _TESTED_PART, _TEST_BYTES)

    def uplink_reserve(self, num_hosts: int) -> int:
        """What other stages must leave for the uplinks, bytes."""
        return int(_UPLINK_PART * self.budget_bytes(num_hosts))

    def burst_s(self, shortest_s: float, latency_s: float) -> float:
        """How long to fill a path of this latency."""
        return min(max(shortest_s, _ROUND_TRIPS_OF_BURST * latency_s), _LONGEST_BURST_S)


def group_bytes(left_bytes: int, num_flows: int) -> int:
    """The longest burst of a flow in one of the later stages.

    Args:
        left_bytes: What the stage may use.
        num_flows: In the whole stage.
    """
    return min(left_bytes // max(num_flows, 1), _LARGEST_GROUP_BYTES)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeProgress:
    """How far a probe is."""

    stage: Stage
    done: int
    total: int
    """Of this stage's steps."""
    elapsed_s: float
    sent_bytes: int


OnProgress = Callable[[ProbeProgress], None]
