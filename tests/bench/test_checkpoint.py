"""``geartrain bench checkpoint``: its verdicts, and its workers on small states."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from geartrain.bench.checkpoint.orders import (
    ExchangeLog,
    FlipCount,
    FlipOrder,
    FlipsFound,
    KillOrder,
    KillsFound,
    LogFound,
    ReshardFound,
    ReshardOrder,
    StallFound,
    StallRound,
    StateOrder,
)
from geartrain.bench.checkpoint.result import (
    CASE_NAMES,
    CheckpointResult,
    judge_flips,
    judge_kills,
    judge_log,
    judge_reshard,
    judge_slowdown,
    judge_stall,
    table_rows,
)
from geartrain.bench.checkpoint.run import CheckpointOptions, run_checkpoint
from geartrain.bench.checkpoint.worker_process import read_result, run_workers
from geartrain.errors import ConfigError, DeviceError

_LIMIT_S = 120.0


def _round(shadow_stall_s: float, extra_s: float) -> StallRound:
    return StallRound(
        dcp_save_s=1.0,
        copy_stall_s=0.05,
        shadow_stall_s=shadow_stall_s,
        plain_steps_s=(0.2, 0.2, 0.2),
        shadow_steps_s=(0.2 + extra_s, 0.2, 0.2),
        send_s=0.1,
        agents_processor_s=0.3,
    )


def _stall(*rounds: StallRound) -> StallFound:
    return StallFound(state_bytes=200, rounds=rounds)


def test_the_stall_is_held_against_dcp() -> None:
    met = judge_stall(_stall(_round(0.01, 0), _round(0.012, 0), _round(0.4, 0)))
    missed = judge_stall(_stall(_round(0.03, 0)))

    assert met.is_met
    assert met.values["stall_fraction"] == pytest.approx(0.012)
    assert missed.missed == ("stall 3.00%, 2% may",)


def test_a_snapshot_slows_steps_down_as_often_as_the_tuner_takes_one() -> None:
    one = _round(0.0, 0.1)
    disturbed = _round(0.0, 60.0)

    found = judge_slowdown(_stall(one, disturbed, one))

    # 0.1 s of sending at 2 % of steps of 0.2 s: one in 26.
    assert found.values["interval_steps"] == 26
    assert found.values["slowdown_fraction"] == pytest.approx(0.1 / (26 * 0.2))
    assert found.values["block_slowdown_fraction"] == pytest.approx(0.1 / 0.6)
    assert found.is_met
    assert not judge_slowdown(_stall(_round(0.0, 0.5))).is_met


def test_the_log_of_all_members_counts_beside_that_of_one() -> None:
    exact = ExchangeLog(all_fraction=0.276, member_fraction=0.07, entropy_fraction=0.27)
    coded = ExchangeLog(all_fraction=0.077, member_fraction=0.019, entropy_fraction=0.07)

    found = judge_log(LogFound(num_parameters=9, float32=exact, int8=coded, is_exact=True))
    wrong = judge_log(LogFound(num_parameters=9, float32=exact, int8=coded, is_exact=False))

    assert found.missed == (
        "float32, all members 27.60%, 25% may",
        "int8, all members 7.70%, 2% may",
    )
    assert not found.failures
    assert wrong.failures


def test_a_flip_that_is_not_found_is_a_failure() -> None:
    good = FlipCount(num_flips=3, num_found=3, num_wrong=0)
    bad = FlipCount(num_flips=3, num_found=2, num_wrong=1, unfound=("LATEST[3]",))

    assert judge_flips(
        FlipsFound(store=good, large=good, memory=good, log=good, dcp=bad)
    ).is_met
    found = judge_flips(FlipsFound(store=bad, large=good, memory=good, log=good, dcp=bad))
    assert found.failures == (
        "1 flips in store not found: LATEST[3]",
        "1 flips in store loaded wrong bits",
    )


def test_unequal_bits_after_a_load_are_a_failure_and_slowness_a_miss() -> None:
    slow = ReshardFound(
        state_bytes=1,
        dcp_save_s=1.0,
        save_s=1.0,
        dcp_load_s=(1.0, 1.0),
        load_s=(1.5, 1.3),
        is_equal=True,
    )

    assert judge_reshard(slow).missed == ("1.40 of DCP's time, 1.2 may",)
    assert not judge_reshard(slow).failures


def test_the_result_is_one_object_with_a_key_a_case() -> None:
    case = judge_stall(_stall(_round(0.01, 0)))
    result = CheckpointResult(
        cases=(case,),
        quick=True,
        seed=0,
        started_at_s=1.0,
        wall_s=2.0,
        load_average=0.5,
        command="geartrain bench checkpoint",
        commit="abc",
        versions={"torch": "2"},
    )

    read = json.loads(json.dumps(result.as_json()))

    assert read["stall"]["is_met"] is True
    assert read["label"] == "measured"
    assert not result.has_failures
    assert table_rows(result)[0][:2] == ("stall", "met")


def test_an_unknown_case_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(ConfigError, match=", ".join(CASE_NAMES)):
        CheckpointOptions(only=("stalls",))


def test_killed_saves_leave_whole_versions(tmp_path: Path) -> None:
    order = KillOrder(
        folder=str(tmp_path / "store"),
        result=str(tmp_path / "found"),
        num_trials=6,
        seed=1,
    )

    run_workers("kill_worker", [order], _LIMIT_S)

    found = read_result(order.result, KillsFound)
    assert judge_kills([found]).is_met
    assert found.num_killed == 6
    assert found.num_before + found.num_new == found.num_trials
    assert found.num_before


def test_a_worker_that_fails_is_told_of_with_what_it_wrote(tmp_path: Path) -> None:
    busy = tmp_path / "file"
    busy.write_text("no folder")
    order = KillOrder(
        folder=str(busy), result=str(tmp_path / "found"), num_trials=1, seed=1
    )

    with pytest.raises(
        DeviceError, match=r"(?s)kill_worker failed with 1: .*CheckpointError"
    ):
        run_workers("kill_worker", [order], _LIMIT_S)


@pytest.mark.slow
def test_every_flip_of_a_small_store_is_found(tmp_path: Path) -> None:
    order = FlipOrder(
        folder=str(tmp_path),
        result=str(tmp_path / "found"),
        seed=1,
        every=20,
        num_in_large=2,
        large_bytes=1 << 20,
        num_dcp=5,
    )

    run_workers("flip_worker", [order], _LIMIT_S)

    assert judge_flips(read_result(order.result, FlipsFound)).is_met


@pytest.mark.slow
def test_stalls_and_loads_of_a_small_state_are_measured(tmp_path: Path) -> None:
    found: dict[str, object] = {}
    for name in ("stall", "reshard"):
        folder = tmp_path / name
        folder.mkdir()
        state = StateOrder(
            folder=str(folder),
            result=str(tmp_path / f"{name}.json"),
            dim=64,
            num_rounds=1,
            budget_s=60.0,
            steps_per_block=2,
            batch_size=8,
        )
        if name == "stall":
            run_workers("stall_worker", [state], _LIMIT_S)
            found[name] = read_result(state.result, StallFound)
        else:
            orders = [ReshardOrder(state=state, rank=rank) for rank in range(3)]
            run_workers("reshard_worker", orders, _LIMIT_S)
            found[name] = read_result(state.result, ReshardFound)
    assert isinstance(found["stall"], StallFound)
    assert isinstance(found["reshard"], ReshardFound)
    assert len(found["stall"].rounds) == 1
    assert found["reshard"].is_equal


@pytest.mark.slow
def test_one_case_can_be_asked_for() -> None:
    said: list[str] = []

    result = run_checkpoint(CheckpointOptions(quick=True, only=("kills",)), said.append)

    assert [case.case for case in result.cases] == ["kills"]
    assert not result.has_failures
    assert said
