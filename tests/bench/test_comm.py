"""``geartrain bench comm`` as a user runs it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from geartrain.bench.comm import run
from geartrain.bench.comm.result import CaseResult
from geartrain.bench.comm.run import run_comm
from geartrain.bench.comm.settings import CASES, CommOptions
from geartrain.devices.emulation.network import missing_for_networks, sweep_networks
from geartrain.devices.emulation.network.namespaces import NAMESPACES_DIR
from run_command import run_command, user_environment

needs_networks = pytest.mark.skipif(
    missing_for_networks() is not None, reason=f"needs {missing_for_networks()}"
)
_DEADLINE_S = 60.0


def _says(_: str) -> None:
    """Progress is for people."""


def test_without_root_all_but_the_same_host_is_skipped_and_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said: list[str] = []
    same_host = CaseResult(case="same_host", seconds=0.1)
    monkeypatch.setattr(run, "missing_for_networks", lambda: "root (user id 7)")
    monkeypatch.setitem(run.__dict__["_OTHERS"], "same_host", lambda _: same_host)

    result = run_comm(CommOptions(), said.append)

    assert [case.case for case in result.cases] == list(CASES)
    measured = [case.case for case in result.cases if not case.skipped]
    assert measured == ["same_host"]
    assert "racks2: skipped, needs root (user id 7)" in said


@pytest.mark.slow
@pytest.mark.root
@needs_networks
def test_quick_run_measures_checks_and_leaves_nothing(tmp_path: Path) -> None:
    printed = run_command(
        "geartrain", "bench", "comm", "--quick", "--json", cwd=tmp_path, timeout_s=120
    )

    result = json.loads(printed.splitlines()[-1])
    (case,) = result["cases"]
    assert case["case"] == "racks2"
    assert case["failures"] == []
    # How good it is, the benchmark says; a machine that runs tests is too busy for that.
    assert case["ratio_to_best_ring"] > 0
    assert case["racks_found"] is True
    assert set(case["uplink_bytes"]) == {"rack0", "rack1"}
    assert min(case["uplink_bytes"].values()) >= case["num_bytes"]
    assert result["labels"] == "emulated"
    assert _orphans() == []


@pytest.mark.slow
@pytest.mark.root
@needs_networks
def test_other_lab_with_uneven_racks_and_codes(tmp_path: Path) -> None:
    lab = ["--racks", "1+3", "--uplink", "40Mbit", "--nic", "200Mbit", "--seed", "4"]

    printed = run_command(
        *["geartrain", "bench", "comm", *lab, "--size", "1MB", "--json"], cwd=tmp_path
    )

    cases = {case["case"]: case for case in json.loads(printed.splitlines()[-1])["cases"]}
    assert set(cases) == {"racks2", "racks2_int8", "racks2_int4", "small_64k"}
    assert all(case["failures"] == [] for case in cases.values())
    assert cases["racks2"]["ratio_to_given_ring"] is not None
    assert cases["racks2"]["stock_hierarchy_s"] is None  # it needs equal racks
    exact, coded = cases["racks2"]["uplink_bytes"], cases["racks2_int8"]["uplink_bytes"]
    assert all(coded[rack] < 0.4 * exact[rack] for rack in exact)


@pytest.mark.slow
def test_processes_of_one_host_share_memory() -> None:
    (case,) = run_comm(CommOptions(only=("same_host",)), _says).cases

    assert case.failures == ()
    assert case.figures["num_hosts"] == 1
    assert case.ratio_to_best_ring is not None


@pytest.mark.slow
@pytest.mark.root
@needs_networks
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_interrupted_run_leaves_no_process_and_no_namespace(
    tmp_path: Path, number: signal.Signals
) -> None:
    command = [str(Path(sys.executable).with_name("geartrain")), "bench", "comm"]
    with subprocess.Popen(
        [*command, "--only", "racks2"],
        cwd=tmp_path,
        env=user_environment(tmp_path),
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        assert process.stderr is not None
        while "found 8 hosts" not in process.stderr.readline():
            assert process.poll() is None
        group = process.pid
        os.kill(process.pid, number)
        # Its workers hold the pipe: it ends when the last one has.
        process.stderr.read()

    assert process.returncode == (130 if number == signal.SIGINT else -signal.SIGKILL)
    deadline_at_s = time.monotonic() + _DEADLINE_S
    while _is_alive(group) and time.monotonic() < deadline_at_s:
        os.sched_yield()
    assert not _is_alive(group)
    sweep_networks()
    assert _orphans() == []


def _orphans() -> list[str]:
    """Namespaces of labs whose owner is gone; other labs may run beside this test."""
    names = [path.name for path in NAMESPACES_DIR.glob("geartrain-*")]
    return [name for name in names if not Path("/proc", name.split("-")[1]).exists()]


def _is_alive(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True
