"""Runs as users start them, whose devices, coordinator and launcher come and go."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from geartrain.elastic.address_file import read_address
from geartrain.launch.coordinator_process import ADDRESS_NAME
from geartrain.telemetry import RunLogReader
from run_command import run_command, user_environment

TESTS = Path(__file__).parents[1]
DEADLINE_S = 180.0


class Running:
    """A run that goes on until it is stopped."""

    def __init__(self, folder: Path, fleet: str) -> None:
        self.folder = folder
        self.run_dir = folder / "run"
        self._said = (folder / "said.txt").open("wb")
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-m", "geartrain.cli", "run", "--fleet", fleet),
                *("--run-dir", "run", str(TESTS / "endless_script.py")),
            ],
            cwd=folder,
            env=user_environment(folder) | {"PYTHONPATH": str(TESTS)},
            stdout=self._said,
            stderr=subprocess.STDOUT,
        )

    def said(self) -> str:
        return (self.folder / "said.txt").read_text(errors="replace")

    def wait_until(self, condition: Callable[[], bool]) -> None:
        deadline_s = time.monotonic() + DEADLINE_S
        while not condition():
            assert self.process.poll() is None, self.said()
            assert time.monotonic() < deadline_s, self.said()
            select.select([], [], [], 0.01)

    def wait_for_steps(self, num_steps: int = 5) -> None:
        """Wait until so many more steps are recorded."""
        first = self.num_steps()
        self.wait_until(lambda: self.num_steps() >= first + num_steps)

    def num_steps(self) -> int:
        try:
            records = RunLogReader(self.run_dir).new_steps()
        except OSError:
            return 0
        return len({record.step for record in records})

    def kinds(self) -> list[tuple[str, str]]:
        """Who came and went, in order."""
        events = RunLogReader(self.run_dir).new_events()
        return [
            (e.kind, e.device_id) for e in events if e.kind in {"lost", "left", "joined"}
        ]

    def command(self, *arguments: str) -> str:
        return run_command("geartrain", *arguments, cwd=self.folder)

    def worker(self, rank: int) -> psutil.Process:
        """The first process of a rank."""
        name = f"worker-{rank}.json"
        for child in psutil.Process(self.process.pid).children():
            if any(part.endswith(name) for part in child.cmdline()):
                return child
        msg = f"no worker of rank {rank}"
        raise AssertionError(msg)

    def kill_coordinator(self) -> None:
        """Kill it, and wait until the next one serves."""
        path = self.run_dir / ADDRESS_NAME
        before = read_address(path).process_id
        os.kill(before, signal.SIGKILL)
        self.wait_until(lambda: read_address(path).process_id != before)

    def stop(self) -> int:
        """Stop it in order; its exit code."""
        self.process.send_signal(signal.SIGINT)
        return self.process.wait(timeout=DEADLINE_S)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self._said.close()


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Running]:
    running = Running(tmp_path, "emulated:0.5,0.5,0.4")
    try:
        running.wait_for_steps()
        yield running
    finally:
        running.close()


@pytest.mark.slow
def test_devices_leave_come_back_and_join_without_a_failed_step(running: Running) -> None:
    running.command("nodes", "drain", "run", "emulated:1", "--wait", "60")
    running.wait_for_steps()
    running.command("scale", "run", "--devices", "+1", "--wait", "100")
    running.command("scale", "run", "--devices", "+1", "--wait", "100")
    shown = running.command("nodes", "list", "run")
    running.wait_for_steps()
    running.command("scale", "run", "--devices", "-2", "--wait", "60")
    running.wait_for_steps()

    assert running.stop() == 130
    assert shown.count("training") == 4
    assert running.kinds()[:3] == [
        ("left", "emulated:1"),
        ("joined", "emulated:1"),
        ("joined", "emulated:3"),
    ]
    assert sorted(running.kinds()[3:]) == [("left", "emulated:2"), ("left", "emulated:3")]


@pytest.mark.slow
def test_run_outlives_its_coordinator(running: Running) -> None:
    for _ in range(2):
        running.kill_coordinator()
        running.wait_for_steps()

    assert running.stop() == 130
    assert running.said().count("the coordinator died (by signal 9), started again") == 2
    assert running.kinds() == []


@pytest.mark.slow
def test_launcher_that_is_killed_leaves_no_process_behind(running: Running) -> None:
    running.worker(1).kill()
    running.wait_until(lambda: "emulated:1 joined" in running.said())
    started = psutil.Process(running.process.pid).children(recursive=True)
    names = " ".join(" ".join(child.cmdline()) for child in started)

    running.process.kill()

    _, alive = psutil.wait_procs(started, timeout=30)
    assert "fork_server" in names
    assert "elastic.process" in names
    assert not alive
