"""What hides behind backward: the model by simulation, and plans that use it."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from geartrain.errors import ConfigError
from geartrain.planner import ModelProfile, Workload, fit_curve, predict_s, solve
from geartrain.planner.curve_fit import best_samples_per_s
from geartrain.planner.exchange import choose
from geartrain.planner.exchange_cost import (
    exchange_overlap,
    exchange_request,
    exchange_s,
)
from geartrain.planner.explanation import explain, render_text
from geartrain.planner.model_profile import ExchangeNetwork
from geartrain.planner.overlap import NO_EXCHANGE, Overlap
from geartrain.planner.prediction import predict
from planner.exchange.exchange_cases import make_topology
from planner.plan_cases import linear, make_profile

seconds = st.floats(0.0, 3.0)


def linked(
    rates: list[float],
    num_buckets: int = 8,
    num_bytes: int = 25_000_000,
    links: list[float] | None = None,
) -> ModelProfile:
    """A host a device, all in one rack; beta of each device, links of 1 Gbit/s or so."""
    ids = tuple(f"d{i}" for i in range(len(rates)))
    profile = make_profile(
        [linear(i, 0.0, beta_s, 512) for i, beta_s in zip(ids, rates, strict=True)]
    )
    network = ExchangeNetwork(
        topology=make_topology([links or [1000] * len(ids)], [1000]),
        device_ids=ids,
        host_ids=tuple(f"h{i}" for i in range(len(ids))),
        num_buckets=num_buckets,
    )
    return dataclasses.replace(profile, gradient_bytes=num_bytes, network=network)


def simulate_end_s(
    ends_s: list[float], backwards_s: list[float], whole_s: float, num_buckets: int
) -> float:
    """When the last of the buckets is exchanged, each once all members have filled it."""
    free_s = 0.0
    for k in range(1, num_buckets + 1):
        filled_s = max(
            end_s - (1 - k / num_buckets) * backward_s
            for end_s, backward_s in zip(ends_s, backwards_s, strict=True)
        )
        free_s = max(free_s, filled_s) + whole_s / num_buckets
    return free_s


@settings(deadline=None)
@given(
    members=st.lists(st.tuples(seconds, seconds), min_size=1, max_size=4),
    whole_s=st.floats(0.001, 3.0),
    num_buckets=st.integers(1, 12),
)
def test_the_slowest_members_own_time_is_when_the_exchange_ends(
    members: list[tuple[float, float]], whole_s: float, num_buckets: int
) -> None:
    overlap = Overlap(whole_s=whole_s, last_s=whole_s / num_buckets)
    backwards_s = [backward_s for backward_s, _ in members]
    ends_s = [backward_s + before_s for backward_s, before_s in members]

    own_s = [
        end_s + overlap.exposed_s(backward_s)
        for end_s, backward_s in zip(ends_s, backwards_s, strict=True)
    ]

    expected_s = simulate_end_s(ends_s, backwards_s, whole_s, num_buckets)
    assert max(own_s) == pytest.approx(expected_s)


def test_many_backward_passes_give_the_same_bits_as_single_ones() -> None:
    overlap = Overlap(whole_s=0.7, last_s=0.1)
    backwards_s = np.linspace(0.0, 1.0, 23)

    many = overlap.exposed_many_s(backwards_s).tolist()

    assert many == [overlap.exposed_s(float(value)) for value in backwards_s]
    assert NO_EXCHANGE.exposed_many_s(backwards_s).tolist() == [0.0] * 23


def _step_s(profile: ModelProfile, shares: tuple[int, ...], overlap: Overlap) -> float:
    ends_s = []
    for curve, share in zip(profile.curves, shares, strict=True):
        cuts = [overlap.whole_s] if share == 0 else []
        for size in range(1, min(share, curve.max_micro_batch_size) + 1):
            rounds, last = (share - 1) // size, (share - 1) % size + 1
            last_s = predict_s(curve, last)
            exposed_s = overlap.exposed_s(curve.backward_fraction * last_s)
            cuts.append(rounds * predict_s(curve, size) + last_s + exposed_s)
        ends_s.append(min(cuts))
    return max(ends_s)


@settings(max_examples=60, deadline=None)
@given(
    steps=st.lists(
        st.lists(st.integers(1, 40), min_size=3, max_size=3), min_size=2, max_size=3
    ),
    global_batch_size=st.integers(2, 11),
    largest=st.integers(1, 9),
    num_buckets=st.integers(1, 9),
)
def test_no_other_shares_and_micro_batches_hide_more_than_they_cost(
    steps: list[list[int]], global_batch_size: int, largest: int, num_buckets: int
) -> None:
    profile = linked([1.0] * len(steps), num_buckets)
    curves = tuple(
        fit_curve(
            f"d{i}", [1, 2, 4], list(itertools.accumulate(s / 64 for s in own)), largest
        )
        for i, own in enumerate(steps)
    )
    profile = dataclasses.replace(profile, curves=curves)
    ids = [curve.device_id for curve in curves]
    workload = Workload(global_batch_size=global_batch_size, required_device_ids=tuple(ids))

    plan = solve(profile, workload)

    overlap = exchange_overlap(profile, ids)
    best_s = min(
        _step_s(profile, shares, overlap)
        for shares in itertools.product(range(global_batch_size + 1), repeat=len(ids))
        if sum(shares) == global_batch_size
    )
    assert plan.predicted_step_s == pytest.approx(best_s)
    assert predict(plan, profile) == plan


def test_micro_batches_grow_where_that_hides_the_exchange() -> None:
    # 8 samples at a time are the fastest, by a little.
    sizes = [1, 8, 16, 32, 64]
    curves = [
        fit_curve(f"d{i}", sizes, [0.0102 * b - 0.0002 * (b == 8) for b in sizes], 64)
        for i in range(2)
    ]
    profile = dataclasses.replace(linked([1.0, 1.0]), curves=tuple(curves))
    alone = dataclasses.replace(profile, network=None)
    whole_s = exchange_s(profile, ["d0", "d1"])

    plan = solve(profile, Workload(global_batch_size=128))

    plain = solve(alone, Workload(global_batch_size=128))
    assert {replica.micro_batch_size for replica in plain.replicas} == {8}
    assert all(replica.micro_batch_size >= 32 for replica in plan.replicas)
    assert plan.predicted_whole_exchange_s == whole_s
    assert plan.predicted_exchange_s < 0.3 * whole_s


def test_a_device_whose_exchange_hides_is_not_left_out() -> None:
    profile = linked([0.01, 0.03])
    assert profile.network is not None
    blocking = dataclasses.replace(
        profile, network=dataclasses.replace(profile.network, num_buckets=1)
    )
    workload = Workload(global_batch_size=60)

    assert solve(blocking, workload).left_out == ("d1",)
    assert solve(profile, workload).left_out == ()


def test_a_tail_hides_nothing() -> None:
    profile = linked([0.1, 0.1])

    plan = solve(profile, Workload(global_batch_size=64, tail_samples=8))

    assert plan.predicted_exchange_s == pytest.approx(plan.predicted_whole_exchange_s)


def test_uniform_micro_batches_hide_the_exchange_too() -> None:
    profile = linked([0.05, 0.1])

    plan = solve(profile, Workload(global_batch_size=64, uniform_micro_batches=True))

    assert len({replica.num_micro_batches for replica in plan.replicas}) == 1
    assert plan.predicted_exchange_s < 0.3 * plan.predicted_whole_exchange_s
    compute_s = max(replica.predicted_compute_s for replica in plan.replicas)
    assert plan.predicted_step_s == compute_s + plan.predicted_exchange_s


def test_without_links_plans_are_those_of_an_exchange_in_full() -> None:
    profile = make_profile([linear("d0", 0.01, 0.01), linear("d1", 0.01, 0.02)], 0.125)

    plan = solve(profile, Workload(global_batch_size=64))

    rates = sum(best_samples_per_s(curve, 64) for curve in profile.curves)
    assert plan.bound_step_s == 64 / rates
    assert plan.predicted_exchange_s == pytest.approx(0.125)
    assert plan.predicted_whole_exchange_s == 0.125


def test_the_explanation_tells_the_whole_exchange_from_what_is_waited_for() -> None:
    profile = linked([0.1, 0.1])
    plan = solve(profile, Workload(global_batch_size=64))

    explanation = explain(plan, profile)

    assert explanation.exposed_exchange_s < explanation.whole_exchange_s
    assert "of it is waited for, and backward passes hide the rest" in render_text(
        explanation
    )
    assert explanation.loss.total_s == pytest.approx(
        plan.predicted_step_s - plan.bound_step_s
    )


def test_a_network_without_buckets_is_refused() -> None:
    network = linked([0.1]).network
    assert network is not None

    with pytest.raises(ConfigError, match="num_buckets=0"):
        dataclasses.replace(network, num_buckets=0)


def test_members_are_predicted_with_the_cores_that_they_have() -> None:
    profile = linked([0.1, 0.1, 0.1])
    assert profile.network is not None
    network = dataclasses.replace(
        profile.network, core_fraction=0.1, core_fractions=(0.8, 0.8, 0.1)
    )
    profile = dataclasses.replace(profile, network=network)
    alike = dataclasses.replace(
        profile, network=dataclasses.replace(network, core_fractions=())
    )

    assert exchange_s(profile, ["d0", "d1"]) < exchange_s(alike, ["d0", "d1"])
    assert exchange_s(profile, ["d0", "d1", "d2"]) == exchange_s(alike, ["d0", "d1", "d2"])


def test_hosts_with_less_than_a_core_leave_the_exchange_to_the_ring() -> None:
    profile = linked([0.1] * 4, links=[50, 50, 50, 35])
    request = exchange_request(profile, ["d0", "d1", "d2", "d3"])
    assert request is not None

    assert choose(request).algorithm == "hierarchical"
    scarce = dataclasses.replace(request, core_fraction=0.2)
    assert choose(scarce).algorithm == "ring"


def test_few_rings_are_under_way_at_once() -> None:
    profile = linked([0.1] * 4, num_bytes=2_400_000, links=[50] * 4)
    assert profile.network is not None
    network = dataclasses.replace(profile.network, core_fraction=0.1)

    overlap = exchange_overlap(
        dataclasses.replace(profile, network=network), ["d0", "d1", "d2", "d3"]
    )

    assert overlap.whole_s == pytest.approx(8 / 2 * overlap.last_s)
