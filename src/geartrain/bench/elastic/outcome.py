"""What a fault cost, worked out from what the members wrote down. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from geartrain.bench.elastic.history import History, Mark, Member

_CALM_STEPS = 24
"""The last ones before a fault say what a step takes."""
_STEPS_AFTER_JOIN = 3
"""Plans and exchanges may be made anew in the steps behind the one that a joiner enters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """What was done to a run."""

    case: str
    at_s: float
    """Unix time of the last signal."""
    victims: tuple[str, ...]
    """Names of the processes that were hit, the earlier ones of a pair included."""
    device_ids: tuple[str, ...]
    moment: str = ""
    """What the engine was in the middle of."""
    returned_at_s: float | None = None
    """When a coordinator that was killed listened again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One event of a case, and what it took."""

    at_s: float
    device_ids: tuple[str, ...]
    seconds: float | None
    """Until the next commit; None: the run ended, or stood still until it was ended."""
    step_s: float
    """Median step time before it."""
    moment: str = ""
    limit_s: float | None = None
    """Of this event, where each has its own."""
    steps: float | None = None
    """In steps of the time before; of a join the pause of the others."""
    note: str = ""


def next_commit_s(history: History, fault: Fault) -> float | None:
    """Unix time of the first commit that was made without those that were hit.

    A step that all had voted for when the fault came is committed within moments, and
    says nothing. So only steps count that a survivor began, or began again, after it.
    """
    times = []
    for member in history.members:
        if member.name in fault.victims:
            continue
        begun = {mark.step for mark in member.begun if mark.at_s > fault.at_s}
        times += [
            mark.at_s
            for mark in member.commits
            if mark.at_s > fault.at_s and mark.step in begun
        ]
    return min(times, default=None)


def first_commit_after(history: History, at_s: float) -> float | None:
    """Unix time of the first commit anywhere after a time."""
    return min((t for t in history.first_at_s.values() if t > at_s), default=None)


def calm_step_s(history: History, before_s: float) -> float:
    """Median time between the last commits before a time; 0 where there are none."""
    times = sorted(t for t in history.first_at_s.values() if t < before_s)
    gaps = [after - before for before, after in pairwise(times[-_CALM_STEPS:])]
    return statistics.median(gaps) if gaps else 0.0


def join_outcome(history: History, joiner: Member) -> Outcome:
    """What it took a process to come in, and how long the others paused for it.

    Args:
        history: Of the run.
        joiner: A member that came while the others trained.
    """
    step_s = calm_step_s(history, joiner.born_at_s)
    if not joiner.commits:
        return Outcome(
            at_s=joiner.born_at_s,
            device_ids=(joiner.device_id,),
            seconds=None,
            step_s=step_s,
            note="it made no step",
        )
    first = joiner.commits[0]
    return Outcome(
        at_s=joiner.born_at_s,
        device_ids=(joiner.device_id,),
        seconds=first.at_s - joiner.born_at_s,
        step_s=step_s,
        steps=_pause_steps(history.step_times(), joiner.born_at_s, first.step, step_s),
    )


def _pause_steps(
    times: Sequence[Mark], since_s: float, joined_at: int, step_s: float
) -> float | None:
    """The longest time between commits around a join, beyond a step, in steps."""
    until = joined_at + _STEPS_AFTER_JOIN
    gaps = [
        after.at_s - before.at_s
        for before, after in pairwise(times)
        if after.at_s > since_s and before.at_s >= since_s and after.step <= until
    ]
    if not gaps or step_s <= 0:
        return None
    return max(0.0, max(gaps) / step_s - 1)


def num_steps_lost(history: History) -> int:
    """Steps that a member made twice, or went back by."""
    lost = 0
    for member in history.members:
        for before, after in pairwise(member.commits):
            lost += max(0, before.step + 1 - after.step)
    return lost


def joiners(history: History, since_s: float) -> list[Member]:
    """Members that came after a time, in order."""
    found = [m for m in history.members if m.hello_at_s > since_s]
    return sorted(found, key=lambda m: m.hello_at_s)


def percentile(values: Sequence[float], fraction: float) -> float:
    """Nearest-rank percentile.

    >>> percentile([4.0, 1.0, 3.0, 2.0], 0.95)
    4.0
    """
    ordered = sorted(values)
    rank = -(-len(ordered) * fraction // 1)  # rounded up
    return ordered[max(0, int(rank) - 1)]
