"""Real trainings under chaos, as a user starts them."""

from __future__ import annotations

import json
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from geartrain.bench.chaos.result import ChaosResult
from geartrain.bench.chaos.witness_log import WitnessFolder
from geartrain.telemetry import read_document
from run_command import run_command, user_environment

PATIENT = "--max-pause-s=60"
"""How long a pause takes on a machine with other work is no matter of these tests."""


def chaos(folder: Path, *options: str, timeout_s: float = 170.0) -> dict[str, Any]:
    written = ("--output=all", "--result=result.json", "--json")
    command = ("geartrain", "chaos", *written, *options)
    printed = run_command(*command, cwd=folder, timeout_s=timeout_s)
    document: dict[str, Any] = json.loads(printed.splitlines()[-1])
    return document


def test_training_survives_a_few_seconds_of_chaos(tmp_path: Path) -> None:
    found = chaos(
        tmp_path,
        "--seed=4",
        "--duration=4",
        "--faults-per-s=1",
        "--kinds=kill,stop",
        "--devices=emulated:0.4,0.4,0.4",
        "--report=report.html",
        PATIENT,
    )

    assert found["passed"], found["failures"]
    assert found["faults_by_kind"]["kill"] >= 1  # more where it is back in time
    assert found["devices_left"] >= 2  # the lost one may be back by then
    assert found["figures"]["weights"]["steps_differing"] == 0
    result = read_document(tmp_path / "result.json", ChaosResult)
    assert result.num_steps == found["steps"]
    assert "seed 4" in (tmp_path / "report.html").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_chaos_that_is_ended_leaves_nothing_running(
    tmp_path: Path, number: signal.Signals
) -> None:
    command = ["geartrain", "chaos", "--output=all", "--devices=emulated:0.4,0.4"]
    process = subprocess.Popen(
        [*command, "--kinds=stop"], cwd=tmp_path, env=user_environment(tmp_path)
    )
    folder = WitnessFolder(tmp_path / "all" / "witness")
    try:
        wait_until(lambda: folder.poll() and folder.last_step() > 10, 120.0)
        workers = [s.hello.pid for s in folder.statements()]
        launcher = psutil.Process(workers[0]).parent()
        assert launcher is not None
        process.send_signal(number)
        process.wait(60)
        gone, alive = psutil.wait_procs(
            [launcher, *map(psutil.Process, filter(psutil.pid_exists, workers))], 60
        )
    finally:
        process.kill()
        process.wait()

    assert gone
    assert not alive


def wait_until(holds: Callable[[], bool], timeout_s: float) -> None:
    deadline_s = time.monotonic() + timeout_s
    tick = threading.Event()
    while not holds():
        assert time.monotonic() < deadline_s, f"not within {timeout_s} s"
        tick.wait(0.05)


@pytest.mark.timeout(400)
def test_training_survives_a_minute_of_chaos(tmp_path: Path) -> None:
    found = chaos(
        tmp_path,
        "--seed=1",
        "--duration=60",
        "--faults-per-s=0.7",
        PATIENT,
        timeout_s=390.0,
    )

    assert found["passed"], found["failures"]
    assert found["faults"] > 20


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_run_goes_on_where_all_its_workers_are_killed_at_once(tmp_path: Path) -> None:
    found = chaos(
        tmp_path,
        "--seed=3",
        "--duration=20",
        "--faults-per-s=0.1",
        "--kinds=kill_all",
        "--devices=emulated:0.4,0.4,0.4",
        PATIENT,
        timeout_s=290.0,
    )

    assert found["passed"], found["failures"]
    assert found["faults_by_kind"] == {"kill_all": 1}
    assert found["figures"]["steps_forward"]["restores"] == 1
    assert found["figures"]["weights"]["steps_differing"] == 0


@pytest.mark.slow
@pytest.mark.root
@pytest.mark.timeout(300)
def test_links_are_shaped_and_cut(tmp_path: Path) -> None:
    found = chaos(
        tmp_path,
        "--seed=5",
        "--duration=15",
        "--kinds=link",
        "--links=100Mbit",
        "--devices=emulated:0.4,0.4,0.4",
        PATIENT,
        timeout_s=290.0,
    )

    assert found["passed"], found["failures"]
    assert set(found["faults_by_kind"]) == {"link_slow", "link_cut"}


