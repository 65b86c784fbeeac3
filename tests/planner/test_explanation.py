from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from geartrain.planner import Workload, solve
from geartrain.planner.explanation import explain, render_text
from planner.plan_cases import linear, make_profile


@settings(max_examples=60, deadline=None)
@given(
    speeds=st.lists(st.floats(0.5, 50), min_size=1, max_size=5),
    alpha_s=st.floats(0, 0.5),
    exchange_s=st.floats(0, 2),
    global_batch_size=st.integers(1, 120),
    tail_and_uniform=st.tuples(st.integers(0, 10), st.booleans()),
)
def test_the_parts_of_the_loss_add_up(
    speeds: list[float],
    alpha_s: float,
    exchange_s: float,
    global_batch_size: int,
    tail_and_uniform: tuple[int, bool],
) -> None:
    tail, uniform = tail_and_uniform
    curves = [linear(f"d:{i}", alpha_s, 1 / s, 16) for i, s in enumerate(speeds)]
    profile = make_profile(curves, exchange_s, optimizer_s=(0.01,) * len(curves))
    workload = Workload(
        global_batch_size=global_batch_size,
        tail_samples=min(tail, global_batch_size),
        uniform_micro_batches=uniform,
    )
    explanation = explain(solve(profile, workload), profile)
    lost_s = explanation.predicted_step_s - explanation.bound_step_s
    assert explanation.loss.total_s == pytest.approx(lost_s, abs=1e-9)
    assert min(explanation.loss.by_name().values()) >= -1e-9
    assert sum(row.share for row in explanation.rows) + workload.tail_samples == (
        global_batch_size
    )


def test_the_slowest_device_is_named_and_the_others_wait() -> None:
    curves = [linear("d:0", 0.0, 0.1), linear("d:1", 0.0, 0.3)]
    profile = make_profile(curves)
    explanation = explain(solve(profile, Workload(global_batch_size=6)), profile)
    assert explanation.limiting_device_id == "d:0"
    assert [row.share for row in explanation.rows] == [5, 1]
    assert explanation.rows[1].idle_s == pytest.approx(0.2)
    text = render_text(explanation)
    assert "the others wait for it" in text
    assert "25% of the speed, 17% of the samples" in text
    assert "Most is lost waiting for d:0" in text


def test_a_left_out_device_is_explained_with_its_numbers() -> None:
    curves = [linear("d:0", 0.0, 0.01), linear("d:1", 0.0, 0.01)]
    profile = make_profile(curves, exchange_s=1.0)
    text = render_text(explain(solve(profile, Workload(global_batch_size=8)), profile))
    assert "left out: with it an exchange takes 1.00 s instead of 0.0 ms" in text
    assert "Most is lost by devices left out" in text


def test_a_device_too_slow_for_one_sample_is_explained() -> None:
    curves = [linear("d:0", 0.0, 0.01), linear("d:1", 0.0, 5.0)]
    profile = make_profile(curves)
    text = render_text(explain(solve(profile, Workload(global_batch_size=8)), profile))
    assert "left out: one sample takes it 5.00 s" in text


def test_memory_that_limits_the_micro_batch_is_named_and_the_rest_shown() -> None:
    profile = make_profile([linear("d:0", 0.1, 0.01, largest=8)])
    explanation = explain(solve(profile, Workload(global_batch_size=20)), profile)
    assert "memory holds no more than 8 at a time" in explanation.rows[0].note
    assert explanation.rows[0].micro_batches == "2 x 8 + 4"


def test_a_perfect_plan_loses_nothing_to_speak_of() -> None:
    curves = [linear("d:0", 0.0, 0.1), linear("d:1", 0.0, 0.1)]
    profile = make_profile(curves)
    explanation = explain(solve(profile, Workload(global_batch_size=8)), profile)
    assert explanation.efficiency == pytest.approx(1)
    assert "Nothing to speak of is lost." in render_text(explanation)
