"""Runs of several workers of which some are killed or frozen while they train."""

from __future__ import annotations

import json
import signal
from collections import Counter
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

from example_fleets import emulated_fleet
from geartrain.checkpoint.snapshot import read_manifest
from geartrain.launch import LaunchResult, LaunchSettings, launch
from geartrain.launch.settings import SilentObserver, StreamName
from geartrain.telemetry import RunEvent, RunLogReader, StepRecord
from training_jobs import (
    Job,
    global_batches,
    largest_difference,
    relative_error,
    train_plainly,
)

SCRIPT = Path(__file__).parents[1] / "lost_workers_script.py"
NUM_STEPS = 10


class Notices(SilentObserver):
    def __init__(self) -> None:
        self.texts: list[str] = []
        self.output = b""

    def on_output(self, stream: StreamName, data: bytes) -> None:
        if stream == "stdout":
            self.output += data

    def on_notice(self, text: str) -> None:
        self.texts.append(text)


@dataclass(frozen=True, kw_only=True)
class Ran:
    """How a run went."""

    ended: LaunchResult
    notices: list[str]
    events: list[RunEvent]
    records: list[StepRecord]
    result: dict[str, Any]
    """What the lead's script wrote; empty if it did not get there."""
    output: str
    """What was shown of stdout."""

    def lost(self) -> list[str]:
        return [event.device_id for event in self.events if event.kind == "lost"]

    def interruptions_s(self) -> list[float]:
        return [e.values["interruption_s"] for e in self.events if e.kind == "epoch"]


def run(folder: Path, *hits: dict[str, Any], num_workers: int = 3, **options: Any) -> Ran:
    spec = {
        name: options.pop(name)
        for name in ("on_loss", "min_devices", "stop_timeout_s")
        if name in options
    }
    options |= {"hits": hits, "result": str(folder / "result.json")}
    options.setdefault("num_steps", NUM_STEPS)
    observer = Notices()
    settings = LaunchSettings(
        script=SCRIPT,
        arguments=(json.dumps(options),),
        fleet=emulated_fleet(*[1 / num_workers] * num_workers),
        run_dir=folder,
        preload=("torch", "geartrain.session"),
        respawn=None,  # who comes back is tested elsewhere
        **spec,
    )
    ended = launch(settings, observer)
    reader = RunLogReader(folder)
    result = folder / "result.json"
    ran = Ran(
        ended=ended,
        notices=observer.texts,
        events=list(reader.new_events()),
        records=list(reader.new_steps()),
        result=json.loads(result.read_text()) if result.exists() else {},
        output=observer.output.decode(),
    )
    print(ended.message, observer.texts, ran.interruptions_s())  # noqa: T201 - on failure
    return ran


def kill(rank: int, at: object, delay_s: float = 0.0) -> dict[str, Any]:
    return {"rank": rank, "at": at, "delay_s": delay_s, "signal": int(signal.SIGKILL)}


def freeze(rank: int, at: object, delay_s: float = 0.0) -> dict[str, Any]:
    return {"rank": rank, "at": at, "delay_s": delay_s, "signal": int(signal.SIGSTOP)}


def check_as_on_one_device(ran: Ran) -> None:
    assert (ran.ended.outcome, ran.ended.exit_code) == ("finished", 0), ran.ended.message
    expected = train_plainly(Job(num_steps=NUM_STEPS))
    assert largest_difference(ran.result["losses"], expected.losses) < 1e-6
    parameters = torch.tensor(ran.result["parameters"], dtype=torch.float64)
    assert relative_error(parameters, expected.parameters) < 1e-6


def check_records(ran: Ran) -> None:
    """Each step is recorded once for each device that took part in it."""
    found = [(record.step, record.device_id) for record in ran.records]
    assert len(found) == len(set(found))
    assert sorted({step for step, _ in found}) == list(range(NUM_STEPS))
    assert {record.step: record.loss for record in ran.records} == dict(
        enumerate(ran.result["losses"])
    )
    num_samples = Counter[int]()
    for record in ran.records:
        num_samples[record.step] += record.num_samples
    sizes = [len(batch[0]) for batch in islice(global_batches(Job()), NUM_STEPS)]
    assert [num_samples[step] for step in range(NUM_STEPS)] == sizes


