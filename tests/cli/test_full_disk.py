"""``geartrain run`` in a run directory whose disk fills up."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from full_disk_script import FULL_FROM, FULL_UNTIL
from geartrain.parallel.resume import find_resumable
from run_command import user_environment
from small_disk import small_disk

TESTS = Path(__file__).parents[1]


@pytest.mark.root
@pytest.mark.slow
def test_training_goes_on_though_the_disk_of_its_run_is_full(tmp_path: Path) -> None:
    with small_disk(tmp_path, "14m") as disk:
        done = subprocess.run(
            [
                *(sys.executable, "-m", "geartrain.cli", "run"),
                *("--fleet", "emulated:0.5,0.5", "--run-dir", str(disk / "run")),
                *("--save-every", "2steps", str(TESTS / "full_disk_script.py")),
                str(disk / "filler"),
            ],
            cwd=tmp_path,
            env=user_environment(tmp_path) | {"PYTHONPATH": str(TESTS)},
            capture_output=True,
            text=True,
            timeout=150,
            check=False,
        )

        assert done.returncode == 0, done.stderr
        shown = done.stdout + done.stderr
        assert "No space left on device" in shown
        assert "could not be saved" in shown
        assert "the store works again" in shown
        assert "the coordinator died" not in shown
        assert find_resumable(str(disk / "run")).spec.step > FULL_UNTIL > FULL_FROM
