"""``geartrain run --resume``: a run whose launcher was killed, and one that was stopped."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from geartrain.telemetry import RunLogReader
from run_command import user_environment

TESTS = Path(__file__).parents[1]
NEVER = 1000


def train(
    folder: Path,
    name: str,
    *options: str,
    fleet: str = "emulated:0.9,0.6",
    end_after: int = NEVER,
) -> subprocess.CompletedProcess[str]:
    """Run the script; its result is ``name.json``."""
    command = [
        *(sys.executable, "-m", "geartrain.cli", "run", "--deterministic"),
        *("--fleet", fleet, "--run-dir", name, *options),
        *(str(TESTS / "resumed_script.py"), f"{name}.json", str(end_after)),
    ]
    environment = user_environment(folder) | {"PYTHONPATH": str(TESTS)}
    return subprocess.run(
        command,
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )


def result_of(folder: Path, name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / f"{name}.json").read_text())
    return found


def test_a_killed_run_goes_on_from_its_last_save_as_if_nothing_had_happened(
    tmp_path: Path,
) -> None:
    done = train(tmp_path, "whole", "--save-every", "never")
    assert done.returncode == 0, done.stderr
    killed = train(tmp_path, "killed", "--save-every", "4steps", end_after=6)
    assert killed.returncode == -9, killed.stderr
    assert not (tmp_path / "killed.json").exists()

    done = train(tmp_path, "resumed", "--resume", "killed", "--keep", "1")

    assert done.returncode == 0, done.stderr
    whole, resumed = result_of(tmp_path, "whole"), result_of(tmp_path, "resumed")
    assert resumed["first"] == 4
    assert resumed["losses"] == whole["losses"][4:]
    assert resumed["parameters"] == whole["parameters"]
    assert resumed["lr"] == whole["lr"]
    assert "differs from the run before: arguments[0]" in done.stderr
    reader = RunLogReader(tmp_path / "resumed")
    events = reader.new_events()
    reader.close()
    assert [event.step for event in events if event.kind == "resumed"] == [4]
    assert (tmp_path / "resumed/checkpoints").exists() is False  # 5 min did not pass
    assert not (tmp_path / "whole/checkpoints").exists()


@pytest.mark.slow
def test_a_run_goes_on_with_another_number_of_devices(tmp_path: Path) -> None:
    whole = train(tmp_path, "whole", "--save-every", "never")
    assert whole.returncode == 0, whole.stderr
    killed = train(tmp_path, "killed", "--save-every", "4steps", end_after=6)
    assert killed.returncode == -9, killed.stderr
    done = train(tmp_path, "resumed", "--resume", "killed", fleet="emulated:0.6,0.5,0.4")

    assert done.returncode == 0, done.stderr
    expected = result_of(tmp_path, "whole")
    assert result_of(tmp_path, "resumed")["losses"] == pytest.approx(
        expected["losses"][4:], rel=1e-9
    )


def test_there_must_be_something_to_go_on_from(tmp_path: Path) -> None:
    done = train(tmp_path, "resumed", "--resume", "nowhere")

    assert done.returncode == 2
    assert "there is no folder nowhere" in done.stderr
    assert not (tmp_path / "resumed").exists()


@pytest.mark.parametrize("option", ["--save-every", "--durable-every", "--weights-every"])
def test_how_often_must_be_a_time_or_steps(tmp_path: Path, option: str) -> None:
    done = train(tmp_path, "run", option, "5parsecs")

    assert done.returncode == 2
    assert "'5parsecs' says not how often; write 30s" in done.stderr
