"""``geartrain scale`` and ``geartrain nodes`` on a run that does as it is told."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from geartrain.cli import main
from running_run import RunningRun, device, view_of

FOUR = tuple(device(f"emulated:{i}", rank=i) for i in range(4))


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def last_json(result: Result) -> dict[str, object]:
    found = json.loads(result.stdout.splitlines()[-1])
    assert isinstance(found, dict)
    return found


def test_fewer_devices_are_asked_for_and_waited_for(tmp_path: Path) -> None:
    with RunningRun(tmp_path, view_of(*FOUR)):
        result = invoke("scale", tmp_path, "--devices", "-2", "--wait", 10)

    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines() == ["at the next step boundary", "done"]


def test_devices_can_be_named_and_the_answer_read_by_a_program(tmp_path: Path) -> None:
    with RunningRun(tmp_path, view_of(*FOUR)):
        result = invoke(
            "scale", tmp_path, "--devices", "emulated:0.25,0.25,0.25,0.25,0.5", "--json"
        )

    assert last_json(result) == {
        "run_dir": str(tmp_path),
        "message": "at the next step boundary",
        "added": ["emulated:4"],
        "removed": [],
        "is_done": False,
    }


@pytest.mark.parametrize("wrong", ["+0x2", "emulated:", "emulated:9", "nonsense:1", ""])
def test_wrong_devices_are_refused(tmp_path: Path, wrong: str) -> None:
    with RunningRun(tmp_path, view_of(*FOUR)) as run:
        result = invoke("scale", tmp_path, "--devices", wrong)

    assert result.exit_code == 2
    assert result.stderr.startswith("error: ")
    assert run.changes == []


def test_what_takes_too_long_is_named(tmp_path: Path) -> None:
    with RunningRun(tmp_path, view_of(*FOUR), is_slow=True):
        result = invoke("nodes", "drain", tmp_path, "emulated:1", "--wait", 0.2)

    assert result.exit_code == 1
    assert "not done after 0.2 s: emulated:1 (training); the run goes on" in result.stderr


def test_node_is_drained_but_never_below_the_fewest_devices(tmp_path: Path) -> None:
    devices = (device("cuda:0", node_id="a"), device("cuda:1", node_id="b"))
    with RunningRun(tmp_path, view_of(*devices)):
        first = invoke("nodes", "drain", tmp_path, "b", "--wait", 10)
        second = invoke("nodes", "drain", tmp_path, "a", "--json")

    assert first.exit_code == 0, first.output
    assert second.exit_code == 2
    assert "0 devices would be left, at least 1 must" in str(last_json(second)["error"])


def test_devices_are_listed_for_people_and_for_programs(tmp_path: Path) -> None:
    out = device("emulated:4", "out", reason="failed 7 times")
    with RunningRun(tmp_path, view_of(*FOUR, out, min_devices=2)):
        shown = invoke("nodes", "list", tmp_path)
        listed = last_json(invoke("nodes", "list", tmp_path, "--json"))

    assert shown.stdout.splitlines()[0].split()[:4] == ["device", "node", "state", "rank"]
    assert shown.stdout.splitlines()[-1].endswith("failed 7 times")
    devices = listed["devices"]
    assert isinstance(devices, list)
    assert (listed["run_id"], listed["min_devices"], len(devices)) == ("run-1", 2, 5)
    assert devices[4] == {
        "device_id": "emulated:4",
        "node_id": "here",
        "state": "out",
        "rank": None,
        "process_id": None,
        "num_failures": 0,
        "reason": "failed 7 times",
    }


@pytest.mark.parametrize(
    "command",
    [("nodes", "list"), ("nodes", "drain", "RUN", "a"), ("scale", "--devices", "+1")],
)
def test_run_that_is_over_or_absent_is_said_to_be(
    tmp_path: Path, command: tuple[str, ...]
) -> None:
    with RunningRun(tmp_path, view_of(*FOUR)):
        pass
    verb = list(command)
    place = verb.index("RUN") if "RUN" in verb else len(verb)
    for run, message in ((tmp_path, "is over"), (tmp_path / "absent", "no run at")):
        verb[place : place + 1] = [str(run)]
        result = invoke(*verb)

        assert result.exit_code == 2
        assert message in result.stderr
