"""Measures pairs of hosts, and finds the racks from what was read."""

from __future__ import annotations

from collections.abc import Sequence

from geartrain.topology.arrivals import flow_rate
from geartrain.topology.clustering import (
    Racks,
    cluster,
    find_ambiguous,
    find_doubtful,
    find_inconclusive,
    find_qualities,
)
from geartrain.topology.instrument import Survey
from geartrain.topology.labels import contested_pairs
from geartrain.topology.placing import place_hosts
from geartrain.topology.rounds import Flow
from geartrain.topology.tournament import Pair, tournament_rounds

_LONG_PATH_S = 0.003
"""One way: here a burst of ``pair_burst_s`` ends before TCP has filled the path."""
_MAX_REPEATS = 2
_FASTER_ALONE = 4.0
_REPEATED_PART = 0.3
"""Of what is left of the budget, for repeating doubtful pairs."""


def survey_all_pairs(survey: Survey, labels: Sequence[str | None]) -> Racks:
    """Measure every pair, and find the racks.

    Args:
        survey: Its readings are filled.
        labels: What each host's rack is said to be. Pairs of which the labels and the
            first racks say different things are measured again.

    Returns:
        The racks, in order of their first host.
    """
    rounds = tournament_rounds(survey.num_hosts)
    num_pairs = sum(len(pairs) for pairs in rounds)
    done = 0
    size = survey.pair_bytes(2 * num_pairs)
    for pairs in rounds:
        size = survey.pair_bytes(2 * (num_pairs - done))
        measure_pairs(survey, pairs, size)
        done += len(pairs)
        survey.tell("pairs", done, num_pairs)
    repeat_pairs(
        survey, [p for pairs in rounds for p in pairs if _is_long(survey, p)], size
    )
    racks = find_racks(survey, size)
    contested = contested_pairs(racks, labels)
    if contested:
        repeat_pairs(survey, contested, size)
        racks = find_racks(survey, size)
    return racks


def find_racks(survey: Survey, size: int) -> Racks:
    """Repeat what is in doubt; cluster what was read; test hosts that see all alike."""
    for attempt in range(_MAX_REPEATS):
        again = (*survey.readings.unread_pairs(), *find_doubtful(survey.readings))
        survey.tell("racks", attempt, _MAX_REPEATS)
        if not again:
            break
        repeat_pairs(survey, again, size)
    qualities = find_qualities(survey.readings)
    unclear = find_inconclusive(survey.readings, qualities)
    core = [host for host in range(survey.num_hosts) if host not in unclear]
    racks = cluster(core, qualities)
    sends = survey.readings.best_sends()
    if ambiguous := find_ambiguous(racks, qualities, sends):
        unclear = (*unclear, *ambiguous)
        racks = cluster([host for host in core if host not in ambiguous], qualities)
    survey.tell("racks", _MAX_REPEATS, _MAX_REPEATS)
    return place_hosts(survey, racks, unclear)


def repeat_pairs(survey: Survey, pairs: Sequence[Pair], size: int) -> None:
    """Measure pairs again, each alone, as far as a part of the budget goes."""
    left = _REPEATED_PART * survey.instrument.left_bytes
    affordable = []
    for pair in dict.fromkeys(pairs):
        known = max(survey.readings.rate(*way) or 0.0 for way in (pair, pair[::-1]))
        # Alone it may be faster; a slow one still ends by its time.
        left -= 2 * min(size, _FASTER_ALONE * known * survey.limits.pair_burst_s or size)
        if left < 0:
            break
        affordable.append(pair)
    measure_pairs(survey, affordable, size, quietly=True)


def measure_pairs(
    survey: Survey, pairs: Sequence[Pair], size: int, *, quietly: bool = False
) -> None:
    """Measure pairs, disjoint ones at the same time, first one way, then the other.

    Not both ways at once: acknowledgements then wait behind the other way's burst, and a
    processor that serves both hosts has twice the work.
    """
    groups = [
        [_flow(survey, source, target, size)]
        for way in (pairs, [(b, a) for a, b in pairs])
        for source, target in way
    ]
    for readings in survey.run_groups(groups, quietly=quietly):
        for r in readings:
            survey.readings.record(r.source, r.target, flow_rate(r.arrivals), r.latency_s)


def _flow(survey: Survey, source: int, target: int, size: int) -> Flow:
    known_s = survey.readings.latencies_s.get((source, target), 0.0)
    duration_s = survey.limits.burst_s(survey.limits.pair_burst_s, known_s)
    return Flow(source=source, target=target, max_bytes=size, duration_s=duration_s)


def _is_long(survey: Survey, pair: Pair) -> bool:
    return survey.readings.latencies_s.get(pair, 0.0) > _LONG_PATH_S
