"""How long training stood still, and how long it was allowed to. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from geartrain.bench.chaos.evidence import Deed, Evidence
from geartrain.bench.chaos.kinds import KINDS
from geartrain.units import format_seconds

_CALM_PAUSE_S = 3.0
"""Also where nothing happens: what a loaded machine may take from everybody."""
_AFTER_EFFECT_S = 2.0
"""A fault that has ended still explains what comes this soon after it."""
_MOST_STEPS = 3.0
"""A step that begins as a fault comes is made twice, and the plan is made anew."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pause:
    """The time between two commits, anywhere in the fleet."""

    step: int
    """The one that ended it."""
    began_at_s: float
    seconds: float
    limit_s: float
    kinds: tuple[str, ...]
    """Of the faults that explain it."""

    @property
    def is_too_long(self) -> bool:
        """Whether it exceeds its limit."""
        return self.seconds > self.limit_s

    def describe(self) -> str:
        """For people."""
        cause = f" after {', '.join(self.kinds)}" if self.kinds else " with no fault near"
        return (
            f"{format_seconds(self.seconds)} before step {self.step}{cause} "
            f"(limit {format_seconds(self.limit_s)})"
        )


def find_pauses(evidence: Evidence) -> tuple[Pause, ...]:
    """The times between commits while faults came, in order.

    The last one ends when the run was asked to stop: a run that stands still at the end
    is found, too.
    """
    times = [
        (step, at_s) for at_s, step in evidence.progress() if at_s <= evidence.ended_at_s
    ]
    if evidence.ending.outcome != "finished":
        last_step = times[-1][0] if times else 0
        times.append((last_step + 1, evidence.ended_at_s))
    pauses = []
    for (_, before_s), (step, after_s) in pairwise(times):
        if after_s <= evidence.began_at_s:
            continue
        causes = [d for d in evidence.deeds if _explains(d, before_s, after_s)]
        pauses.append(
            Pause(
                step=step,
                began_at_s=before_s,
                seconds=after_s - before_s,
                limit_s=_limit_s(causes, evidence),
                kinds=tuple(dict.fromkeys(d.fault.kind for d in causes)),
            )
        )
    return tuple(pauses)


def worst_pause(pauses: Sequence[Pause]) -> Pause | None:
    """The one that is nearest to its limit, or furthest beyond."""
    return max(pauses, key=lambda pause: pause.seconds / pause.limit_s, default=None)


def _explains(deed: Deed, before_s: float, after_s: float) -> bool:
    if not deed.was_done:
        return False
    kind = KINDS[deed.fault.kind]
    ended_at_s = deed.began_at_s if deed.ended_at_s is None else deed.ended_at_s
    until_s = max(ended_at_s, deed.began_at_s + kind.pause_s) + _AFTER_EFFECT_S
    return deed.began_at_s <= after_s and until_s >= before_s


def _limit_s(causes: Sequence[Deed], evidence: Evidence) -> float:
    if evidence.max_pause_s is not None:
        return evidence.max_pause_s
    kinds = [KINDS[deed.fault.kind] for deed in causes]
    pause_s = max((kind.pause_s for kind in kinds), default=_CALM_PAUSE_S)
    slows_by = max((kind.slows_by for kind in kinds), default=1.0)
    return pause_s + _MOST_STEPS * slows_by * evidence.calm_step_s
