"""Where a slow host belongs, which sees all others alike.

Rates alone cannot say: a host slower than its share of the uplink reaches its own rack
and every other one at the same speed. So the uplink is filled by others, and the host is
measured against a rack's member meanwhile. Inside the rack it does not notice; across
the uplink it is squeezed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean

from geartrain.topology.arrivals import tail_rate
from geartrain.topology.clustering import SAME_RACK, Racks, find_qualities, quality_between
from geartrain.topology.instrument import Survey
from geartrain.topology.limits import group_bytes
from geartrain.topology.rounds import Flow

_WORTH_A_TEST = 0.5
"""Average quality to a rack below which a host is surely not in it."""
_LEAST_LOADERS, _MOST_LOADERS = 6, 16
_LOAD_PER_NEED = 2.5
_TRIES = 2
_PLACING_PART = 0.15
"""Of what is left of the budget, for one test."""
_LONGER = 1.5


def place_hosts(survey: Survey, racks: Racks, hosts: Sequence[int]) -> Racks:
    """Put hosts that see all others alike where they belong.

    Args:
        survey: With all pairs read.
        racks: Of the hosts that were clustered; empty if all see all alike.
        hosts: The others; the fastest is placed first.

    Returns:
        Racks of all hosts, in order of their first one.
    """
    groups = [list(rack) for rack in racks]
    sends = survey.readings.best_sends()
    qualities = find_qualities(survey.readings)
    for host in sorted(hosts, key=lambda h: (-sends[h], h)):
        # A group of hosts placed before is no candidate: filling a slow host's uplink
        # fills the host itself, and the test would say nothing.
        candidates = sorted(
            (g for g in groups if not set(g) <= set(hosts)),
            key=lambda group: (-quality_between(qualities, [host], group), group),
        )
        for group in candidates:
            if quality_between(qualities, [host], group) < _WORTH_A_TEST:
                continue
            if _is_inside(survey, host, group):
                group.append(host)
                break
        else:
            groups.append([host])
    if not racks and hosts:
        return (tuple(sorted(hosts)),)
    return tuple(sorted(tuple(sorted(group)) for group in groups))


def _is_inside(survey: Survey, host: int, rack: Sequence[int]) -> bool:
    """Whether a host reaches a rack as fast while that rack's uplink is full."""
    outside = [h for h in range(survey.num_hosts) if h != host and h not in rack]
    if not outside:
        return True
    best = 0.0
    for _ in range(_TRIES):  # a busy moment squeezes too
        best = max(best, _loaded_fraction(survey, host, rack, outside))
        if best >= SAME_RACK:
            return True
    return False


def _loaded_fraction(
    survey: Survey, host: int, rack: Sequence[int], outside: Sequence[int]
) -> float:
    """What is left of a host's rate to a rack while others fill the rack's uplink."""
    sends, receives = survey.readings.best_sends(), survey.readings.best_receives()
    member = max(rack, key=lambda h: (sends[h], -h))
    loaded = [h for h in rack if h != member] or [member]
    # The fastest, lest their own links be what is filled.
    loaders = sorted(outside, key=lambda h: (-sends[h], h))
    crossing = [survey.readings.rate(h, m) or 0.0 for h in outside for m in rack]
    need = _LOAD_PER_NEED * max(crossing) / max(sends[host], 1.0)
    count = min(max(math.ceil(need), _LEAST_LOADERS), _MOST_LOADERS)
    pairs = [(host, member)]
    pairs += [(loaders[i % len(loaders)], loaded[i % len(loaded)]) for i in range(count)]
    duration_s = survey.limits.burst_s(
        _LONGER * survey.limits.group_burst_s, survey.worst_latency_s
    )
    size = group_bytes(int(_PLACING_PART * survey.instrument.left_bytes), 2 * len(pairs))
    flows = [
        Flow(source=i, target=j, max_bytes=size, duration_s=duration_s)
        for a, b in pairs
        for i, j in ((a, b), (b, a))
    ]
    fractions = []
    for reading in survey.run(flows)[:2]:
        rate = tail_rate(reading.arrivals)
        reach = min(sends[reading.source], receives[reading.target])
        if rate is None or not reach:  # 0: nothing into that host was read
            fractions.append(0.0)
        else:
            fractions.append(min(rate.bytes_per_s / reach, 1.0))
    return fmean(fractions) if fractions else 0.0
