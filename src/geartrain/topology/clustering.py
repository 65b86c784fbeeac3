"""From rates between pairs of hosts to racks. Pure.

What is compared is not a rate but ``quality = rate / min(best send, best receive)``: what
a link carries of what its two ends were seen to carry elsewhere. It is 1 inside a rack,
also for a slow host, and less across an uplink that many share.

A host that is slower than its share of the uplink sees all others alike: its qualities
say nothing. Such hosts are set aside here and placed by a test of their own
(:mod:`geartrain.topology.placing`), before they can glue two racks together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations
from statistics import fmean, median

from geartrain.topology.readings import PairReadings, is_sure

Racks = tuple[tuple[int, ...], ...]
Qualities = Mapping[tuple[int, int], float]
"""By (lower, higher) position; the mean of both directions."""

SAME_RACK = 0.7
"""Average quality from which two groups are one rack. TCP flows, shapers and a busy host
move a reading by 15 %; an uplink that matters is shared and reads far below."""
_FAR = 0.35
_HALF_FAR = 0.5
_ODD = 1.25
_DOUBTFUL = (0.2, 0.75)


def find_qualities(readings: PairReadings) -> dict[tuple[int, int], float]:
    """How each link compares with what its ends can do.

    Returns:
        Quality by pair, capped at 1; pairs that were not measured are absent.
    """
    sends, receives = readings.best_sends(), readings.best_receives()
    qualities = {}
    for a, b in sorted({(min(pair), max(pair)) for pair in readings.rates}):
        seen = [
            min(rate / min(sends[i], receives[j]), 1.0)
            for i, j in ((a, b), (b, a))
            if (rate := readings.rate(i, j)) is not None
        ]
        if seen:
            qualities[a, b] = fmean(seen)
    return qualities


def quality_between(qualities: Qualities, one: Sequence[int], two: Sequence[int]) -> float:
    """The average quality between two groups; 0 where nothing was measured."""
    seen = [
        qualities[pair]
        for i in one
        for j in two
        if (pair := (min(i, j), max(i, j))) in qualities
    ]
    return fmean(seen) if seen else 0.0


def cluster(hosts: Sequence[int], qualities: Qualities) -> Racks:
    """Group hosts whose links carry all that their ends can.

    Average linkage: the two groups of the highest average quality merge, as long as that
    is at least ``SAME_RACK``. With single linkage one lucky pair glues two racks.

    Returns:
        Racks in order of their first host.

    >>> cluster([0, 1, 2], {(0, 1): 1.0, (0, 2): 0.1, (1, 2): 0.2})
    ((0, 1), (2,))
    """
    groups: dict[int, list[int]] = {host: [host] for host in hosts}
    sums = {  # of qualities, and how many, between two groups
        (min(pair), max(pair)): (qualities[pair], 1)
        for pair in combinations(sorted(hosts), 2)
        if pair in qualities
    }
    while sums:
        (a, b), (total, count) = max(
            sums.items(),
            key=lambda item: (item[1][0] / item[1][1], -item[0][0], -item[0][1]),
        )
        if total / count < SAME_RACK:
            break
        groups[a] += groups.pop(b)
        del sums[a, b]
        for other in groups:
            old, new = (min(other, b), max(other, b)), (min(other, a), max(other, a))
            if old in sums:
                total, count = sums.pop(old)
                known_total, known_count = sums.get(new, (0.0, 0))
                sums[new] = (known_total + total, known_count + count)
    return tuple(sorted(tuple(sorted(group)) for group in groups.values()))


def find_inconclusive(readings: PairReadings, qualities: Qualities) -> tuple[int, ...]:
    """Hosts that see all others alike although others do not.

    Returns:
        Their positions; empty where no host surely sees another as far, since then there
        is nothing to tell apart. An uneven burst proves no distance.
    """
    rows = [
        sorted(
            quality
            for pair, quality in qualities.items()
            if host in pair and _is_steady(readings, pair)
        )
        for host in range(readings.num_hosts)
    ]
    conclusive = [
        bool(row)
        and (row[0] < _FAR or fmean(row[: max((len(row) + 1) // 2, 1)]) < _HALF_FAR)
        for row in rows
    ]
    if not any(conclusive):
        return ()
    return tuple(host for host, told in enumerate(conclusive) if not told)


def find_ambiguous(
    racks: Racks, qualities: Qualities, best: Sequence[float]
) -> tuple[int, ...]:
    """Slow hosts that another rack would suit almost as well.

    Args:
        racks: As clustered.
        qualities: By pair.
        best: What each host was seen to send, bytes/s.

    Returns:
        Hosts much slower than a rack that is not theirs and that they reach at more than
        half their own speed: noise may have decided, and a test under load should.
    """
    return tuple(
        host
        for rack in racks
        for host in rack
        if any(
            other != rack
            and best[host] < SAME_RACK * median(best[h] for h in other)
            and quality_between(qualities, [host], other) >= _HALF_FAR
            for other in racks
        )
    )


def find_doubtful(readings: PairReadings) -> tuple[tuple[int, int], ...]:
    """Pairs to measure again, alone, before the racks are believed: the nearest first.

    Those that read neither as one rack nor as clearly two, those of which an uneven
    burst was all that was seen (unless all pairs of their racks are as far apart), and
    those that read far higher than all others of their sender, but not for long. A busy
    moment looks like that.
    """
    qualities = find_qualities(readings)
    low, high = _DOUBTFUL
    racks = cluster(range(readings.num_hosts), qualities)
    rack_of = {host: rack for rack in racks for host in rack}

    def is_near(pair: tuple[int, int]) -> bool:
        one, two = rack_of[pair[0]], rack_of[pair[1]]
        return one == two or quality_between(qualities, one, two) > low

    doubtful = [
        (quality, pair)
        for pair, quality in qualities.items()
        if low < quality < high
        or (quality <= low and not _is_steady(readings, pair) and is_near(pair))
        or _is_odd(readings, pair)
    ]
    return tuple(pair for _, pair in sorted(doubtful, key=lambda item: -item[0]))


def _is_steady(readings: PairReadings, pair: tuple[int, int]) -> bool:
    ways = [readings.rates.get(way) for way in (pair, pair[::-1])]
    return all(way is not None and way.is_steady for way in ways)


def _is_odd(readings: PairReadings, pair: tuple[int, int]) -> bool:
    """Whether a way reads so high that a shaper's bucket may be what was read."""
    for source, target in (pair, pair[::-1]):
        reading = readings.rates.get((source, target))
        others = [
            r.bytes_per_s
            for way, r in readings.rates.items()
            if way[0] == source and way[1] != target and is_sure(r)
        ]
        if (
            reading is not None
            and not is_sure(reading)
            and others
            and reading.bytes_per_s > _ODD * max(others)
        ):
            return True
    return False
