"""``geartrain run`` as a program of its own, on small emulated fleets."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from example_fleets import emulated_fleet
from geartrain.telemetry import RunManifest, read_document, write_document

FLEET = "emulated:0.4,0.2"
# Writes what a session would have written, so that the summary has something to say.
SCRIPT = """
import json, os, sys
from pathlib import Path
sys.path.append({tests!r})
from example_runs import make_records, planned
from geartrain.telemetry import RunLogWriter
spec = json.load(open(os.environ["GEARTRAIN_WORKER_SPEC"]))
print("arguments", sys.argv[1:])
if "--fail" in sys.argv and spec["rank"] == 1:
    raise ValueError("boo")
if spec["rank"] == 0:
    log = RunLogWriter(Path(spec["run_dir"]))
    log.add_steps(make_records(12, shares=(8, 4), busy_s=(0.9, 0.9)))
    log.add_event(planned(bound=15.0))
"""


def geartrain(tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.format(tests=str(Path(__file__).parents[1])))
    return subprocess.run(
        [sys.executable, "-m", "geartrain.cli", *arguments],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


def test_run_hands_arguments_on_and_sums_up_in_json(tmp_path: Path) -> None:
    done = geartrain(
        tmp_path, "run", "--fleet", FLEET, "--json", "train.py", "--json", "-h", "--x=1"
    )

    *shown, last = done.stdout.splitlines()
    summary = json.loads(last)
    assert done.returncode == 0, done.stderr
    assert shown == ["arguments ['--json', '-h', '--x=1']"]
    assert (summary["outcome"], summary["exit_code"]) == ("finished", 0)
    assert summary["efficiency"] == pytest.approx(0.8)
    assert summary["load_balance_error"] == pytest.approx(0.0)
    run_dir = Path(summary["run_dir"])
    assert run_dir.parent == tmp_path / "runs"
    assert read_document(run_dir / "run.json", RunManifest).labels == ("emulated",)


def test_failing_rank_shows_its_traceback_first_and_the_error_last(tmp_path: Path) -> None:
    fleet_path = tmp_path / "fleet.json"
    write_document(fleet_path, emulated_fleet(0.4, 0.2))

    done = geartrain(
        tmp_path, "run", "--fleet", "fleet.json", "--run-dir", "r", "train.py", "--fail"
    )

    lines = [line for line in done.stderr.splitlines() if "[geartrain]" not in line]
    assert done.returncode == 1
    assert lines[0] == "Traceback (most recent call last):"
    assert "ValueError: boo" in lines
    assert lines[-1].startswith("error: rank 1 (emulated:1): ValueError: boo")
    assert (tmp_path / "r" / "failure-1.json").exists()


def test_script_without_a_session_is_told_that_it_made_no_step(tmp_path: Path) -> None:
    (tmp_path / "plain.py").write_text("print('hello')\n")

    done = geartrain(tmp_path, "run", "--fleet", FLEET, "plain.py")

    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0] == "hello"
    assert "no step was made: a script trains on the fleet by gt.Session" in done.stdout
