"""What ``geartrain bench elastic`` accepts, how it judges, and one real kill."""

from __future__ import annotations

import json
import socket
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from geartrain.bench.elastic.cases import CASE_NAMES, CASES, Case, limit_s
from geartrain.bench.elastic.drive import Asked, CaseRuns, run_cases
from geartrain.bench.elastic.outcome import Outcome
from geartrain.bench.elastic.overhead import Overhead, read_line
from geartrain.bench.elastic.result import (
    ElasticResult,
    judge_case,
    judge_joins,
    table_rows,
)
from geartrain.bench.elastic.run import ElasticOptions, groups, judge
from geartrain.bench.elastic.torchft_case import TorchftResult, measure_torchft
from geartrain.cli import main
from geartrain.errors import ConfigError
from geartrain.telemetry import read_document, write_document
from run_command import run_command

KEYS_OF_A_CASE = {"p50_s", "p95_s", "p95_steps", "num_events", "diverged_steps"}


def outcomes(*seconds: float | None, **fields: Any) -> list[Outcome]:
    return [
        Outcome(at_s=float(index), device_ids=("a",), seconds=s, step_s=0.05, **fields)
        for index, s in enumerate(seconds)
    ]


def runs(case: str, *seconds: float | None, **fields: Any) -> CaseRuns:
    return CaseRuns(case=case, outcomes=outcomes(*seconds), **fields)


def ignore(_text: str) -> None:
    """Progress that nobody watches."""


# -- limits ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("case", "step_s", "expected"),
    [
        ("kill_one_of_four", 0.05, 0.3),
        ("kill_one_of_four", 0.099, 0.3),
        ("kill_one_of_four", 0.4, 1.2),
        ("kill_three_of_ten", 0.1, 0.5),
        ("kill_three_of_ten", 1.0, 3.0),
        ("second_fault", 0.05, 1.0),
        ("coordinator_kill", 0.05, 2.0),
        ("warm_join", 0.05, 0.5),
        ("stop", 0.05, None),
    ],
)
def test_limits_are_those_that_were_set(
    case: str, step_s: float, expected: float | None
) -> None:
    assert limit_s(case, step_s) == pytest.approx(expected)


def test_every_case_makes_as_many_events_as_were_asked_for() -> None:
    least = {name: 10 if name == "coordinator_kill" else 50 for name in CASES}

    assert all(CASES[name].num_events >= number for name, number in least.items())
    assert set(CASES) | {"warm_join"} == set(CASE_NAMES)


# -- judging --------------------------------------------------------------------------


def test_case_within_its_limit_is_met() -> None:
    found = judge_case(runs("kill_one_of_four", *[0.1] * 19, 5.0))

    assert found.is_met  # one of twenty may be late: the limit is of the 95th percentile
    assert found.p95_s == 0.1
    assert found.max_s == 5.0
    assert found.num_events == 20


def test_case_beyond_its_limit_says_by_how_much() -> None:
    found = judge_case(runs("kill_one_of_four", *[0.1] * 10, 0.4, 0.4))

    assert not found.is_met
    assert found.missed == ("p95 0.400 s, limit 0.3 s",)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"num_diverged": 2}, "2 diverged steps"),
        ({"num_steps_lost": 1}, "1 steps lost"),
        ({"num_transfers": 3}, "3 states sent to survivors"),
        ({"failures": ["the run failed: x"]}, "1 failures"),
    ],
)
def test_fast_case_is_not_met_where_anything_went_wrong(
    fields: dict[str, Any], expected: str
) -> None:
    found = judge_case(runs("second_fault", 0.1, **fields))

    assert not found.is_met
    assert found.missed == (expected,)


def test_event_without_a_further_step_is_no_fast_one() -> None:
    found = judge_case(runs("kill_one_of_four", 0.1, None))

    assert found.num_events == 2
    assert found.num_failed == 1
    assert not found.is_met


def test_stop_is_held_against_each_events_own_limit() -> None:
    slow = CaseRuns(case="stop", outcomes=outcomes(2.05, 2.08, limit_s=2.0))
    late = CaseRuns(case="stop", outcomes=outcomes(0.45, 0.55, limit_s=0.4))

    assert judge_case(slow).is_met
    found = judge_case(late)
    assert found.p95_beyond_limit_s == pytest.approx(0.15)
    assert not found.is_met


def test_stop_of_which_no_limit_was_told_is_not_met() -> None:
    assert judge_case(runs("stop", 0.2)).missed == ("the run told no limit",)


def test_joins_of_the_kills_are_a_case_of_their_own() -> None:
    kills = runs("kill_one_of_four", 0.1)
    kills.joins = outcomes(0.2, 0.3, steps=1.0)
    others = runs("second_fault", 0.1)
    others.joins = outcomes(9.0)

    found = judge_joins([kills, others], "kill_one_of_four")

    assert (found.case, found.num_events, found.p95_s) == ("warm_join", 2, 0.3)
    assert found.is_met


def test_join_for_which_the_others_pause_too_long_is_not_met() -> None:
    kills = runs("kill_one_of_four", 0.1)
    kills.joins = outcomes(0.2, steps=2.5)

    found = judge_joins([kills], "kill_one_of_four")

    assert found.missed == ("the others paused 2.5 steps, limit 2",)


def test_case_without_an_event_says_why() -> None:
    found = judge_joins([runs("kill_one_of_four", 0.1)], "kill_one_of_four")

    assert "no device came back" in found.skipped
    assert found.is_met is None


