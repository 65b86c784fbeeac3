"""Control socket, respawning and warm processes together, as a launcher uses them."""

from __future__ import annotations

import os
import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from example_fleets import emulated_fleet
from geartrain.devices.profile import DeviceProfile
from geartrain.launch.control_messages import (
    Answer,
    DeviceState,
    DeviceStatus,
    DrainRequest,
    RunView,
    ScaleRequest,
)
from geartrain.launch.control_socket import ControlSocket, ask_run
from geartrain.launch.handshake import GO, READY
from geartrain.launch.respawn import (
    RespawnSettings,
    RespawnState,
    due_devices,
    left_out_devices,
    note_failure,
    note_leave,
    note_start,
    readmit,
)
from geartrain.launch.spares import Spares, SpareSettings, WorkerOrder
from geartrain.launch.started_worker import StartedWorker, end_workers
from geartrain.parallel.worker_spec import WorkerSpec
from geartrain.telemetry import write_document

SCRIPT = """
import json, os, signal, sys
from pathlib import Path
spec = json.load(open(os.environ["GEARTRAIN_WORKER_SPEC"]))
if (Path(spec["run_dir"]) / f"broken-{spec['rank']}").exists():
    os.kill(os.getpid(), signal.SIGKILL)
signal.signal(signal.SIGUSR1, lambda *_: sys.exit(0))  # asked to leave
while True:
    signal.pause()
"""
SETTINGS = RespawnSettings(first_wait_s=0.05, max_wait_s=0.2, max_device_failures=3)


class Driver:
    """A worker a device; the lost come back, the asked leave, others join."""

    def __init__(self, folder: Path, num_devices: int) -> None:
        self.folder = folder
        self.profiles = list(emulated_fleet(*[0.1] * num_devices).devices)
        write_document(folder / "fleet.json", emulated_fleet(*[0.1] * 8))
        (folder / "train.py").write_text(SCRIPT)
        self.workers: dict[str, tuple[StartedWorker, socket.socket]] = {}
        self.training: set[str] = set()
        self.draining: set[str] = set()
        self.started: list[tuple[str, str]] = []
        self.state = RespawnState()
        self.spares = Spares(SpareSettings(preload=(), forks=True))
        self.control = ControlSocket(folder, self.view())

    def begin(self) -> None:
        self.run_until(lambda: self.spares.can_fork)
        for profile in self.profiles:
            self.state = readmit(self.state, profile.device_id, time.monotonic())
        self.run_until(lambda: len(self.training) == len(self.profiles))

    def tick(self) -> None:
        self.spares.poll()
        self._take_requests()
        for device_id in due_devices(self.state, time.monotonic()):
            self.state = note_start(self.state, device_id)
            self._start(device_id)
        for device_id, (worker, channel) in list(self.workers.items()):
            if device_id not in self.training:
                self._let_go(device_id, channel)
            if worker.peek_exit_code() is not None:
                self._note_end(device_id, worker)
        self.control.update(self.view())

    def view(self) -> RunView:
        return RunView(
            run_id="run",
            devices=tuple(self._status(profile) for profile in self.profiles),
            cores=2.0,
            min_devices=2,
        )

    def _status(self, profile: DeviceProfile) -> DeviceStatus:
        name = profile.device_id
        left_out = left_out_devices(self.state).get(name, "")
        state: DeviceState = "starting" if name in self.workers else "waiting"
        if name in self.training:
            state = "training"
        if name in self.draining:
            state = "draining"
        return DeviceStatus(
            profile=profile, state="out" if left_out else state, reason=left_out
        )

    def _take_requests(self) -> None:
        for change in self.control.poll():
            for profile in change.add:
                if profile.device_id not in {p.device_id for p in self.profiles}:
                    self.profiles.append(profile)
                self.state = readmit(self.state, profile.device_id, time.monotonic())
            for device_id in change.remove:
                self.draining.add(device_id)
                os.kill(self.workers[device_id][0].pid, signal.SIGUSR1)
            self.control.update(self.view())
            self.control.answer(change, "at the next step boundary")

    def _start(self, device_id: str) -> None:
        rank = int(device_id.partition(":")[2])
        spec = WorkerSpec(
            rank=rank,
            world_size=8,
            fleet_path=str(self.folder / "fleet.json"),
            run_dir=str(self.folder),
        )
        path = self.folder / f"worker-{rank}.json"
        write_document(path, spec)
        order = WorkerOrder(spec=path, script=self.folder / "train.py", threads=1)
        ours, theirs = socket.socketpair()
        with theirs, (self.folder / f"worker-{rank}.log").open("ab") as log:
            worker = self.spares.start(order, theirs, (log, log))
        self.workers[device_id] = (worker, ours)
        self.started.append((device_id, worker.way))

    def _let_go(self, device_id: str, channel: socket.socket) -> None:
        if select.select([channel], [], [], 0)[0] and channel.recv(1) == READY:
            channel.sendall(GO)
            self.training.add(device_id)

    def _note_end(self, device_id: str, worker: StartedWorker) -> None:
        exit_code = worker.peek_exit_code()
        end_workers([worker], grace_s=0.0)
        self.workers.pop(device_id)[1].close()
        self.training.discard(device_id)
        if device_id in self.draining:
            self.draining.discard(device_id)
            self.state = note_leave(self.state, device_id, "drained")
        else:
            now_s = time.monotonic()
            reason = f"ended with {exit_code}"
            self.state = note_failure(self.state, SETTINGS, device_id, now_s, reason)

    def close(self) -> None:
        end_workers([worker for worker, _ in self.workers.values()], grace_s=0.0)
        for _, channel in self.workers.values():
            channel.close()
        self.spares.close()
        self.control.close()

    def run_until(self, condition: Callable[[], bool], within_s: float = 60.0) -> None:
        deadline_s = time.monotonic() + within_s
        while not condition():
            assert time.monotonic() < deadline_s, (self.view(), self.state)
            self.tick()
            select.select([], [], [], 0.002)

    def ask(self, request: ScaleRequest | DrainRequest) -> Answer:
        """Ask as a client does, while this goes on."""
        answers: list[Answer] = []
        asking = threading.Thread(
            target=lambda: answers.append(ask_run(self.folder, request, within_s=30))
        )
        asking.start()
        self.run_until(lambda: not asking.is_alive())
        return answers[0]


