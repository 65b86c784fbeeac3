"""The digits example reaches its accuracy, on one device and on an uneven fleet."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from run_command import EXAMPLES, run_command

SCRIPT = EXAMPLES / "train_digits.py"


def accuracy_in(output: str) -> float:
    return float(json.loads(output.splitlines()[-1])["accuracy"])


def test_one_device_reads_digits(tmp_path: Path) -> None:
    output = run_command("python", SCRIPT, "--epochs", "4", "--json", cwd=tmp_path)

    assert accuracy_in(output) > 0.95


@pytest.mark.slow
def test_uneven_fleet_reads_digits(tmp_path: Path) -> None:
    output = run_command(
        *("geartrain", "run", "--fleet", "emulated:0.8,0.4,0.2", SCRIPT, "--epochs", "4"),
        cwd=tmp_path,
    )

    accuracy = float(output.rpartition("test accuracy: ")[2].split()[0])
    assert accuracy > 0.95
