"""The solver against exhaustive search, and rules that hold for every plan."""

from __future__ import annotations

import dataclasses
import itertools
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from geartrain.errors import ConfigError, InfeasiblePlanError
from geartrain.planner import (
    MemoryCurve,
    ModelProfile,
    Workload,
    fit_curve,
    predict_s,
    solve,
)
from geartrain.planner.solver import UNIFORM_SLACK
from planner.plan_cases import linear, make_profile

TICK_S = 1 / 64
"""Times in these are exact in binary, so equal plans have equal times."""


def brute_force_step_s(profile: ModelProfile, workload: Workload) -> float:
    """Try every set of members, all shares and all ways to cut them."""
    curves = profile.curves
    required = {curves[0].device_id, *workload.required_device_ids}
    counts = range(1, workload.global_batch_size + 1)
    cases = counts if workload.uniform_micro_batches else [0]
    best = float("inf")
    for size in range(1, len(curves) + 1):
        for indices in itertools.combinations(range(len(curves)), size):
            if not required <= {curves[i].device_id for i in indices}:
                continue
            for count in cases:
                step_s = _best_shares_s(profile, indices, workload, count)
                best = min(best, step_s + _exchange_s(profile, indices))
    return best


def _best_shares_s(
    profile: ModelProfile, indices: tuple[int, ...], workload: Workload, count: int
) -> float:
    def share_s(index: int, share: int) -> float:
        curve = profile.curves[index]
        update_s = profile.optimizer_s[index] if profile.optimizer_s else 0.0
        largest = curve.max_micro_batch_size
        if count:
            size = max(1, -(-share // count))
            if size > largest:
                return float("inf")
            return update_s + count * predict_s(curve, size)
        if share == 0:
            return update_s
        return update_s + min(
            share // b * predict_s(curve, b) + predict_s(curve, share % b)
            for b in range(1, min(largest, share) + 1)
        )

    total = workload.global_batch_size
    table = [[share_s(index, n) for n in range(total + 1)] for index in indices]
    best = float("inf")
    for cut in itertools.product(range(total + 1), repeat=len(indices) - 1):
        if sum(cut) <= total:
            shares = (total - sum(cut), *cut)
            best = min(best, max(row[n] for row, n in zip(table, shares, strict=True)))
    return best


def _exchange_s(profile: ModelProfile, indices: tuple[int, ...]) -> float:
    if len(indices) == 1:
        return 0.0
    costs = profile.exchange.with_device_s
    if not costs:
        return profile.exchange.all_devices_s
    scale = profile.exchange.all_devices_s / max(costs[1:])
    return scale * max(costs[i] for i in indices if i > 0)


@st.composite
def profiles(draw: st.DrawFn, max_devices: int = 3) -> ModelProfile:
    num_devices = draw(st.integers(1, max_devices))
    ticks = st.integers(1, 40)
    curves = []
    for index in range(num_devices):
        steps = draw(st.lists(ticks, min_size=1, max_size=3))
        sizes = [1, 2, 4][: len(steps)]
        seconds = [TICK_S * sum(steps[: i + 1]) for i in range(len(steps))]
        curves.append(fit_curve(f"d:{index}", sizes, seconds, draw(st.integers(1, 9))))
    costs = tuple(float(draw(st.integers(1, 4))) for _ in curves)
    return make_profile(
        curves,
        exchange_s=TICK_S * draw(st.integers(0, 60)),
        with_device_s=draw(st.sampled_from([(), costs])),
        optimizer_s=draw(
            st.sampled_from([(), tuple(TICK_S * (i % 3) for i in range(num_devices))])
        ),
    )


@settings(max_examples=150, deadline=None)
@given(
    profile=profiles(),
    global_batch_size=st.integers(1, 11),
    uniform=st.booleans(),
    require_last=st.booleans(),
)
def test_no_other_plan_is_faster(
    profile: ModelProfile, global_batch_size: int, uniform: bool, require_last: bool
) -> None:
    required = (profile.curves[-1].device_id,) if require_last else ()
    workload = Workload(
        global_batch_size=global_batch_size,
        uniform_micro_batches=uniform,
        required_device_ids=required,
    )
    plan = solve(profile, workload)
    expected = brute_force_step_s(profile, workload)
    slack = UNIFORM_SLACK if uniform else 0.0
    assert expected * (1 - 1e-9) <= plan.predicted_step_s
    assert plan.predicted_step_s <= expected * (1 + slack) * (1 + 1e-9)
    assert plan.bound_step_s <= plan.predicted_step_s * (1 + 1e-9)


@settings(max_examples=100, deadline=None)
@given(
    profile=profiles(max_devices=6),
    global_batch_size=st.integers(1, 300),
    tail=st.integers(0, 8),
    uniform=st.booleans(),
)
def test_shares_add_up_and_memory_fits(
    profile: ModelProfile, global_batch_size: int, tail: int, uniform: bool
) -> None:
    workload = Workload(
        global_batch_size=global_batch_size,
        tail_samples=min(tail, global_batch_size),
        uniform_micro_batches=uniform,
    )
    plan = solve(profile, workload)
    by_id = {curve.device_id: curve for curve in profile.curves}
    assert sum(r.share for r in plan.replicas) + plan.tail_samples == global_batch_size
    assert plan.replicas[0].device_id == "d:0"
    assert {r.device_id for r in plan.replicas} | set(plan.left_out) == set(by_id)
    for replica in plan.replicas:
        assert replica.micro_batch_size <= by_id[replica.device_id].max_micro_batch_size
    if uniform:
        assert len({r.num_micro_batches for r in plan.replicas}) == 1


@settings(max_examples=80, deadline=None)
@given(profile=profiles(max_devices=5), global_batch_size=st.integers(1, 100))
def test_an_added_device_never_makes_the_step_slower(
    profile: ModelProfile, global_batch_size: int
) -> None:
    workload = Workload(global_batch_size=global_batch_size)
    costs = profile.exchange.with_device_s or (1.0,) * len(profile.curves)
    full = dataclasses.replace(
        profile,
        exchange=dataclasses.replace(
            profile.exchange,
            device_ids=tuple(curve.device_id for curve in profile.curves),
            with_device_s=costs,
        ),
    )
    fewer_s = max(costs[1:-1], default=0.0)
    scale = profile.exchange.all_devices_s / max(costs[1:], default=1.0)
    fewer = dataclasses.replace(
        full,
        curves=full.curves[: max(1, len(full.curves) - 1)],
        optimizer_s=full.optimizer_s[: max(1, len(full.curves) - 1)],
        exchange=dataclasses.replace(full.exchange, all_devices_s=scale * fewer_s),
    )
    before = solve(fewer, workload).predicted_step_s
    assert solve(full, workload).predicted_step_s <= before * (1 + 1e-9)


@settings(max_examples=80, deadline=None)
@given(
    profile=profiles(max_devices=5),
    global_batch_size=st.integers(1, 100),
    randomness=st.randoms(use_true_random=False),
)
def test_permuted_devices_give_the_permuted_plan(
    profile: ModelProfile, global_batch_size: int, randomness: random.Random
) -> None:
    order = list(range(1, len(profile.curves)))
    randomness.shuffle(order)
    order = [0, *order]
    exchange = profile.exchange
    if exchange.device_ids:
        exchange = dataclasses.replace(
            exchange,
            device_ids=tuple(exchange.device_ids[i] for i in order),
            with_device_s=tuple(exchange.with_device_s[i] for i in order),
        )
    permuted = dataclasses.replace(
        profile,
        curves=tuple(profile.curves[i] for i in order),
        optimizer_s=tuple(profile.optimizer_s[i] for i in order)
        if profile.optimizer_s
        else (),
        exchange=exchange,
    )
    workload = Workload(global_batch_size=global_batch_size)
    plan, other = solve(profile, workload), solve(permuted, workload)
    assert set(plan.replicas) == set(other.replicas)


def test_shares_follow_the_speeds() -> None:
    curves = [linear(f"d:{i}", 0.0, 0.01 / s) for i, s in enumerate((8, 4, 2, 1))]
    plan = solve(make_profile(curves), Workload(global_batch_size=60))
    assert [replica.share for replica in plan.replicas] == [32, 16, 8, 4]
    assert plan.predicted_step_s == pytest.approx(plan.bound_step_s)
    assert plan.imbalance_fraction == pytest.approx(0)


def test_a_fixed_cost_asks_for_the_largest_micro_batch_that_fits() -> None:
    curve = linear("d:0", 0.1, 0.01, largest=16)
    plan = solve(make_profile([curve]), Workload(global_batch_size=48))
    assert (plan.replicas[0].micro_batch_size, plan.replicas[0].num_micro_batches) == (
        16,
        3,
    )


def test_equal_times_go_to_the_larger_micro_batch() -> None:
    plan = solve(make_profile([linear("d:0", 0.0, 0.01)]), Workload(global_batch_size=32))
    assert plan.replicas[0].micro_batch_size == 32


def test_a_device_behind_a_slow_exchange_is_left_out() -> None:
    curves = [linear("d:0", 0.0, 0.01), linear("d:1", 0.0, 0.01), linear("d:2", 0.0, 0.01)]
    profile = make_profile(curves, exchange_s=1.0, with_device_s=(0.0, 0.01, 1.0))
    plan = solve(profile, Workload(global_batch_size=32))
    assert plan.left_out == ("d:2",)
    assert plan.predicted_exchange_s == pytest.approx(0.01)


def test_a_required_device_stays_though_it_slows_the_others() -> None:
    curves = [linear("d:0", 0.0, 0.01), linear("d:1", 0.0, 100.0)]
    profile = make_profile(curves, exchange_s=0.5)
    workload = Workload(global_batch_size=8, required_device_ids=("d:1",))
    plan = solve(profile, workload)
    assert [replica.share for replica in plan.replicas] == [8, 0]
    assert solve(profile, Workload(global_batch_size=8)).left_out == ("d:1",)


def test_a_slow_first_device_keeps_its_place_without_samples() -> None:
    curves = [linear("d:0", 0.0, 100.0), linear("d:1", 0.0, 0.01)]
    plan = solve(make_profile(curves), Workload(global_batch_size=8))
    assert [(r.device_id, r.share) for r in plan.replicas] == [("d:0", 0), ("d:1", 8)]
    assert plan.replicas[0].num_micro_batches == 0


def test_a_tail_is_not_in_the_shares_and_its_time_is_predicted() -> None:
    curves = [linear("d:0", 0.0, 0.01), linear("d:1", 0.0, 0.02)]
    plan = solve(make_profile(curves), Workload(global_batch_size=36, tail_samples=6))
    assert [replica.share for replica in plan.replicas] == [20, 10]
    assert plan.predicted_step_s == pytest.approx(0.2 + 6 / 150)


def test_memory_prediction_comes_from_the_memory_curve() -> None:
    memory = MemoryCurve(fixed_bytes=1000, bytes_per_sample=10.0, limit_bytes=1080)
    curve = fit_curve("d:0", [1, 2], [0.11, 0.12], 64, memory=memory)
    plan = solve(make_profile([curve]), Workload(global_batch_size=32))
    assert plan.replicas[0].micro_batch_size == 8
    assert plan.replicas[0].predicted_memory_bytes == 1080


def test_a_required_device_too_small_for_one_sample_is_named() -> None:
    memory = MemoryCurve(fixed_bytes=2**30, bytes_per_sample=1.0, limit_bytes=2**20)
    curve = fit_curve("d:0", [1], [0.1], 64, memory=memory)
    with pytest.raises(InfeasiblePlanError, match=r"d:0 .* 1.0 GiB .* 1.0 MiB"):
        solve(make_profile([curve]), Workload(global_batch_size=32))


def test_another_device_too_small_for_one_sample_is_left_out() -> None:
    memory = MemoryCurve(fixed_bytes=2**30, bytes_per_sample=1.0, limit_bytes=2**20)
    small = fit_curve("d:1", [1], [0.1], 64, memory=memory)
    profile = make_profile([linear("d:0", 0.1, 0.1), small])
    assert solve(profile, Workload(global_batch_size=32)).left_out == ("d:1",)


def test_an_unknown_required_device_is_named() -> None:
    workload = Workload(global_batch_size=4, required_device_ids=("gpu:7",))
    with pytest.raises(ConfigError, match="gpu:7"):
        solve(make_profile([linear("d:0", 0.1, 0.1)]), workload)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_devices", "global_batch_size", "uniform", "limit_s"),
    [(16, 4096, False, 0.5), (64, 65536, False, 5.0), (16, 4096, True, 2.0)],
)
def test_large_problems_are_solved_quickly(
    num_devices: int, global_batch_size: int, uniform: bool, limit_s: float
) -> None:
    curves = [
        linear(f"d:{i}", 0.002, 0.01 / (1 + 0.37 * i), largest=1 << (i % 12))
        for i in range(num_devices)
    ]
    costs = tuple(0.001 * (1 + i) for i in range(num_devices))
    profile = make_profile(curves, exchange_s=0.1, with_device_s=costs)
    workload = Workload(global_batch_size=global_batch_size, uniform_micro_batches=uniform)
    used = []
    for _ in range(3):
        start_s = time.process_time()
        plan = solve(profile, workload)
        used.append(time.process_time() - start_s)
    assert sum(replica.share for replica in plan.replicas) == global_batch_size
    assert min(used) < limit_s


def test_uniform_plan_takes_the_whole_batch_at_once_where_that_is_about_as_fast() -> None:
    # Sizes that do not divide make two micro-batches a little faster than one.
    curves = [
        fit_curve("d:0", [1, 8, 16], [0.1, 0.8, 1.62], 16),
        fit_curve("d:1", [1, 8, 16], [0.1, 0.8, 1.62], 16),
    ]
    workload = Workload(global_batch_size=32, uniform_micro_batches=True)

    plan = solve(make_profile(curves), workload)

    assert [replica.num_micro_batches for replica in plan.replicas] == [1, 1]


def test_a_first_plan_imports_nothing() -> None:
    """Who joins a training makes its first plan while the others wait for it."""
    code = (
        "import sys, geartrain.planner as p\n"
        "from planner.plan_cases import linear, make_profile\n"
        "known = set(sys.modules)\n"
        "curves = [linear(name, 0.01, 0.002) for name in 'ab']\n"
        "p.solve(make_profile(curves), p.Workload(global_batch_size=8))\n"
        "print(*(set(sys.modules) - known))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])},
        capture_output=True,
        text=True,
        timeout=60.0,
        check=True,
    )
    assert done.stdout.split() == []
