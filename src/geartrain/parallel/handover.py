"""Decides, after a loss, whose state those that are left go on with. Pure.

All members of an exchange have given their part before anyone can have its sum. So when a
step is interrupted, some may have applied it and others not, but nobody is further than
that. See docs/explanation/faults.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from geartrain.errors import CommunicationError
from geartrain.planner.model_profile import ComputeCurve


class PlacesDifferError(CommunicationError):
    """The survivors know each other, but can't go on together; all of them raise it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lineage:
    """How far a rank is."""

    rank: int
    num_steps: int
    """Optimizer steps that were applied, or on a rank that is left out seen."""
    holds_state: bool
    """Whether its model is up to date; a rank that is left out has an old one."""
    num_together: int
    """Evaluations and reduced metrics that it has finished."""
    planned_sizes: tuple[int, ...] = ()
    """Global batch sizes that it has a plan for."""
    num_in_vain: int = 0
    """Samples that it has computed of a step that was not applied."""
    has_begun: bool = False
    """Whether it has begun the interrupted step, and so its batch."""
    cut_in: int = 0
    """Generation in which that batch was cut anew; 0 where it is as it was handed out."""
    name: str = ""
    """Lineage of its state."""
    voted: str = ""
    """Lineage of the next state, where it has all that leads to it."""
    joins: bool = False
    """It has not taken part so far."""
    lead: int = -1
    """Who leads, as far as this rank knows."""
    curves: tuple[ComputeCurve, ...] = ()
    """How fast its device computes, where the others may not know."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Handover:
    """Who gives the state of the last step to whom."""

    num_steps: int
    """That all have applied afterwards."""
    source: int
    to: tuple[int, ...]
    """Ranks, rising; empty where all are equally far."""
    holders: tuple[int, ...]
    """Ranks whose model is up to date afterwards."""
    planned_sizes: tuple[int, ...] = ()
    """Global batch sizes that all have a plan for, rising."""
    num_in_vain: int = 0
    """Samples of the interrupted step that are computed again."""
    have_all_begun: bool = False
    """Whether all have begun the interrupted step, with one and the same batch."""
    num_together: int = 0
    """Evaluations and reduced metrics that all have finished."""
    lead: int = 0
    applies: tuple[int, ...] = ()
    """Ranks that apply the interrupted step themselves, rising: they have all of it."""


def plan_handover(everybody: list[Lineage]) -> Handover:
    """Decide whose state all go on with. Who joins is given what it lacks.

    Raises:
        PlacesDifferError: If they can't all get there: somebody is further than those
            that hold the state, or they are at different places of the script.

    >>> behind = Lineage(rank=0, num_steps=7, holds_state=True, num_together=0)
    >>> ahead = Lineage(rank=2, num_steps=8, holds_state=True, num_together=0)
    >>> handover = plan_handover([behind, ahead])
    >>> handover.num_steps, handover.source, handover.to, handover.holders
    (8, 2, (0,), (0, 2))
    """
    lineages = [li for li in everybody if not li.joins] or everybody
    holding = [lineage for lineage in lineages if lineage.holds_state]
    furthest = max(holding, key=lambda lineage: lineage.num_steps)
    steps = {lineage.num_steps for lineage in lineages}
    strange = steps - {furthest.num_steps, furthest.num_steps - 1}
    if strange:
        places = ", ".join(
            f"rank {lineage.rank}: {lineage.num_steps} steps and "
            f"{lineage.num_together} evaluations"
            for lineage in lineages
        )
        msg = f"those that are left are at different places of the run ({places})"
        raise PlacesDifferError(msg)
    _check_same_history(lineages)
    behind = [li for li in lineages if li.num_steps < furthest.num_steps]
    if behind:
        applies = tuple(li.rank for li in behind if li.voted == furthest.name != "")
    else:
        voted = {lineage.voted for lineage in lineages}
        is_committed = len(voted) == 1 and "" not in voted
        applies = tuple(li.rank for li in lineages) if is_committed else ()
    is_applied = bool(behind or applies)
    num_steps = furthest.num_steps + (not behind and is_applied)
    joiners = [li for li in everybody if li.joins and li not in lineages]
    lacking = [li for li in joiners if li.num_steps != num_steps or not li.holds_state]
    common = set.intersection(*(set(lineage.planned_sizes) for lineage in lineages))
    return Handover(
        num_steps=num_steps,
        source=furthest.rank,
        to=tuple(sorted(li.rank for li in (*behind, *lacking) if li.rank not in applies)),
        holders=tuple(sorted(lineage.rank for lineage in (*holding, *joiners))),
        planned_sizes=tuple(sorted(common)),
        num_in_vain=0 if is_applied else sum(li.num_in_vain for li in lineages),
        have_all_begun=all(lineage.has_begun for lineage in everybody)
        and len({lineage.cut_in for lineage in everybody}) == 1,
        num_together=max(lineage.num_together for lineage in lineages),
        lead=lineages[0].lead,
        applies=applies,
    )


def describe_transfer(
    handover: Handover, everybody: list[Lineage], device_ids: Sequence[str]
) -> tuple[str, dict[str, float]]:
    """Who is given the state, for the run log.

    Returns:
        A text, and how many of them had been there before and how many join.
    """
    joiners = {lineage.rank for lineage in everybody if lineage.joins}
    num_joining = len(joiners.intersection(handover.to))
    names = ", ".join(device_ids[rank] for rank in handover.to)
    text = (
        f"the state after {handover.num_steps} steps goes from "
        f"{device_ids[handover.source]} to {names}"
    )
    values = {"to_survivors": len(handover.to) - num_joining, "to_joiners": num_joining}
    return text, {name: float(number) for name, number in values.items()}


def _check_same_history(lineages: list[Lineage]) -> None:
    """Check that ranks at the same step hold the same state.

    Raises:
        PlacesDifferError: If not.
    """
    for num_steps in {lineage.num_steps for lineage in lineages}:
        here = [li for li in lineages if li.num_steps == num_steps]
        if len({lineage.name for lineage in here}) > 1:
            names = ", ".join(f"rank {li.rank}: {li.name[:12] or 'none'}" for li in here)
            msg = (
                f"those that are left came to step {num_steps} by different ways ({names})"
            )
            raise PlacesDifferError(msg)