def test_run_goes_on_without_a_killed_worker(tmp_path: Path) -> None:
    ran = run(tmp_path, kill(1, 4, 0.04), evaluates=True)

    check_as_on_one_device(ran)
    assert ran.lost() == ["emulated:1"]
    assert ran.result["devices"] == ["emulated:0", "emulated:2"]
    assert any("lost rank 1 (emulated:1): " in text for text in ran.notices)
    by_step: dict[int, list[str]] = {}
    for record in ran.records:
        by_step.setdefault(record.step, []).append(record.device_id)
    assert sorted(by_step) == list(range(NUM_STEPS))
    assert by_step[0] == ["emulated:0", "emulated:1", "emulated:2"]
    assert by_step[NUM_STEPS - 1] == ["emulated:0", "emulated:2"]


def test_run_goes_on_without_a_frozen_worker_which_is_killed(tmp_path: Path) -> None:
    ran = run(tmp_path, freeze(2, 3))

    check_as_on_one_device(ran)
    assert ran.lost() == ["emulated:2"]


@pytest.mark.slow
def test_two_workers_may_be_lost_at_once(tmp_path: Path) -> None:
    ran = run(tmp_path, kill(1, 5), kill(2, 5), num_workers=4)

    check_as_on_one_device(ran)
    assert sorted(ran.lost()) == ["emulated:1", "emulated:2"]


@pytest.mark.slow
@pytest.mark.parametrize("delay_s", [0.0, 0.05, 0.15, 0.3])
def test_another_worker_may_be_lost_while_the_others_regroup(
    tmp_path: Path, delay_s: float
) -> None:
    ran = run(tmp_path, kill(1, 5), kill(2, 5, delay_s), num_workers=4)

    check_as_on_one_device(ran)
    assert sorted(ran.lost()) == ["emulated:1", "emulated:2"]


@pytest.mark.slow
@pytest.mark.parametrize("delay_s", [0.0, 0.01])
def test_worker_may_be_lost_in_the_last_step(tmp_path: Path, delay_s: float) -> None:
    ran = run(tmp_path, kill(1, NUM_STEPS - 1, delay_s))

    check_as_on_one_device(ran)


@pytest.mark.slow
def test_worker_may_be_lost_before_it_evaluates(tmp_path: Path) -> None:
    undisturbed = run(tmp_path / "a", num_workers=2, evaluates=True)
    ran = run(tmp_path / "b", kill(1, "before evaluating"), num_workers=3, evaluates=True)

    check_as_on_one_device(ran)
    assert abs(ran.result["metric"] - undisturbed.result["metric"]) < 1e-9


@pytest.mark.slow
def test_one_device_may_be_all_that_is_left(tmp_path: Path) -> None:
    check_as_on_one_device(run(tmp_path, kill(1, 5), num_workers=2))


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_worker_may_be_lost_while_the_model_is_measured(tmp_path: Path, rank: int) -> None:
    ran = run(tmp_path, kill(rank, "measuring"))

    check_as_on_one_device(ran)
    check_records(ran)
    assert ran.lost() == [f"emulated:{rank}"]


def test_run_goes_on_without_rank_0(tmp_path: Path) -> None:
    ran = run(tmp_path, kill(0, 4, 0.02), evaluates=True)

    check_as_on_one_device(ran)
    check_records(ran)
    assert ran.lost() == ["emulated:0"]
    assert ran.result["devices"] == ["emulated:1", "emulated:2"]
    assert any("lost rank 0 (emulated:0): " in text for text in ran.notices)
    steps = [line for line in ran.output.splitlines() if line.startswith("step ")]
    assert steps == [f"step {k + 1}" for k in range(NUM_STEPS)]


@pytest.mark.slow
def test_rank_0_and_the_next_lead_may_be_lost(tmp_path: Path) -> None:
    ran = run(tmp_path, kill(0, 3), kill(1, 6), num_workers=4)

    check_as_on_one_device(ran)
    check_records(ran)
    assert ran.lost() == ["emulated:0", "emulated:1"]


@pytest.mark.slow
@pytest.mark.parametrize("delay_s", [0.0, 0.03, 0.1, 0.2])
def test_the_next_lead_may_be_lost_while_the_others_regroup(
    tmp_path: Path, delay_s: float
) -> None:
    ran = run(tmp_path, kill(0, 5), kill(1, 5, delay_s), num_workers=4)

    check_as_on_one_device(ran)
    check_records(ran)
    assert sorted(ran.lost()) == ["emulated:0", "emulated:1"]


@pytest.mark.slow
def test_the_last_rank_may_be_all_that_is_left(tmp_path: Path) -> None:
    ran = run(tmp_path, kill(0, 3), kill(1, 5), kill(2, 7), num_workers=4)

    check_as_on_one_device(ran)
    check_records(ran)
    assert ran.lost() == ["emulated:0", "emulated:1", "emulated:2"]


