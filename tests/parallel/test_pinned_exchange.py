"""A plan that holds its exchange gives the same bits, whatever the links read next time."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import geartrain as gt
from geartrain.errors import ConfigError
from geartrain.planner import Plan
from local_ranks import run_ranks
from parallel.two_racks import Training, equal_plan, train

RACKS = (1, 2)
OTHER_RACKS = (1, 1, 1)


def plan_in_force(session: gt.Session) -> Plan | None:
    return session.current_plan


def run_with(plan: Plan, racks: tuple[int, ...]) -> tuple[list[float], torch.Tensor, Plan]:
    job = Training(
        racks=racks, compression=None, plans={0: plan}, num_steps=4, observe=plan_in_force
    )
    reports = run_ranks(train, sum(racks), job)
    first = reports[0]
    assert all(torch.equal(r.parameters, first.parameters) for r in reports)
    return first.losses, first.parameters, first.seen[-1]


def test_a_pinned_plan_gives_the_same_bits_on_links_that_read_otherwise() -> None:
    losses, parameters, plan = run_with(equal_plan(3), RACKS)
    assert plan.exchange is not None

    again = run_with(plan, OTHER_RACKS)
    assert again[2].exchange == plan.exchange
    assert again[0] == losses
    assert torch.equal(again[1], parameters)

    # Without it the exchange is planned anew, for the links as they are now.
    anew = run_with(replace(plan, exchange=None), OTHER_RACKS)
    assert anew[2].exchange != plan.exchange


def test_an_exchange_for_other_hosts_is_refused() -> None:
    _, _, plan = run_with(equal_plan(3), RACKS)
    assert plan.exchange is not None
    schedules = tuple(
        replace(
            schedule,
            algorithm="local",
            racks=(
                replace(
                    schedule.racks[0], hosts=((0, 1, 2),), share=1.0, host_shares=(1.0,)
                ),
            ),
        )
        for schedule in plan.exchange.schedules
    )
    together = replace(plan, exchange=replace(plan.exchange, schedules=schedules))
    with pytest.raises(ConfigError, match="take the exchange out of the plan"):
        run_with(together, RACKS)


def test_an_exchange_for_fewer_members_than_replicas_is_refused() -> None:
    _, _, plan = run_with(equal_plan(3), RACKS)
    with pytest.raises(ConfigError, match="is for 3 members but it has 2 replicas"):
        replace(equal_plan(2), exchange=plan.exchange)
