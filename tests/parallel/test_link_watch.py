"""A link that changed is noticed by its exchanges; noise and a biased model are not."""

from __future__ import annotations

import random
from dataclasses import replace

from geartrain.parallel.link_watch import StepWatch, describe_change, has_changed
from geartrain.parallel.trailer import RankFigures
from geartrain.topology import Topology
from topologies import make_racks


def step_of(exchange_s: float, predicted_s: float = 1.0) -> list[RankFigures]:
    figures = RankFigures(exchange_s=exchange_s, exchange_predicted_s=predicted_s)
    return [replace(figures, exchange_slow_hop_s=exchange_s)] * 4


def slowed(topology: Topology, rack_id: str, factor: float) -> Topology:
    tiers = tuple(
        replace(
            tier,
            uplink_send_bytes_per_s=(tier.uplink_send_bytes_per_s or 0) * factor,
        )
        if tier.tier_id == rack_id
        else tier
        for tier in topology.tiers
    )
    return replace(topology, tiers=tiers)


def calibrated(ratio: float) -> StepWatch:
    watch = StepWatch(make_racks((2, 2)))
    for _ in range(5):
        assert watch.observe(step_of(ratio)) == ((), "")
    return watch


def test_a_model_that_is_off_from_the_start_is_no_change() -> None:
    watch = calibrated(0.6)
    assert all(watch.observe(step_of(0.6))[0] == () for _ in range(20))


def test_noise_below_the_tolerance_is_no_change() -> None:
    watch, draw = calibrated(1.0), random.Random(5)
    assert all(
        watch.observe(step_of(draw.uniform(0.88, 1.12)))[0] == () for _ in range(200)
    )


def test_a_noisy_machine_is_given_more_tolerance_but_half_the_rate_is_noticed() -> None:
    watch = StepWatch(make_racks((2, 2)))
    for ratio in (1.0, 1.3, 0.9, 1.0, 0.75):
        watch.observe(step_of(ratio))
    assert all(watch.observe(step_of(1.25))[0] == () for _ in range(10))
    assert [bool(watch.observe(step_of(2.0))[0]) for _ in range(3)] == [0, 0, 1]


def test_three_slow_steps_name_the_uplinks() -> None:
    watch = calibrated(1.0)
    found = [watch.observe(step_of(1.5)) for _ in range(3)]
    racks = tuple(rack.tier_id for rack in watch.topology.racks)
    assert [suspects for suspects, _ in found] == [(), (), racks]
    assert "slower by more than 15%" in found[-1][1]


def test_only_links_in_use_are_suspects() -> None:
    topology = make_racks((2, 2))
    hosts = tuple(host.tier_id for host in topology.hosts)
    watch = StepWatch(topology, hosts)
    idle = RankFigures()

    def one_rack(exchange_s: float) -> list[RankFigures]:
        return [*step_of(exchange_s)[:2], idle, idle]

    for _ in range(5):
        watch.observe(one_rack(1.0))
    found = [watch.observe(one_rack(2.0))[0] for _ in range(3)]
    assert found[-1] == hosts[:2]


def test_other_members_are_learnt_anew() -> None:
    watch = calibrated(1.0)
    others = [*step_of(3.0)[:3], RankFigures()]
    assert all(watch.observe(others)[0] == () for _ in range(10))


def test_a_link_that_came_back_is_noticed_too() -> None:
    watch = calibrated(1.0)
    rack = watch.topology.racks[0].tier_id
    for _ in range(3):
        watch.observe(step_of(4.0))
    assert watch.measured(slowed(watch.topology, rack, 0.25))
    # Predictions are new: the same exchange is now what is expected.
    assert all(watch.observe(step_of(4.0, 4.0))[0] == () for _ in range(5))
    found = [watch.observe(step_of(1.0, 4.0))[0] for _ in range(3)]
    assert found[-1] != ()
    assert watch.measured(slowed(watch.topology, rack, 4.0))


def test_a_disturbed_measurement_in_the_other_direction_does_not_count() -> None:
    before = make_racks((2, 2))
    rack = before.racks[0].tier_id
    assert not has_changed(before, slowed(before, rack, 1.5), is_slower=True)
    assert has_changed(before, slowed(before, rack, 0.5), is_slower=True)
    assert not has_changed(before, slowed(before, rack, 0.9), is_slower=True)


def test_a_change_is_told_in_rates() -> None:
    before = make_racks((2, 2))
    rack = before.racks[0].tier_id
    assert rack in describe_change(before, slowed(before, rack, 0.5))
    assert describe_change(before, before) == "no link has changed"