@pytest.fixture
def driver(tmp_path: Path) -> Iterator[Driver]:
    driver = Driver(tmp_path, 3)
    try:
        driver.begin()
        yield driver
    finally:
        driver.close()


def test_lost_worker_comes_back_from_the_fork_server(driver: Driver) -> None:
    lost, _ = driver.workers["emulated:1"]
    os.kill(lost.pid, signal.SIGKILL)

    driver.run_until(lambda: "emulated:1" not in driver.training)
    driver.run_until(lambda: "emulated:1" in driver.training)

    assert driver.started[-1] == ("emulated:1", "forked")
    assert driver.state.records["emulated:1"].num_failures == 1
    assert driver.state.records["emulated:1"].reason == "ended with -9"


def test_device_that_keeps_failing_is_left_out_and_comes_back_when_asked_for(
    driver: Driver, tmp_path: Path
) -> None:
    (tmp_path / "broken-2").touch()
    os.kill(driver.workers["emulated:2"][0].pid, signal.SIGKILL)
    driver.run_until(lambda: "emulated:2" in left_out_devices(driver.state))
    num_starts = sum(name == "emulated:2" for name, _ in driver.started)

    (tmp_path / "broken-2").unlink()
    answer = driver.ask(ScaleRequest(change=1))
    driver.run_until(lambda: "emulated:2" in driver.training)

    assert num_starts == 1 + SETTINGS.max_device_failures
    assert answer.added == ("emulated:2",)


def test_run_grows_shrinks_and_keeps_what_it_must(driver: Driver) -> None:
    grown = driver.ask(ScaleRequest(change=2))
    driver.run_until(lambda: len(driver.training) == 5)
    drained = driver.ask(DrainRequest(target="emulated:0"))
    driver.run_until(lambda: "emulated:0" not in driver.workers)

    assert grown.added == ("emulated:3", "emulated:4")
    assert drained.removed == ("emulated:0",)
    assert driver.state.num_failures == 0, "leaving is no failure"
    assert driver.view().devices[0].reason == "drained"


def test_fork_server_that_is_killed_costs_its_workers_a_restart(driver: Driver) -> None:
    (server_id,) = driver.spares.process_ids

    os.kill(server_id, signal.SIGKILL)

    driver.run_until(lambda: not driver.training)
    driver.run_until(lambda: len(driver.training) == 3)
    assert driver.state.num_failures == 3
    assert {record.reason for record in driver.state.records.values()} == {"ended with -9"}
