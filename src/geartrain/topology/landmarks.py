"""Racks of many hosts by O(N log N) pairs instead of all N(N-1)/2.

A few hosts, the landmarks, are measured against all others. A host that reaches a
landmark as fast as that landmark can go is in its rack. Hosts that no landmark knows are
the next landmarks' business. What was grouped is verified with representatives.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

from geartrain.topology.clustering import (
    SAME_RACK,
    Racks,
    cluster,
    find_qualities,
)
from geartrain.topology.instrument import Survey
from geartrain.topology.pair_survey import measure_pairs, repeat_pairs
from geartrain.topology.placing import place_hosts
from geartrain.topology.tournament import Pair, disjoint_rounds, tournament_rounds

_PAIRS_PER_HOST_AND_LOG = 4.0
"""The constant of O(N log N): pairs measured by landmarks before neighbours are tried."""
_MAX_CHECKED_RACKS = 64
_MANY = 3


def survey_by_landmarks(survey: Survey, labels: Sequence[str | None]) -> Racks:
    """Find the racks of many hosts.

    Args:
        survey: Its readings are filled for the pairs that were measured.
        labels: What each host's rack is said to be: a landmark is taken from each first.

    Returns:
        The racks, in order of their first host. With more racks than a few times
        log2 N, those that no landmark met are found by testing neighbours in the order
        given, which may divide a rack; a note says so.
    """
    num_hosts = survey.num_hosts
    num_landmarks = max(2, math.ceil(math.log2(num_hosts)))
    allowed = int(_PAIRS_PER_HOST_AND_LOG * num_hosts * math.log2(num_hosts))
    size = survey.pair_bytes(2 * 2 * num_hosts * num_landmarks)
    left = list(range(num_hosts))
    groups: list[list[int]] = []
    used = 0
    while len(left) > 1 and used + num_landmarks * len(left) <= allowed:
        landmarks = _choose(left, labels, num_landmarks)
        pairs = _meetings(landmarks, left)
        _measure(survey, pairs, size, used, allowed)
        used += len(pairs)
        found = _assign(survey, landmarks, left)
        groups += found
        placed = {host for group in found for host in group}
        left = [host for host in left if host not in placed]
    groups += _neighbours(survey, left, size)
    racks = _verify(survey, groups, size)
    return _place_slow(survey, racks)


def _choose(left: Sequence[int], labels: Sequence[str | None], count: int) -> list[int]:
    """Landmarks: one of each label first, then evenly spread over the rest."""
    chosen: list[int] = []
    seen: set[str] = set()
    for host in left:
        label = labels[host]
        if label is not None and label not in seen and len(chosen) < count:
            seen.add(label)
            chosen.append(host)
    spread = [left[i * len(left) // count] for i in range(min(count, len(left)))]
    for host in (*spread, *left):
        if len(chosen) >= min(count, len(left)):
            break
        if host not in chosen:
            chosen.append(host)
    return sorted(chosen)


def _meetings(landmarks: Sequence[int], left: Sequence[int]) -> list[Pair]:
    """All landmarks against all, so ordered that each is busy in every round."""
    known = set(landmarks)
    others = [host for host in left if host not in known]
    pairs = [pair for met in tournament_rounds(len(landmarks)) for pair in met]
    ordered = [(landmarks[a], landmarks[b]) for a, b in pairs]
    for shift in range(len(others)):
        ordered += [
            (landmark, others[(shift + i) % len(others)])
            for i, landmark in enumerate(landmarks)
        ]
    return list(dict.fromkeys((min(p), max(p)) for p in ordered))


def _measure(
    survey: Survey, pairs: Sequence[Pair], size: int, done: int, total: int
) -> None:
    for positions in disjoint_rounds(pairs):
        measure_pairs(survey, [pairs[position] for position in positions], size)
        done += len(positions)
        survey.tell("pairs", done, max(total, done))


def _assign(
    survey: Survey, landmarks: Sequence[int], left: Sequence[int]
) -> list[list[int]]:
    """The hosts of each landmark that tells hosts apart.

    A landmark that reads all alike, as a slow host or a lone one does, would gather all;
    unless every landmark does, it gathers nobody.
    """
    rates = {
        landmark: {
            host: _mutual(survey, landmark, host) for host in left if host != landmark
        }
        for landmark in landmarks
    }
    flat = {
        lm
        for lm, row in rates.items()
        if min(row.values()) >= SAME_RACK * max(row.values())
    }
    if len(flat) == len(landmarks):
        return [list(left)]
    useful = [landmark for landmark in landmarks if landmark not in flat]
    best = {landmark: _robust_best(rates[landmark]) for landmark in useful}
    groups: dict[int, list[int]] = {}
    leader = dict(zip(useful, useful, strict=True))
    for index, one in enumerate(useful):  # landmarks of one rack gather together
        for two in useful[index + 1 :]:
            if rates[one][two] >= SAME_RACK * min(best[one], best[two]):
                leader[two] = leader[one]
    for host in left:
        if host in leader:
            groups.setdefault(leader[host], []).append(host)
            continue
        near = [lm for lm in useful if rates[lm][host] >= SAME_RACK * best[lm]]
        if near:
            nearest = max(near, key=lambda lm: (rates[lm][host] / best[lm], -lm))
            groups.setdefault(leader[nearest], []).append(host)
    return [sorted(group) for group in groups.values()]


def _robust_best(row: dict[int, float]) -> float:
    """The second best where there are many: one lucky reading must not set the measure."""
    ordered = sorted(row.values(), reverse=True)
    return (
        ordered[1]
        if len(ordered) >= _MANY and ordered[1] > SAME_RACK * ordered[0]
        else ordered[0]
    )


def _mutual(survey: Survey, one: int, two: int) -> float:
    rates = [survey.readings.rate(one, two) or 0.0, survey.readings.rate(two, one) or 0.0]
    return sum(rates) / len(rates)


def _neighbours(survey: Survey, left: Sequence[int], size: int) -> list[list[int]]:
    """Group what is left by testing each host against the one before it."""
    if not left:
        return []
    if len(left) > 1:
        survey.notes.append(
            f"{len(left)} hosts were grouped with their neighbours in the order "
            "given only; give labels, or hosts in order of their racks, if a rack "
            "looks divided"
        )
    chain = list(pairwise(left))
    _measure(survey, [(min(p), max(p)) for p in chain], size, 0, len(chain))
    qualities = find_qualities(survey.readings)
    groups = [[left[0]]]
    for a, b in chain:
        if qualities.get((min(a, b), max(a, b)), 0.0) >= SAME_RACK:
            groups[-1].append(b)
        else:
            groups.append([b])
    return groups


def _verify(survey: Survey, groups: Sequence[list[int]], size: int) -> Racks:
    """Measure representatives of all groups against each other, and each host once more."""
    inside = [(min(a, b), max(a, b)) for group in groups for a, b in pairwise(group)]
    repeat_pairs(survey, inside, size)
    heads = [group[len(group) // 2] for group in groups]
    if len(heads) > _MAX_CHECKED_RACKS:
        return tuple(sorted(tuple(group) for group in groups))
    met = tournament_rounds(len(heads))
    repeat_pairs(
        survey,
        [(min(heads[a], heads[b]), max(heads[a], heads[b])) for r in met for a, b in r],
        size,
    )
    qualities = find_qualities(survey.readings)
    merged = cluster(heads, {p: q for p, q in qualities.items() if set(p) <= set(heads)})
    of_head = dict(zip(heads, groups, strict=True))
    return tuple(
        sorted(tuple(sorted(h for head in m for h in of_head[head])) for m in merged)
    )


def _place_slow(survey: Survey, racks: Racks) -> Racks:
    """Test hosts that stand alone: slow ones are in some rack, lone ones in none."""
    alone = [rack[0] for rack in racks if len(rack) == 1]
    others = tuple(rack for rack in racks if len(rack) > 1)
    if not others:
        return racks
    return place_hosts(survey, others, alone)
