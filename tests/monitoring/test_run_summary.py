"""The numbers of a run."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from example_runs import make_records, planned
from geartrain.monitoring.run_summary import bounds_per_step, group_steps, summarise
from geartrain.planner import Plan, Replica, Stage
from geartrain.telemetry import RunEvent, StepRecord


def test_rate_and_efficiency_are_those_of_the_steps() -> None:
    summary = summarise(make_records(10), [planned(bound=80.0)])

    assert summary.samples_per_s == pytest.approx(64.0)
    assert summary.efficiency == pytest.approx(0.8)
    assert (summary.num_steps, summary.num_samples) == (10, 640)
    assert summary.wall_s == pytest.approx(10.0)


def test_slow_warm_up_steps_do_not_count() -> None:
    records = make_records(10)
    slow = [dataclasses.replace(r, step_s=9.0) if r.step < 2 else r for r in records]

    assert summarise(slow, []).samples_per_s == pytest.approx(64.0)


def test_run_of_warm_up_steps_only_is_still_summed_up() -> None:
    assert summarise(make_records(1), []).samples_per_s == pytest.approx(64.0)


def test_step_lasts_as_long_as_its_slowest_device() -> None:
    records = make_records(3, shares=(4, 4), busy_s=(0.5, 0.5))
    records[-1] = dataclasses.replace(records[-1], step_s=2.0)

    assert [step.step_s for step in group_steps(records)] == [1.0, 1.0, 2.0]


def test_load_balance_error_is_the_largest_deviation_from_the_mean_busy_time() -> None:
    records = make_records(5, shares=(4, 4), busy_s=(0.9, 0.6))

    assert summarise(records, []).load_balance_error == pytest.approx(0.2)


def test_device_without_samples_does_not_count_as_unbalanced() -> None:
    records = make_records(5, shares=(4, 4, 0), busy_s=(0.9, 0.9, 0.0))

    assert summarise(records, []).load_balance_error == pytest.approx(0.0)


def test_bound_follows_a_replan() -> None:
    steps = group_steps(make_records(4))
    replanned = RunEvent(
        step=2,
        at_s=1002.0,
        kind="replanned",
        message="",
        values={"bound_samples_per_s": 40.0},
    )

    assert bounds_per_step(steps, [planned(), replanned], None) == (70, 70, 40, 40)


def test_replan_may_give_the_bound_as_the_time_of_a_step() -> None:
    replica = Replica(device_id="a", share=64, micro_batch_size=64, num_micro_batches=1)
    stage = Stage(stage_index=0, replicas=(replica,))
    plan = Plan(global_batch_size=64, stages=(stage,), bound_step_s=0.8)
    replanned = RunEvent(
        step=2, at_s=1002.0, kind="replanned", message="", values={"bound_step_s": 1.6}
    )

    bounds = bounds_per_step(group_steps(make_records(4)), [replanned], plan)

    assert bounds == (80, 80, 40, 40)


def test_bound_comes_from_the_plan_where_no_event_has_it() -> None:
    replica = Replica(device_id="a", share=64, micro_batch_size=64, num_micro_batches=1)
    stage = Stage(stage_index=0, replicas=(replica,))
    plan = Plan(global_batch_size=64, stages=(stage,), bound_step_s=0.8)

    assert summarise(make_records(5), [], plan).efficiency == pytest.approx(0.8)


def test_fractions_say_where_a_device_spent_its_time() -> None:
    device = summarise(make_records(5), []).devices[0]

    assert device.busy_fraction == pytest.approx(0.9)
    assert device.exchange_fraction == pytest.approx(0.05)
    assert device.data_fraction == pytest.approx(0.01)
    assert device.idle_fraction == pytest.approx(0.04)
    assert device.last_share == 34


def test_device_that_was_left_out_meanwhile_has_no_share() -> None:
    records = [r for r in make_records(5) if r.device_id != "emulated:3" or r.step < 4]

    shares = {d.device_id: d.last_share for d in summarise(records, []).devices}

    assert shares["emulated:3"] == 0
    assert shares["emulated:0"] == 34


def test_no_step_gives_zeros() -> None:
    summary = summarise([], [])

    assert (summary.num_steps, summary.samples_per_s, summary.last_loss) == (0, 0.0, None)


@given(st.permutations(make_records(4)))
def test_order_of_the_records_does_not_matter(records: list[StepRecord]) -> None:
    expected = summarise(make_records(4), [])

    summary = summarise(records, [])

    assert summary.samples_per_s == pytest.approx(expected.samples_per_s)
    assert summary.load_balance_error == pytest.approx(expected.load_balance_error)