# -- options --------------------------------------------------------------------------


def test_unknown_case_is_refused() -> None:
    with pytest.raises(ConfigError, match="unknown case 'kill'; known are kill_one"):
        ElasticOptions(only=("kill",))


def test_wrong_python_for_torchft_ends_the_command_with_one_line() -> None:
    done = CliRunner().invoke(
        main, ["bench", "elastic", "--torchft-python", "/nowhere/python", "--json"]
    )

    assert done.exit_code == 2
    assert "no program at /nowhere/python" in done.stderr


def test_joins_alone_need_the_kills_runs_and_do_not_show_them() -> None:
    options = ElasticOptions(only=("warm_join",))
    kills = runs("kill_one_of_four", 0.1)
    kills.joins = outcomes(0.2, steps=0.5)

    assert [one.case.name for group in groups(options) for one in group] == [
        "kill_one_of_four"
    ]
    assert [case.case for case in judge(options, [kills])] == ["warm_join"]


def test_quick_runs_small_fleets_together_and_lets_the_script_save() -> None:
    (alone, together) = groups(ElasticOptions(quick=True))

    assert [one.case.name for one in alone] == ["kill_three_of_ten"]
    assert together[-1].case.saves
    assert {len(one.case.core_fractions) for one in together} == {4}
    assert len(groups(ElasticOptions())) == len(CASES)


# -- the result -----------------------------------------------------------------------


def result_of(*all_runs: CaseRuns) -> ElasticResult:
    return ElasticResult(
        cases=judge(ElasticOptions(), all_runs),
        overhead=Overhead(
            fraction=0.01,
            background_fraction=0.002,
            step_s=0.06,
            ddp_step_s=0.059,
            num_rounds=2,
            steps_per_phase=10,
            ratios=(1.0, 1.02),
        ),
        torchft=TorchftResult(version="1", seconds=(0.5, 0.6), step_s=0.05),
        quick=False,
        seed=0,
        labels=("emulated",),
        started_at_s=0.0,
        wall_s=1.0,
        load_average=0.5,
        command="geartrain bench elastic",
        commit="",
        versions={},
    )


def test_printed_object_has_the_keys_that_programs_rely_on() -> None:
    printed = result_of(*(runs(name, 0.1) for name in CASES)).as_json()

    for name in CASES:
        case = printed[name]
        assert isinstance(case, dict)
        assert case.keys() >= KEYS_OF_A_CASE
    assert printed["overhead_vs_ddp_fraction"] == 0.01
    assert printed["step_s"] == 0.05
    json.dumps(printed)


def test_raw_result_reads_back_equal(tmp_path: Path) -> None:
    result = result_of(runs("kill_one_of_four", 0.1, None))
    write_document(tmp_path / "raw.json", result)

    assert read_document(tmp_path / "raw.json", ElasticResult) == result


def test_table_has_a_row_for_each_case_and_for_what_is_beside_them() -> None:
    rows = table_rows(result_of(runs("kill_one_of_four", 0.1)))

    names = [row[0] for row in rows]
    assert names == [
        "kill_one_of_four",
        "warm_join",
        "overhead_vs_ddp",
        "torchft kill_one_of_four",
    ]
    assert len({len(row) for row in rows}) == 1
    assert rows[2][:2] == ("overhead_vs_ddp", "met")


def test_only_what_makes_times_worthless_is_a_failure() -> None:
    late = result_of(runs("kill_one_of_four", 9.0))
    wrong = result_of(runs("kill_one_of_four", 0.1, num_diverged=1))

    assert not late.has_failures
    assert wrong.has_failures


# -- beside it ------------------------------------------------------------------------


def test_python_without_torchft_is_left_out(tmp_path: Path) -> None:
    without = tmp_path / "python"
    without.write_text(f'#!/bin/sh\nexec "{sys.executable}" -I -S "$@"\n')
    without.chmod(0o755)

    found = measure_torchft(without, tmp_path, ignore, quick=True)

    assert found.as_json() == {"skipped": "torchft is not installed"}


def test_order_that_ends_too_soon_is_an_error() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(b"12")
        theirs.shutdown(socket.SHUT_WR)
        with pytest.raises(EOFError):
            read_line(ours)


# -- real runs ------------------------------------------------------------------------


def test_real_kill_is_timed_and_leaves_nothing_behind(tmp_path: Path) -> None:
    case = Case(
        name="kill_one_of_four",
        deed="kill",
        core_fractions=(0.4, 0.4, 0.4),
        sample_s=0.001,
        num_events=1,
        num_quick=1,
    )

    (found,) = run_cases([Asked(case=case, num_events=1)], tmp_path, 0, ignore)

    assert found.failures == []
    assert found.num_diverged == found.num_steps_lost == 0
    (outcome,) = found.outcomes
    assert outcome.seconds is not None
    assert outcome.step_s > 0


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_overhead_is_measured_against_ddp(tmp_path: Path) -> None:
    printed = run_command(
        "geartrain",
        "bench",
        "elastic",
        "--quick",
        "--only=overhead",
        "--json",
        cwd=tmp_path,
        timeout_s=280.0,
    )

    found = json.loads(printed.splitlines()[-1])
    assert found["overhead"]["step_s"] > 0
    # What it is depends on what else the machine does; several times DDP it can't be.
    assert -0.9 < found["overhead_vs_ddp_fraction"] < 3
