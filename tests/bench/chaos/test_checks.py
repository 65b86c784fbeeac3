"""Every check passes a sound run and finds the one that was doctored for it."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import msgspec
import pytest

from bench.chaos.doctored import (
    BEGAN_AT_S,
    STEP_S,
    Doctored,
    commit,
    done,
    hello,
    lost_event,
    step_record,
    work,
)
from geartrain.bench.chaos.checks import CHECKS, check_all
from geartrain.bench.chaos.evidence import Ending, Evidence, FlippedBit, Reference
from geartrain.bench.chaos.witness_log import (
    Commit,
    Hello,
    Record,
    Restore,
    Statement,
    WitnessWriter,
    Work,
    write_statement,
)
from geartrain.telemetry import RunEvent, RunLogWriter

FLIP = FlippedBit(file="model.safetensors", bit=3, was_found=True, was_sound=True)


def failures(evidence: Evidence) -> dict[str, str]:
    return {c.name: c.summary for c in check_all(evidence) if c.status == "failed"}


def replaced(records: list[Record], step: int, **changes: object) -> list[Record]:
    """The commit of a step with other fields."""
    return [
        msgspec.structs.replace(r, **changes)
        if isinstance(r, Commit) and r.step == step
        else r
        for r in records
    ]


def test_sound_run_passes_every_check(tmp_path: Path) -> None:
    evidence = Doctored(folder=tmp_path, options={"flips": (FLIP,)}).write()

    assert {c.name: c.status for c in check_all(evidence)} == dict.fromkeys(
        CHECKS, "passed"
    )


@pytest.mark.parametrize("lost_after_its_part", [False, True])
def test_run_that_lost_a_member_passes(tmp_path: Path, lost_after_its_part: bool) -> None:
    kill = done("kill", "c", 0.45)
    run = Doctored(
        folder=tmp_path,
        lost_at_step=5,
        lost_after_its_part=lost_after_its_part,
        deeds=(kill,),
    )

    evidence = run.write()

    assert failures(evidence) == {}
    figures = CHECKS["samples_once"](evidence).figures
    assert figures["steps_by_lost_members_too"] == int(lost_after_its_part)


def test_diverged_state_is_found(tmp_path: Path) -> None:
    def change(name: str, records: list[Record]) -> list[Record]:
        return replaced(records, 7, digest="other") if name == "b" else records

    found = failures(Doctored(folder=tmp_path).write(change))

    assert set(found) == {"one_state_hash", "weights"}
    assert found["one_state_hash"] == "step 7: state7 on a, c; other on b"


def test_left_out_member_has_no_state_to_compare(tmp_path: Path) -> None:
    def change(name: str, records: list[Record]) -> list[Record]:
        return replaced(records, 7, digest=None) if name == "b" else records

    assert failures(Doctored(folder=tmp_path).write(change)) == {}


@pytest.mark.parametrize(
    ("start", "stop", "fault"),
    [
        (4, 5, "positions 5..6 were computed by nobody"),
        (4, 7, "positions 6..7 were computed twice"),
        (3, 6, "positions 3..4 were computed twice"),
    ],
)
def test_lost_and_doubled_samples_are_found(
    tmp_path: Path, start: int, stop: int, fault: str
) -> None:
    def change(name: str, records: list[Record]) -> list[Record]:
        return [
            msgspec.structs.replace(r, start=start, stop=stop)
            if name == "b" and isinstance(r, Work) and r.step == 2
            else r
            for r in records
        ]

    assert failures(Doctored(folder=tmp_path).write(change)) == {
        "samples_once": f"step 3: {fault}"
    }


def test_lost_share_that_was_not_taken_over_is_found(tmp_path: Path) -> None:
    """The survivors commit the shares of the old plan, and the dead one never began."""

    def change(name: str, records: list[Record]) -> list[Record]:
        if name != "c":
            return records
        return [r for r in records if not (isinstance(r, Work) and r.step == 5)]

    run = Doctored(folder=tmp_path, lost_at_step=5, lost_after_its_part=True)

    found = failures(
        dataclasses.replace(run, deeds=(done("kill", "c", 0.45),)).write(change)
    )

    assert found == {"samples_once": "step 6: positions 6..8 were computed by nobody"}


def test_sample_in_two_batches_of_an_epoch_is_found(tmp_path: Path) -> None:
    def change(name: str, records: list[Record]) -> list[Record]:
        return [
            msgspec.structs.replace(r, samples=(0, 13))
            if name == "b" and isinstance(r, Work) and r.step == 1
            else r
            for r in records
        ]

    found = failures(Doctored(folder=tmp_path).write(change))

    assert found == {"samples_once": "epoch 0: 1 samples more than once, such as 0"}


def test_batch_that_is_taken_out_of_turn_is_found(tmp_path: Path) -> None:
    def change(_name: str, records: list[Record]) -> list[Record]:
        return [
            msgspec.structs.replace(r, step_in_epoch=3)
            if isinstance(r, Work) and r.step == 2
            else r
            for r in records
        ]

    found = failures(Doctored(folder=tmp_path, num_steps=3).write(change))

    assert found == {
        "samples_once": "step 3 took batch 3 of epoch 0, expected batch 2 of epoch 0"
    }


def test_members_that_commit_different_attempts_are_found(tmp_path: Path) -> None:
    def change(name: str, records: list[Record]) -> list[Record]:
        return replaced(records, 4, plan="plan2") if name == "a" else records

    found = failures(Doctored(folder=tmp_path).write(change))

    assert found == {"samples_once": "step 4 was committed under 2 plans at once"}


def test_step_that_comes_twice_is_found_unless_a_state_was_loaded(tmp_path: Path) -> None:
    again: list[Record] = [work(4, 0, 3), commit(5, "plan3")]

    def twice(name: str, records: list[Record]) -> list[Record]:
        return [*records[:-1], *again, records[-1]] if name == "a" else records

    def loaded(name: str, records: list[Record]) -> list[Record]:
        restore = Restore(at_s=2000.0, step=4)
        return [*records[:-1], restore, *again, records[-1]] if name == "a" else records

    found = failures(Doctored(folder=tmp_path / "x", num_steps=6).write(twice))
    sound = failures(Doctored(folder=tmp_path / "y", num_steps=6).write(loaded))

    assert found == {"steps_forward": "a-0: step 5 came where 7 was next"}
    assert sound == {}


def test_step_that_nobody_committed_is_found(tmp_path: Path) -> None:
    def change(_name: str, records: list[Record]) -> list[Record]:
        return [r for r in records if not (isinstance(r, Commit) and r.step == 4)]

    found = CHECKS["steps_forward"](Doctored(folder=tmp_path).write(change))

    assert "steps [4] were committed by nobody" in found.details


@pytest.mark.parametrize(
    ("step", "fault"),
    [
        (9, "step 9: a is recorded 2 times"),
        (3, "step 3: a is recorded 2 times"),
    ],
)
def test_step_that_is_recorded_twice_is_found(
    tmp_path: Path, step: int, fault: str
) -> None:
    run = Doctored(folder=tmp_path)
    run.write()
    log = RunLogWriter(tmp_path / "run")
    log.add_steps([step_record(step, "a")])
    log.close()

    assert failures(run.read()) == {"run_log": fault}


def test_event_that_is_recorded_twice_is_found(tmp_path: Path) -> None:
    kill = done("kill", "c", 0.45)
    run = Doctored(folder=tmp_path, lost_at_step=5, deeds=(kill,))
    run.write()
    log = RunLogWriter(tmp_path / "run")
    log.add_event(lost_event("c", 5))
    log.close()

    assert failures(run.read()) == {
        "run_log": "the event 'lost' of step 5 is recorded 2 times"
    }


def test_step_that_is_not_recorded_is_found(tmp_path: Path) -> None:
    run = Doctored(folder=tmp_path)
    run.write()
    path = tmp_path / "run" / "run.jsonl"
    lines = [line for line in path.read_text().splitlines() if '"step":6,' not in line]
    path.write_text("\n".join(lines) + "\n")

    assert failures(run.read()) == {"run_log": "committed but not recorded: steps [7]"}


def test_device_that_was_given_up_for_nothing_is_found(tmp_path: Path) -> None:
    slow = done("slow", "c", 0.4, 1.0)

    found = failures(Doctored(folder=tmp_path, lost_at_step=5, deeds=(slow,)).write())

    assert found == {"no_false_deaths": "c was lost: closed the connection"}


def test_member_that_vanishes_without_being_told_lost_is_found(tmp_path: Path) -> None:
    def change(name: str, records: list[Record]) -> list[Record]:
        return records[:-1] if name == "b" else records

    found = failures(Doctored(folder=tmp_path).write(change))

    assert found == {"no_false_deaths": "b ended without a word"}


def test_pause_beyond_its_limit_is_found_and_a_freeze_allows_more(tmp_path: Path) -> None:
    def change(_name: str, records: list[Record]) -> list[Record]:
        return [
            msgspec.structs.replace(r, at_s=r.at_s + 4.0)
            if isinstance(r, Commit) and r.step > 4
            else r
            for r in records
        ]

    run = Doctored(folder=tmp_path, lost_at_step=5, options={"ended_at_s": 1006.0})
    frozen = dataclasses.replace(
        run, folder=tmp_path / "frozen", deeds=(done("freeze", "c", 0.45),)
    )
    killed = dataclasses.replace(
        run, folder=tmp_path / "killed", deeds=(done("kill", "c", 0.45),)
    )

    assert failures(frozen.write(change)) == {}
    assert failures(killed.write(change)) == {
        "pauses": "4.10 s before step 5 after kill (limit 3.30 s)"
    }


def test_run_that_stands_still_at_the_end_is_found(tmp_path: Path) -> None:
    run = Doctored(folder=tmp_path, options={"ended_at_s": 1031.0})

    assert failures(run.write()) == {
        "pauses": "30.00 s before step 11 with no fault near (limit 3.30 s)"
    }


def reference_of(evidence: Evidence, digest: str, step: int) -> Statement:
    sound = evidence.statements[0]
    records = tuple(replaced(list(sound.records), step, digest=digest))
    return dataclasses.replace(sound, records=records)


@pytest.mark.parametrize(
    ("needs_same_bits", "difference", "summary"),
    [
        (True, 1e-9, "other weights than without faults from step 8 on"),
        (False, 0.5, "relative difference 5.00e-01, at most 1e-03 allowed"),
        (False, None, "bits differ from step 8 on, and the final weights are not there"),
        (False, 1e-9, None),
    ],
)
def test_other_weights_than_without_faults_are_found(
    tmp_path: Path, needs_same_bits: bool, difference: float | None, summary: str | None
) -> None:
    evidence = Doctored(folder=tmp_path).write()
    reference = Reference(
        statement=reference_of(evidence, "other", 8),
        needs_same_bits=needs_same_bits,
        relative_difference=difference,
    )

    found = failures(dataclasses.replace(evidence, reference=reference))

    assert found == ({} if summary is None else {"weights": summary})


def test_reference_that_ends_early_compares_nothing(tmp_path: Path) -> None:
    evidence = Doctored(folder=tmp_path).write()
    sound = evidence.statements[0]
    short = dataclasses.replace(sound, records=sound.records[:9])

    found = failures(dataclasses.replace(evidence, reference=Reference(statement=short)))

    assert found == {"weights": "the reference ends at step 4, the run at step 10"}


@pytest.mark.parametrize("outcome", ["failed", "hung"])
def test_run_that_did_not_go_on_is_found(tmp_path: Path, outcome: str) -> None:
    ending = Ending(outcome=outcome, exit_code=1, message="no state")  # type: ignore[arg-type]  # of both

    found = failures(Doctored(folder=tmp_path, options={"ending": ending}).write())

    assert found == {"run_goes_on": "no state"}


@pytest.mark.parametrize(
    ("flip", "summary"),
    [
        (dataclasses.replace(FLIP, was_found=False), "bit 3 of model.safetensors was not"),
        (dataclasses.replace(FLIP, was_sound=False), "model.safetensors was unreadable"),
    ],
)
def test_turned_bit_that_nobody_noticed_is_found(
    tmp_path: Path, flip: FlippedBit, summary: str
) -> None:
    found = failures(Doctored(folder=tmp_path, options={"flips": (FLIP, flip)}).write())

    assert list(found) == ["bit_flips_found"]
    assert found["bit_flips_found"].startswith(summary)


def test_what_is_left_behind_is_found(tmp_path: Path) -> None:
    left = ("process 12 (python)",)

    found = failures(Doctored(folder=tmp_path, options={"leftovers": left}).write())

    assert found == {"nothing_left": "process 12 (python)"}


def test_run_without_a_step_fails(tmp_path: Path) -> None:
    def change(_name: str, records: list[Record]) -> list[Record]:
        return records[:1]

    found = failures(Doctored(folder=tmp_path).write(change))

    assert found["one_state_hash"] == "no step was committed"
    assert found["weights"] == "the run and its reference have no step in common"


def test_torn_last_line_of_a_killed_witness_is_passed_over(tmp_path: Path) -> None:
    run = Doctored(folder=tmp_path)
    before = run.write()
    WitnessWriter(tmp_path / "witness", "a-0")._file  # noqa: B018 - opens for appending
    path = tmp_path / "witness" / "a-0.jsonl"
    path.write_bytes(path.read_bytes() + b'{"type":"comm')

    assert run.read().statements == before.statements


def restored_run(folder: Path, first_step: int) -> Evidence:
    """Six steps by all, who are then killed; new processes go on after step 4."""
    run = Doctored(folder=folder, num_steps=6, deeds=(done("kill_all", "a", 0.65),))
    run.write(lambda _, records: records[:-1])  # no goodbye
    late_s = 10.0
    for index, name in enumerate(run.members):
        records: list[Record] = [
            msgspec.structs.replace(hello(name, index + 10), at_s=BEGAN_AT_S + late_s - 1)
        ]
        for step in range(first_step - 1, 10):
            records += [work(step, index, 3), commit(step + 1, "plan3")]
        moved = [
            r if isinstance(r, Hello) else msgspec.structs.replace(r, at_s=r.at_s + late_s)
            for r in records
        ]
        write_statement(folder / "witness", f"{name}-new", moved)
    log = RunLogWriter(folder / "run")
    log.add_event(
        RunEvent(
            step=4, at_s=BEGAN_AT_S + late_s, kind="resumed", message="goes on after 4"
        )
    )
    log.close()
    return dataclasses.replace(run.read(), ended_at_s=BEGAN_AT_S + late_s + 2)


def test_steps_may_be_made_again_where_the_run_was_restored(tmp_path: Path) -> None:
    evidence = restored_run(tmp_path, first_step=5)

    found = {check.name: check for check in check_all(evidence)}
    for name in ("one_state_hash", "samples_once", "steps_forward", "no_false_deaths"):
        assert found[name].status == "passed", found[name]
    assert found["steps_forward"].figures == {"restores": 1, "steps_made_again": 2}
    assert found["samples_once"].figures["samples"] == 10 * 8


def test_restore_that_skips_a_step_is_found(tmp_path: Path) -> None:
    evidence = restored_run(tmp_path, first_step=8)

    assert "steps_forward" in failures(evidence)


def test_process_that_begins_before_what_was_reached_is_found(tmp_path: Path) -> None:
    run = Doctored(folder=tmp_path)
    run.write()
    late = msgspec.structs.replace(hello("c", 9), at_s=BEGAN_AT_S + 5 * STEP_S + 0.01)
    write_statement(tmp_path / "witness", "c-9", [late, commit(3, "plan3")])

    found = failures(run.read())

    assert found["steps_forward"] == "c-9 began with step 3 where 5 was reached"


@pytest.mark.parametrize(("lasted_s", "is_false"), [(0.1, True), (1.2, False)])
def test_device_that_stood_still_for_long_may_be_given_up(
    tmp_path: Path, lasted_s: float, is_false: bool
) -> None:
    stop = done("stop", "c", 0.45, lasted_s)
    stop = dataclasses.replace(
        stop, fault=dataclasses.replace(stop.fault, duration_s=lasted_s)
    )
    evidence = Doctored(folder=tmp_path, lost_at_step=5, deeds=(stop,)).write()

    assert ("no_false_deaths" in failures(evidence)) == is_false
