"""An average of weights goes with its steps: to a worker that comes back, and on disk."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from geartrain.checkpoint.chunk_store import FileStore
from geartrain.checkpoint.versions import list_versions, read_version
from run_command import run_command
from tracked_script import STEPS_TOGETHER

TESTS = Path(__file__).parents[1]
FLEET = "emulated:0.5,0.5,0.5"


def train(folder: Path, name: str, victim: int, *options: str) -> list[dict[str, Any]]:
    """Run the script; returns what each rank found in the end."""
    results = folder / f"results-{name}"
    results.mkdir()
    run_command(
        *(sys.executable, "-m", "geartrain.cli", "run", "--fleet", FLEET),
        *("--run-dir", name, "--save-every", "4steps", *options),
        *(TESTS / "tracked_script.py", results, str(victim)),
        cwd=folder,
    )
    return [json.loads((results / f"{rank}.json").read_text()) for rank in range(3)]


@pytest.mark.slow
@pytest.mark.parametrize("victim", [1, 0])
def test_a_worker_that_comes_back_has_the_average_of_all_steps(
    tmp_path: Path, victim: int
) -> None:
    found = train(tmp_path, "run", victim)

    for one in found:
        assert one["step"] == one["num_averaged"] == found[0]["step"]
        assert one["ema"] == found[0]["ema"]
        assert one["weights"] == found[0]["weights"]
    assert found[victim]["first"] > 0  # it joined a run under way

    store = FileStore(tmp_path / "run/checkpoints")
    versions = [read_version((store,), name) for name in list_versions(store)]
    assert all(len(bytes.fromhex(v.manifest.lineage)) == 16 for v in versions)
    newest = max(version.manifest.step for version in versions)

    again = train(tmp_path, "resumed", -1, "--resume", "run")

    for one in again:
        assert one["first"] == one["num_averaged_at_first"] == newest
        assert one["num_averaged"] == one["step"] == newest + STEPS_TOGETHER
        assert one["ema"] == again[0]["ema"]