@pytest.mark.slow
@pytest.mark.root
@pytest.mark.timeout(300)
def test_disk_is_full_and_bits_are_turned(tmp_path: Path) -> None:
    found = chaos(
        tmp_path,
        "--seed=6",
        "--duration=15",
        "--kinds=disk",
        "--devices=emulated:0.4,0.4,0.4",
        PATIENT,
        timeout_s=290.0,
    )

    assert found["passed"], found["failures"]
    assert found["checks"]["bit_flips_found"] == "passed"
    assert (tmp_path / "all" / "run" / "run.json").exists()


@pytest.mark.slow
def test_deterministic_run_without_a_loss_is_repeated_bit_for_bit(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(ORDINARY_SCRIPT)
    found = chaos(
        tmp_path,
        "--seed=7",
        "--duration=5",
        "--kinds=stop",
        "--devices=emulated:0.4,0.4",
        "--deterministic",
        PATIENT,
        "train.py",
    )

    assert found["passed"], found["failures"]
    assert found["figures"]["weights"]["steps_differing"] == 0


@pytest.mark.slow
def test_ordinary_script_ends_close_to_one_device(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(ORDINARY_SCRIPT)
    found = chaos(
        tmp_path,
        "--seed=4",
        "--duration=4",
        "--faults-per-s=1",
        "--kinds=kill,stop",
        "--devices=emulated:0.4,0.4,0.4",
        PATIENT,
        "train.py",
    )

    assert found["passed"], found["failures"]


@pytest.mark.slow
@pytest.mark.parametrize("harm", ["weights", "sample"])
def test_member_that_goes_its_own_way_is_found_in_a_real_run(
    tmp_path: Path, harm: str
) -> None:
    (tmp_path / "train.py").write_text(HARMFUL_SCRIPT)
    with pytest.raises(AssertionError) as failed:
        chaos(
            tmp_path,
            "--duration=2",
            "--kinds=stop",
            "--devices=emulated:0.4,0.4",
            PATIENT,
            "train.py",
            harm,
        )

    found = read_document(tmp_path / "result.json", ChaosResult)
    wrong = {check.name for check in found.checks if check.status == "failed"}
    # A sample that one rank counts twice harms all alike: only one device tells.
    assert wrong == {"weights", "one_state_hash"} if harm == "weights" else {"weights"}
    assert "ended with 1" in str(failed.value)


ORDINARY_SCRIPT = """
import sys
import time
import torch
import geartrain as gt

def main():
    session = gt.Session(seed=3)
    model = torch.nn.Sequential(
        torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 4)
    )
    def losses(output, batch):
        time.sleep(0.003 * len(output))
        return torch.nn.functional.cross_entropy(output, batch[1], reduction="none")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    session.setup(model, optimizer, loss_fn=losses)
    dice = torch.Generator().manual_seed(1)
    data = torch.utils.data.TensorDataset(
        torch.randn(512, 8, generator=dice), torch.randint(0, 4, (512,), generator=dice)
    )
    loader = session.setup_dataloader(data, global_batch_size=32)
    while True:
        for batch in loader:
            session.step(batch)

main()
"""

HARMFUL_SCRIPT = ORDINARY_SCRIPT.replace(
    "def losses(output, batch):",
    """def losses(output, batch):
        if session.step_index >= 12 and session.rank == 1 and len(output):
            if sys.argv[1] == "sample":
                output = output.repeat(2, 1)
                batch = (batch[0], batch[1].repeat(2))
            elif sys.argv[1] == "weights":
                with torch.no_grad():
                    next(model.parameters())[0, 0] += 0.25""",
)


def test_kind_that_is_not_possible_is_refused_before_anything_starts(
    tmp_path: Path,
) -> None:
    with pytest.raises(AssertionError) as refused:
        chaos(tmp_path, "--kinds=kill,link", "--devices=emulated:0.3,0.3")

    assert "link_slow (the device's link at an eighth" in str(refused.value)
    assert "give --links" in str(refused.value)
    assert not (tmp_path / "all").exists()
