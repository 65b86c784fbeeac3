"""Whose state those go on with that take part after a change of members."""

from __future__ import annotations

from dataclasses import replace

import pytest

from geartrain.parallel.handover import Lineage, PlacesDifferError, plan_handover

STAYS = Lineage(
    rank=1,
    num_steps=8,
    holds_state=True,
    num_together=2,
    planned_sizes=(12, 24),
    name="aa" * 16,
    lead=1,
)
JOINS = Lineage(
    rank=0,
    num_steps=8,
    holds_state=True,
    num_together=0,
    name="aa" * 16,
    joins=True,
)


def test_who_joins_with_all_steps_is_given_nothing() -> None:
    handover = plan_handover([JOINS, STAYS, replace(STAYS, rank=2)])

    assert handover.to == ()
    assert handover.holders == (0, 1, 2)
    assert handover.num_steps == 8
    assert handover.planned_sizes == (12, 24)
    assert (handover.num_together, handover.lead) == (2, 1)


def test_who_joins_too_far_behind_is_given_the_state() -> None:
    late = replace(JOINS, num_steps=3, name="bb" * 16)

    handover = plan_handover([late, STAYS])

    assert handover.to == (0,)
    assert handover.source == 1
    assert handover.num_steps == 8


def test_who_joins_makes_up_a_step_that_the_others_are_yet_to_apply() -> None:
    voted = [replace(STAYS, rank=rank, voted="cc" * 16) for rank in (1, 2)]

    handover = plan_handover([JOINS, *voted])

    assert handover.applies == (1, 2)
    assert handover.num_steps == 9
    assert handover.to == (0,)


def test_who_joins_does_not_count_where_places_are_compared() -> None:
    assert plan_handover([replace(JOINS, num_together=99), STAYS]).num_together == 2
    assert plan_handover([STAYS, replace(STAYS, rank=2, num_together=3)]).num_together == 3
    with pytest.raises(PlacesDifferError, match="different places"):
        plan_handover([STAYS, replace(STAYS, rank=2, num_steps=5)])
