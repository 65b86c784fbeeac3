"""Labels against measurement: what a label may add, and what is overruled."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import combinations
from statistics import median

from geartrain.topology.capacities import measure_together
from geartrain.topology.clustering import (
    SAME_RACK,
    Racks,
    find_qualities,
    quality_between,
)
from geartrain.topology.instrument import Survey
from geartrain.topology.labels import contested_pairs, group_by_label
from geartrain.topology.pair_survey import measure_pairs
from geartrain.topology.readings import is_sure
from geartrain.topology.tournament import Pair
from geartrain.units import format_bit_rate

_TRIES = 3
_WORTH_A_TEST = 0.2
"""Average quality between two racks below which they are surely two."""


def split_by_labels(
    survey: Survey, racks: Racks, labels: Sequence[str | None], source: str, size: int
) -> Racks:
    """Test racks that labels divide, with all hosts of both parts at once.

    Pairs of hosts do not fill an uplink that carries more than one of them; all hosts of
    two racks do. So labels can reveal racks that no pair shows.

    Returns:
        The racks, divided where that was measured; a note tells where it was not.
    """
    found = []
    for rack in racks:
        parts = [
            tuple(rack[i] for i in members)
            for _, members in group_by_label([labels[host] for host in rack])
        ]
        if len(parts) <= 1:
            found.append(rack)
            continue
        whole = sum(len(part) for part in parts) == len(rack)
        reason = (
            _why_one(survey, parts, size) if whole else "some of its hosts have no label"
        )
        if reason is None:
            found += parts
            continue
        names = ", ".join(str(labels[part[0]]) for part in parts)
        survey.notes.append(f"{source}: {names} are taken for one rack: {reason}")
        found.append(rack)
    return tuple(sorted(found))


def _why_one(survey: Survey, parts: Sequence[Sequence[int]], size: int) -> str | None:
    """Why groups are one rack; None if each was measured to be apart from each."""
    for one, two in combinations(parts, 2):
        is_apart = _is_apart(survey, one, two, size)
        if is_apart is None:
            return "a test of it could not be read, and pairs of hosts show no boundary"
        if not is_apart:
            return (
                "their hosts reach each other as fast as their own; overruled by "
                "measurement"
            )
    return None


def merge_alike(survey: Survey, racks: Racks, size: int) -> Racks:
    """Merge racks that reach each other as fast as their hosts can.

    Readings of a busy moment may divide a rack. Hosts that are slower than the other
    rack's are left alone; those were placed by a test under load. So are two lone hosts,
    which always get all through that they can.

    Args:
        survey: With the pairs read.
        racks: As clustered.
        size: The longest burst of a pair, bytes.

    Returns:
        The racks, merged where that was measured.
    """
    found = list(racks)
    apart: set[frozenset[tuple[int, ...]]] = set()
    while True:
        candidates = [
            pair for pair in _candidates(survey, found) if frozenset(pair) not in apart
        ]
        if not candidates:
            return tuple(found)
        one, two = candidates[0]
        if _is_apart(survey, one, two, size) is False:
            found = [rack for rack in found if rack not in {one, two}]
            found = sorted([*found, tuple(sorted((*one, *two)))])
        else:
            apart.add(frozenset((one, two)))


def _candidates(
    survey: Survey, racks: Sequence[tuple[int, ...]]
) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Pairs of racks that may be one, the likeliest first."""
    sends = survey.readings.best_sends()
    qualities = find_qualities(survey.readings)
    found = []
    for one, two in combinations(racks, 2):
        slower, faster = sorted(median(sends[h] for h in rack) for rack in (one, two))
        quality = quality_between(qualities, one, two)
        if (
            max(len(one), len(two)) > 1
            and slower >= SAME_RACK * faster
            and quality >= _WORTH_A_TEST
        ):
            found.append((quality, one, two))
    return [(one, two) for _, one, two in sorted(found, key=lambda item: -item[0])]


def _is_apart(
    survey: Survey, one: Sequence[int], two: Sequence[int], size: int
) -> bool | None:
    """Whether two groups get less through to each other than they can; None: unread.

    First a pair alone, so that nothing but the link can slow it. If it gets all through,
    as many pairs at once as there are: they are compared with as many inside the groups,
    so that a busy processor slows both alike.
    """
    one, two = _fast_hosts(survey, one), _fast_hosts(survey, two)
    pairs = [(one[i % len(one)], two[i % len(two)]) for i in range(_TRIES)]
    fractions = []
    for pair in pairs:
        measure_pairs(survey, [pair], size, quietly=True)
        quality = find_qualities(survey.readings).get((min(pair), max(pair)))
        fractions += [] if quality is None else [quality]
        if fractions and fractions[-1] >= SAME_RACK:
            break
    if not fractions:
        return None
    if max(fractions) < SAME_RACK:
        return True
    inside = [(g[i], g[i + 1]) for g in (one, two) for i in range(0, len(g) - 1, 2)]
    count = min(len(one), len(two), len(inside))
    across = list(zip(one[:count], two[:count], strict=True))
    return count > 1 and _is_slower(survey, across, inside[:count], size)


def _fast_hosts(survey: Survey, hosts: Sequence[int]) -> list[int]:
    """Hosts whose own link is not what would limit a test."""
    sends = survey.readings.best_sends()
    typical = median(sends[host] for host in hosts)
    return [host for host in hosts if sends[host] >= SAME_RACK * typical]


def _is_slower(
    survey: Survey, across: Sequence[Pair], inside: Sequence[Pair], size: int
) -> bool:
    """Whether pairs across carry less at once than as many inside.

    Not if those inside could not be read: then there is nothing to compare with.
    """
    backwards = [(b, a) for a, b in across]
    best = {"inside": 0.0, "there": 0.0, "back": 0.0}
    for _ in range(_TRIES):
        for name, links in (("inside", inside), ("there", across), ("back", backwards)):
            reading = measure_together(survey, links, size)
            if reading is not None and is_sure(reading):
                best[name] = max(best[name], reading.bytes_per_s)
        if 0 < SAME_RACK * best["inside"] <= min(best["there"], best["back"]):
            return False
    return best["inside"] > 0


def name_racks(
    survey: Survey, racks: Racks, labels: Sequence[str | None], host_names: Sequence[str],
    source: str,
) -> list[str]:  # fmt: skip
    """Name racks after the label that most of their hosts bear, and say who lied.

    Returns:
        A distinct name for each rack.
    """
    names: list[str] = []
    for index, rack in enumerate(racks):
        counts = Counter(label for host in rack if (label := labels[host]) is not None)
        name = counts.most_common(1)[0][0] if counts else f"rack{index}"
        while name in names:
            name = f"{name}-{index}"
        names.append(name)
    for host_a, host_b in contested_pairs(racks, labels):
        if labels[host_a] != labels[host_b]:
            continue  # said by split_by_labels
        rate = survey.readings.rate(host_a, host_b)
        rack_of = {h: names[i] for i, rack in enumerate(racks) for h in rack}
        text = "slowly" if rate is None else f"at {format_bit_rate(rate)}"
        survey.notes.append(
            f"{source}: {host_names[host_a]} and {host_names[host_b]} bear the label "
            f"{labels[host_a]} but reach each other {text}; overruled by measurement: "
            f"they are in {rack_of[host_a]} and {rack_of[host_b]}"
        )
        break  # one example says it; every pair of a lying label would fill a page
    return names
