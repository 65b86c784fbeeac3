"""Measures pairs of hosts, and finds the racks from what was read."""

from __future__ import annotations

from collections.abc import Sequence

from geartrain.topology.arrivals import tail_rate
from geartrain.topology.clustering import (
    Racks,
    cluster,
    find_ambiguous,
    find_doubtful,
    find_inconclusive,
    find_qualities,
)
from geartrain.topology.instrument import Survey
from geartrain.topology.placing import place_hosts
from geartrain.topology.rounds import Flow
from geartrain.topology.tournament import Pair, disjoint_rounds, tournament_rounds
from geartrain.topology.verification import contested_pairs

_LONG_PATH_S = 0.003
"""One way: here a burst of ``pair_burst_s`` ends before TCP has filled the path."""
_MAX_REPEATS = 2
_REPEATED_PART = 0.25
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
    """Cluster what was read; repeat what is in doubt; test hosts that see all alike."""
    racks: Racks = ()
    for attempt in range(_MAX_REPEATS + 1):
        qualities = find_qualities(survey.readings)
        unclear = find_inconclusive(survey.num_hosts, qualities)
        core = [host for host in range(survey.num_hosts) if host not in unclear]
        racks = cluster(core, qualities)
        sends = survey.readings.best_sends()
        if ambiguous := find_ambiguous(racks, qualities, sends):
            unclear = (*unclear, *ambiguous)
            racks = cluster([host for host in core if host not in ambiguous], qualities)
        doubtful = find_doubtful(racks, qualities)
        survey.tell("racks", attempt, _MAX_REPEATS)
        again = (*survey.readings.unread_pairs(), *doubtful)
        if not again or attempt == _MAX_REPEATS:
            break
        repeat_pairs(survey, again, size)
    return place_hosts(survey, racks, unclear)


def repeat_pairs(survey: Survey, pairs: Sequence[Pair], size: int) -> None:
    """Measure pairs again, as far as a part of the budget goes."""
    distinct = list(dict.fromkeys(pairs))
    affordable = int(_REPEATED_PART * survey.instrument.left_bytes / max(2 * size, 1))
    for positions in disjoint_rounds(distinct[:affordable]):
        measure_pairs(survey, [distinct[position] for position in positions], size)


def measure_pairs(survey: Survey, pairs: Sequence[Pair], size: int) -> None:
    """Measure disjoint pairs at the same time, each in both directions at once."""
    flows = []
    for a, b in pairs:
        known_s = survey.readings.latencies_s.get((a, b), 0.0)
        duration_s = survey.limits.burst_s(survey.limits.pair_burst_s, known_s)
        flows += [
            Flow(source=i, target=j, max_bytes=size, duration_s=duration_s)
            for i, j in ((a, b), (b, a))
        ]
    for reading in survey.run(flows):
        survey.readings.record(
            reading.source, reading.target, tail_rate(reading.arrivals), reading.latency_s
        )


def _is_long(survey: Survey, pair: Pair) -> bool:
    return survey.readings.latencies_s.get(pair, 0.0) > _LONG_PATH_S
