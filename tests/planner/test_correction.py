"""The correction on simulated fleets: what it sees, when it re-plans, when it does not."""

from __future__ import annotations

import dataclasses
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from geartrain.errors import ConfigError
from geartrain.planner import ModelProfile, Plan, Workload, solve
from geartrain.planner.correction import (
    CorrectionSettings,
    DeviceObservation,
    expected_compute_s,
    load_balance_error,
    observe,
    start_correction,
)
from planner.plan_cases import linear, make_profile
from planner.simulated_fleet import (
    Noise,
    SimulatedFleet,
    gaussian_noise,
    uniform_noise,
    with_outliers,
)

SPEEDS = (0.8, 0.4, 0.2, 0.1)

NOISES = {
    "uniform 10 %": uniform_noise(0.1),
    "gaussian 5 %": gaussian_noise(0.05),
    "with spikes of 10 %": with_outliers(gaussian_noise(0.03), 0.1, 1.1),
    "with rare outliers of 3x": with_outliers(uniform_noise(0.08), 0.005, 3.0),
}


def make_fleet_profile(speeds: tuple[float, ...] = SPEEDS) -> ModelProfile:
    curves = [linear(f"d:{i}", 0.004 / s, 0.02 / s, 8) for i, s in enumerate(speeds)]
    updates_s = tuple(0.002 / s for s in speeds)
    return make_profile(curves, exchange_s=0.01, optimizer_s=updates_s)


def make_fleet(
    noise: Noise, seed: int = 0, factors: dict[str, float] | None = None
) -> SimulatedFleet:
    profile = make_fleet_profile()
    exact = {curve.device_id: 1.0 for curve in profile.curves}
    return SimulatedFleet(
        measured=profile,
        true_factors=exact | (factors or {}),
        workload=Workload(global_batch_size=256),
        noise=noise,
        seed=seed,
    )


@pytest.mark.parametrize("name", NOISES)
@pytest.mark.parametrize("device_id", ["d:0", "d:1", "d:2", "d:3"])
def test_a_halved_device_is_seen_and_answered_in_time(name: str, device_id: str) -> None:
    for seed in range(4):
        fleet = make_fleet(NOISES[name], seed)
        fleet.run(24 + seed)
        before = len(fleet.decisions)
        fleet.run(12, {device_id: 2.0})
        seen = [step for step in fleet.steps_with("slowdown") if step >= before]
        answered = [step for step in fleet.steps_with("replanned") if step >= before]
        assert seen[0] - before + 1 <= 5
        assert answered[0] - seen[0] <= 3
        named = fleet.decisions[seen[0]].events[0]
        assert named.device_id == device_id


@pytest.mark.parametrize("name", NOISES)
def test_after_a_slow_down_the_step_is_near_the_new_optimum(name: str) -> None:
    for seed in range(4):
        fleet = make_fleet(NOISES[name], seed)
        fleet.run(30)
        fleet.run(40, {"d:0": 2.0})
        assert fleet.true_plan.predicted_step_s <= 1.06 * fleet.best_step_s
        fleet.run(110)
        assert fleet.true_plan.predicted_step_s <= 1.03 * fleet.best_step_s


@pytest.mark.parametrize("name", NOISES)
def test_noise_alone_does_not_replan(name: str) -> None:
    fleet = make_fleet(NOISES[name], seed=1)
    fleet.run(2000)
    assert fleet.steps_with("replanned") == []
    assert fleet.steps_with("slowdown") == []


@pytest.mark.slow
@pytest.mark.parametrize("name", NOISES)
def test_noise_alone_does_not_replan_whatever_the_seed(name: str) -> None:
    for seed in range(2, 22):
        fleet = make_fleet(NOISES[name], seed)
        fleet.run(2000)
        assert fleet.steps_with("replanned") == [], f"seed {seed}"


@pytest.mark.parametrize("noise", [uniform_noise(0.0), gaussian_noise(0.05)])
def test_a_wrong_profile_is_corrected_to_within_3_percent(noise: Noise) -> None:
    for seed in range(6):
        rng = random.Random(seed)
        wrong = {f"d:{i}": 1 / rng.uniform(0.7, 1.3) for i in range(len(SPEEDS))}
        fleet = make_fleet(noise, seed, wrong)
        fleet.run(160)
        assert fleet.true_plan.predicted_step_s <= 1.03 * fleet.best_step_s
        assert load_balance_error(fleet.true_plan) <= 0.06  # one of 17 samples is 0.06
        assert len(fleet.steps_with("replanned")) <= 4


