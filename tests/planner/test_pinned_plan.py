from __future__ import annotations

import dataclasses

import pytest

from geartrain.errors import ConfigError
from geartrain.planner import MemoryCurve, Plan, Replica, Stage, fit_curve
from geartrain.planner.pinned_plan import check_plan, without_tail


def make_plan(left_out: tuple[str, ...] = ("d:2",)) -> Plan:
    replicas = tuple(
        Replica(device_id=f"d:{i}", share=n, micro_batch_size=4, num_micro_batches=n // 4)
        for i, n in enumerate((12, 4))
    )
    return Plan(
        global_batch_size=16,
        stages=(Stage(stage_index=0, replicas=replicas),),
        left_out=left_out,
    )


def test_a_fitting_plan_is_accepted() -> None:
    curve = fit_curve("d:1", [1], [0.1], 4)
    check_plan(make_plan(), ["d:0", "d:1", "d:2"], [curve], global_batch_size=16)


@pytest.mark.parametrize(
    ("device_ids", "message"),
    [
        (["d:0", "d:1"], "names d:2, which the fleet of d:0, d:1 lacks"),
        (["d:0", "d:1", "d:2", "d:3"], "says nothing of d:3"),
        (["d:2", "d:1", "d:0"], "leaves out d:2, the device of rank 0"),
    ],
)
def test_a_plan_for_another_fleet_is_refused(device_ids: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_plan(make_plan(), device_ids)


def test_another_global_batch_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"global batch of 16 .* asks for 32"):
        check_plan(make_plan(), ["d:0", "d:1", "d:2"], global_batch_size=32)


def test_a_micro_batch_above_memory_is_refused_with_both_numbers() -> None:
    memory = MemoryCurve(fixed_bytes=0, bytes_per_sample=1024.0, limit_bytes=3072)
    curve = fit_curve("d:1", [1], [0.1], 8, memory=memory)
    with pytest.raises(ConfigError, match=r"d:1.*4\.0 KiB of 3\.0 KiB.*at most 3"):
        check_plan(make_plan(), ["d:0", "d:1", "d:2"], [curve])


def test_unequal_counts_in_a_uniform_plan_are_refused() -> None:
    plan = dataclasses.replace(make_plan(), uniform_micro_batches=True)
    with pytest.raises(ConfigError, match=r"counts \[1, 3\]"):
        check_plan(plan, ["d:0", "d:1", "d:2"])


def test_a_plan_of_two_stages_is_refused() -> None:
    plan = make_plan()
    plan = dataclasses.replace(plan, stages=plan.stages * 2)
    with pytest.raises(ConfigError, match="2 stages"):
        check_plan(plan, ["d:0", "d:1", "d:2"])


def test_a_tail_is_handed_out_in_proportion_to_the_shares() -> None:
    shares = {"d:0": (6, 4), "d:1": (2, 1), "d:2": (0, 1)}
    replicas = tuple(
        Replica(
            device_id=device_id,
            share=share,
            micro_batch_size=size,
            num_micro_batches=-(-share // size),
        )
        for device_id, (share, size) in shares.items()
    )
    plan = Plan(
        global_batch_size=12,
        stages=(Stage(stage_index=0, replicas=replicas),),
        tail_samples=4,
    )

    whole = without_tail(plan)

    assert [(r.share, r.num_micro_batches) for r in whole.replicas] == [
        (9, 3),
        (3, 3),
        (0, 0),
    ]
    assert whole.tail_samples == 0
    assert without_tail(whole) == whole
