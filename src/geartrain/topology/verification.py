"""Labels against measurement: what a label may add, and what is overruled."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import combinations
from statistics import median

from geartrain.topology.capacities import measure_between
from geartrain.topology.clustering import (
    SAME_RACK,
    Racks,
    find_qualities,
    quality_between,
)
from geartrain.topology.instrument import Survey
from geartrain.topology.labels import group_by_label
from geartrain.topology.tournament import Pair
from geartrain.units import format_rate

_TRIES = 2
_WORTH_A_TEST = 0.3
"""Average quality between two racks below which they are surely two."""


def contested_pairs(racks: Racks, labels: Sequence[str | None]) -> tuple[Pair, ...]:
    """Pairs of which the labels and the racks say different things."""
    rack_of = {host: index for index, rack in enumerate(racks) for host in rack}
    return tuple(
        (a, b)
        for a, b in combinations(range(len(labels)), 2)
        if labels[a] is not None
        and labels[b] is not None
        and (labels[a] == labels[b]) != (rack_of[a] == rack_of[b])
    )


def split_by_labels(
    survey: Survey, racks: Racks, labels: Sequence[str | None], source: str
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
        whole = sum(len(part) for part in parts) == len(rack)
        if (
            len(parts) > 1
            and whole
            and all(_is_apart(survey, one, two) for one, two in combinations(parts, 2))
        ):
            found += parts
            continue
        if len(parts) > 1:
            names = ", ".join(str(labels[part[0]]) for part in parts)
            survey.notes.append(
                f"{source}: {names} are one rack, since their hosts reach each other as "
                "fast as their own; overruled by measurement"
            )
        found.append(rack)
    return tuple(sorted(found))


def merge_alike(survey: Survey, racks: Racks) -> Racks:
    """Merge racks that reach each other as fast as their hosts can.

    A pair's reading of a busy moment may divide a rack. All hosts of both parts at once
    tell: across a real uplink they get far less than together they can. Hosts that are
    slower than the other rack's are left alone; those were placed by a test under load.
    So are two lone hosts, which always get all through that they can.

    Returns:
        The racks, merged where that was measured.
    """
    found = list(racks)
    while True:
        sends = survey.readings.best_sends()
        qualities = find_qualities(survey.readings)
        for one, two in combinations(found, 2):
            speeds = sorted(median(sends[host] for host in rack) for rack in (one, two))
            if (
                max(len(one), len(two)) > 1
                and speeds[0] >= SAME_RACK * speeds[1]
                and quality_between(qualities, one, two) >= _WORTH_A_TEST
                and _is_apart(survey, one, two) is False
            ):
                found = [rack for rack in found if rack not in {one, two}]
                found = sorted([*found, tuple(sorted((*one, *two)))])
                break
        else:
            return tuple(found)


def _is_apart(survey: Survey, one: Sequence[int], two: Sequence[int]) -> bool | None:
    """Whether two groups get less through to each other than they can; None: unread."""
    sends, receives = survey.readings.best_sends(), survey.readings.best_receives()
    fractions: dict[int, float] = {}
    for _ in range(_TRIES):  # a busy moment reads too low
        readings = measure_between(survey, one, two)
        for way, (source, target) in enumerate(((one, two), (two, one))):
            reading = readings[way]
            if reading is not None:
                able = min(sum(sends[h] for h in source), sum(receives[h] for h in target))
                fraction = reading.bytes_per_s / max(able, 1.0)
                fractions[way] = max(fraction, fractions.get(way, 0.0))
        if len(fractions) == len(readings) and min(fractions.values()) > SAME_RACK:
            return False
    return True if fractions else None


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
        text = "slowly" if rate is None else f"at {format_rate(rate * 8, 'bit/s')}"
        survey.notes.append(
            f"{source}: {host_names[host_a]} and {host_names[host_b]} bear the label "
            f"{labels[host_a]} but reach each other {text}; overruled by measurement: "
            f"they are in {rack_of[host_a]} and {rack_of[host_b]}"
        )
        break  # one example says it; every pair of a lying label would fill a page
    return names