def test_without_noise_a_wrong_profile_is_corrected_at_the_first_look() -> None:
    fleet = make_fleet(uniform_noise(0.0), factors={"d:0": 1.4})
    fleet.run(20)
    assert fleet.steps_with("replanned") == [10]
    assert fleet.true_plan.predicted_step_s == pytest.approx(fleet.best_step_s)


def test_a_recovered_device_gets_its_share_back() -> None:
    fleet = make_fleet(gaussian_noise(0.03))
    original = fleet.state.plan.replicas[0].share
    fleet.run(30)
    fleet.run(40, {"d:0": 2.0})
    assert fleet.state.plan.replicas[0].share < 0.7 * original
    fleet.run(40, {"d:0": 1.0})
    assert fleet.state.plan.replicas[0].share == pytest.approx(original, rel=0.1)


def test_when_all_slow_down_alike_it_is_told_and_nothing_is_moved() -> None:
    fleet = make_fleet(uniform_noise(0.0))
    fleet.run(20)
    fleet.run(30, {f"d:{i}": 1.5 for i in range(len(SPEEDS))})
    assert len(fleet.steps_with("slowdown")) == 1
    shares = {r.device_id: r.share for r in fleet.state.plan.replicas}
    first = solve(fleet.measured, fleet.workload)
    assert shares == {r.device_id: r.share for r in first.replicas}


def test_a_left_out_device_comes_back_when_its_probes_are_fast_again() -> None:
    fleet = make_fleet(gaussian_noise(0.02))
    fleet.run(30)
    fleet.run(60, {"d:3": 400.0})
    assert set(fleet.state.plan.left_out) == {"d:3"}
    fleet.run(80, {"d:3": 1.0})
    assert not fleet.state.plan.left_out


def test_slow_first_steps_are_warm_up() -> None:
    fleet = make_fleet(uniform_noise(0.0))
    fleet.run(3, {"d:0": 8.0})
    fleet.run(40, {"d:0": 1.0})
    assert fleet.steps_with("replanned") == []
    assert fleet.steps_with("slowdown") == []


def test_the_threshold_decides_what_counts_as_a_slow_down() -> None:
    seen = []
    for threshold in (0.15, 0.5):
        fleet = make_fleet(uniform_noise(0.0))
        fleet.state = dataclasses.replace(
            fleet.state, settings=CorrectionSettings(threshold=threshold)
        )
        fleet.run(60)
        fleet.run(20, {"d:1": 1.3})
        seen.append(len(fleet.steps_with("slowdown")))
    assert seen == [1, 0]


def test_a_threshold_of_zero_is_refused() -> None:
    with pytest.raises(ConfigError, match="threshold=0"):
        CorrectionSettings(threshold=0)


def test_expected_compute_counts_micro_batches_rests_and_the_optimizer() -> None:
    profile = make_fleet_profile()
    expected_s = expected_compute_s(profile, "d:0", [8, 8, 3])
    assert expected_s == pytest.approx(3 * 0.005 + 19 * 0.025 + 0.0025)
    assert expected_compute_s(profile, "d:0", []) == 0


def test_what_a_planner_offers_is_what_the_correction_uses() -> None:
    profile, workload = make_fleet_profile((1.0, 1.0)), Workload(global_batch_size=32)
    plan = solve(profile, workload)
    asked: list[float] = []

    def same_plan(profile: ModelProfile, workload: Workload) -> Plan:
        asked.append(profile.curves[0].seconds[0])
        return plan

    state = start_correction(profile, workload, plan)
    for _ in range(11):
        slow = [DeviceObservation(device_id="d:0", compute_s=3.0, expected_s=1.0)]
        state, decision = observe(state, slow, same_plan)
        assert decision.new_plan is None
    assert asked == [pytest.approx(3 * profile.curves[0].seconds[0])]


@settings(max_examples=15, deadline=None)
@given(
    ratios=st.lists(
        st.tuples(st.floats(0.2, 5), st.floats(0.2, 5)), min_size=20, max_size=60
    )
)
def test_whatever_is_observed_all_ranks_decide_the_same(
    ratios: list[tuple[float, float]],
) -> None:
    profile, workload = make_fleet_profile((1.0, 0.5)), Workload(global_batch_size=48)
    states = [start_correction(profile, workload, solve(profile, workload))] * 2
    for pair in ratios:
        seen = [
            DeviceObservation(device_id=f"d:{i}", compute_s=ratio, expected_s=1.0)
            for i, ratio in enumerate(pair)
        ]
        results = [
            observe(state, order)
            for state, order in zip(states, (seen, seen[::-1]), strict=True)
        ]
        states = [state for state, _ in results]
        assert results[0] == results[1]
        plan = states[0].plan
        assert sum(r.share for r in plan.replicas) == workload.global_batch_size
