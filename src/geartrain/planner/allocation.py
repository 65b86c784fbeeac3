"""Share samples among devices so that the slowest one ends as early as possible."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from geartrain.planner.curve_fit import FloatArray


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeTable:
    """What a device gets done in a time.

    Level k takes ``times_s[k]`` and is enough for ``k * samples_per_level`` samples.
    """

    device_id: str
    times_s: FloatArray
    """Never falling, shape (num_levels,); level 0 is taking part with no sample."""
    samples_per_level: int = 1

    def capacity(self, within_s: float, *, inclusive: bool = True) -> int:
        """Samples done within (or, not inclusive, in less than) a time."""
        side = "right" if inclusive else "left"
        level = int(np.searchsorted(self.times_s, within_s, side=side)) - 1  # type: ignore[call-overload]  # numpy wants a literal
        return max(0, level) * self.samples_per_level


def occurring_times_s(tables: Sequence[TimeTable]) -> FloatArray:
    """Every time that occurs in the tables, once, rising."""
    # Not np.unique: its first call imports numpy.ma, 10 ms that a joiner would take over
    # its first plan while the others wait.
    times_s = np.sort(np.concatenate([table.times_s for table in tables]))
    is_first = np.ones(len(times_s), dtype=np.bool_)
    np.not_equal(times_s[1:], times_s[:-1], out=is_first[1:])
    return times_s[is_first]


def least_time_s(
    tables: Sequence[TimeTable], num_samples: int, times_s: FloatArray
) -> float | None:
    """Least time in which the devices do so many samples together; None if never.

    Bisection over ``times_s``, which holds the times that occur in the tables, rising.
    It is exact, because a device's time never falls with its share, so what is done
    within a time never falls with it.
    """
    if num_samples == 0:
        return 0.0
    low, high = 0, len(times_s) - 1
    if _capacity(tables, float(times_s[high])) < num_samples:
        return None
    while low < high:
        middle = (low + high) // 2
        if _capacity(tables, float(times_s[middle])) >= num_samples:
            high = middle
        else:
            low = middle + 1
    return float(times_s[low])


def allocate(tables: Sequence[TimeTable], num_samples: int) -> dict[str, int] | None:
    """Samples of each device such that the slowest ends as early as possible.

    What freedom is left goes to the second slowest, then the third, and so on: the
    devices that must reach the least time are as few as possible and take all that
    they can within it; the rest is shared among the others by the same rule. Ties are
    settled by device id, so that the order of the devices does not matter.

    Returns:
        Shares by device id, which add up to ``num_samples``; None if they cannot.
    """
    shares = {table.device_id: 0 for table in tables}
    active = sorted(tables, key=lambda table: table.device_id)
    times_s = occurring_times_s(active)
    rest = num_samples
    while rest > 0:
        time_s = least_time_s(active, rest, times_s)
        if time_s is None:
            return None
        for table in _slowest(active, rest, time_s):
            shares[table.device_id] = min(rest, table.capacity(time_s))
            rest -= shares[table.device_id]
            active.remove(table)
    return shares


def _slowest(
    tables: Sequence[TimeTable], num_samples: int, time_s: float
) -> list[TimeTable]:
    """The fewest devices that must take as long as ``time_s``."""
    before = [table.capacity(time_s, inclusive=False) for table in tables]
    gains = [
        table.capacity(time_s) - done for table, done in zip(tables, before, strict=True)
    ]
    missing = num_samples - sum(before)
    chosen = []
    for index in sorted(range(len(tables)), key=lambda i: (-gains[i], i)):
        if missing <= 0:
            break
        chosen.append(tables[index])
        missing -= gains[index]
    return chosen


def _capacity(tables: Sequence[TimeTable], within_s: float) -> int:
    return sum(table.capacity(within_s) for table in tables)