@pytest.mark.slow
def test_run_goes_on_without_a_frozen_rank_0_which_is_killed(tmp_path: Path) -> None:
    ran = run(tmp_path, freeze(0, 3))

    check_as_on_one_device(ran)
    check_records(ran)


@pytest.mark.slow
@pytest.mark.parametrize("delay_s", [0.0, 0.01, 0.02])
def test_rank_0_may_be_lost_in_the_last_step(tmp_path: Path, delay_s: float) -> None:
    ran = run(tmp_path, kill(0, NUM_STEPS - 1, delay_s))

    check_as_on_one_device(ran)
    check_records(ran)


@pytest.mark.slow
def test_rank_0_may_be_lost_while_it_evaluates(tmp_path: Path) -> None:
    undisturbed = run(tmp_path / "a", num_workers=3, evaluates=True)
    ran = run(tmp_path / "b", kill(0, "evaluating"), num_workers=4, evaluates=True)

    check_as_on_one_device(ran)
    check_records(ran)
    assert abs(ran.result["metric"] - undisturbed.result["metric"]) < 1e-9


@pytest.mark.slow
@pytest.mark.parametrize("saves_after", [6, NUM_STEPS])
def test_save_that_rank_0_was_lost_over_is_made_by_the_next(
    tmp_path: Path, saves_after: int
) -> None:
    saved = str(tmp_path / "saved")
    options: dict[str, Any] = {"saves_after": saves_after, "save_to": saved}
    ran = run(tmp_path / "a", kill(0, "saving"), evaluates=True, **options)

    check_as_on_one_device(ran)
    check_records(ran)
    step = read_manifest(saved).metadata["step"]
    assert step in {saves_after, saves_after + 1}
    if saves_after < NUM_STEPS:
        again = run(tmp_path / "b", num_workers=2, load=saved)
        expected = train_plainly(Job(num_steps=NUM_STEPS)).losses[step:]
        assert largest_difference(again.result["losses"], expected) < 1e-6
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".saved")] == []


def test_exchange_may_show_a_second_loss_before_the_coordinator_does(
    tmp_path: Path,
) -> None:
    ran = run(
        tmp_path,
        kill(3, 5),
        kill(2, "regrouping", 0.05),
        num_workers=4,
        coordinator_stands_still_s=0.6,
    )

    check_as_on_one_device(ran)
    assert sorted(ran.lost()) == ["emulated:2", "emulated:3"]


def test_training_goes_on_where_such_a_save_cant_be_made_either(tmp_path: Path) -> None:
    options: dict[str, Any] = {"saves_after": 6, "save_to": str(tmp_path / "saved")}
    ran = run(tmp_path / "a", kill(0, "saving"), disk_full_on=[1, 2], **options)

    check_as_on_one_device(ran)
    unsaved = [event.message for event in ran.events if event.kind == "unsaved"]
    assert len(unsaved) == 1
    assert "No space left on device" in unsaved[0]


@pytest.mark.slow
def test_lost_worker_ends_the_run_where_asked_to(tmp_path: Path) -> None:
    ran = run(tmp_path, kill(1, 5), on_loss="stop")

    assert (ran.ended.outcome, ran.ended.exit_code) == ("failed", 1)
    assert "rank 1 (emulated:1): was killed by SIGKILL" in ran.ended.message


@pytest.mark.slow
def test_run_ends_with_fewer_devices_than_wanted(tmp_path: Path) -> None:
    ran = run(tmp_path, kill(1, 5), min_devices=3)

    assert ran.ended.outcome == "failed"
    assert "2 devices are left, at least 3 must" in ran.ended.message


@pytest.mark.slow
@pytest.mark.parametrize("way", ["own_forward", "sync_batchnorm"])
def test_step_that_cant_be_redone_is_saved_before(tmp_path: Path, way: str) -> None:
    options: dict[str, Any] = {"own_forward": True}
    if way == "sync_batchnorm":
        options = {"setup": {"sync_batchnorm": True}}
    ran = run(tmp_path / "a", kill(1, 5, 0.002), **options)

    assert ran.ended.outcome == "failed"
    assert ran.ended.message.startswith("rank 1 (emulated:1): emulated:1 closed the")
    assert "session.load()" in ran.ended.message
    checkpoint = str(tmp_path / "a" / "checkpoint")
    again = run(tmp_path / "b", num_workers=2, load=checkpoint, **options)
    expected = train_plainly(Job(num_steps=NUM_STEPS))
    left = again.result["losses"]
    assert largest_difference(left, expected.losses[-len(left) :]) < 1e-6
