"""The coordinator and its workers as real processes, that are killed and stopped."""

from __future__ import annotations

import contextlib
import os
import random
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import psutil
import pytest

from geartrain.elastic.address_file import CoordinatorAddress, read_address
from geartrain.elastic.journal import read_journal
from geartrain.elastic.limits import Limits
from geartrain.elastic.records import Committed
from geartrain.errors import CommunicationError

LIMIT_S = 60.0
WORKER = Path(__file__).parents[1] / "elastic_worker.py"


@dataclass
class Run:
    """A directory with a coordinator's files, and all processes of a test."""

    folder: Path
    limits: Limits
    arguments: tuple[str, ...] = ()
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def journal(self) -> Path:
        return self.folder / "journal"

    @property
    def address_file(self) -> Path:
        return self.folder / "address"

    def start(self) -> subprocess.Popen[bytes]:
        """Start a coordinator."""
        command = [
            *(sys.executable, "-m", "geartrain.elastic.process"),
            *("--journal", str(self.journal), "--run-id", "test"),
            *("--address-file", str(self.address_file)),
            *("--limits", msgspec.json.encode(self.limits).decode()),
            *self.arguments,
        ]
        with (self.folder / "log").open("ab") as log:
            process = subprocess.Popen(command, stderr=log)
        self.processes.append(process)
        return process

    def start_and_wait(self) -> subprocess.Popen[bytes]:
        process = self.start()
        _wait_until(lambda: self.address().process_id == process.pid)
        return process

    def address(self) -> CoordinatorAddress:
        try:
            return read_address(self.address_file)
        except CommunicationError:
            return CoordinatorAddress(host="", port=0, process_id=0)

    def log(self) -> str:
        return (self.folder / "log").read_text()

    def worker(self, name: str, place: int, step_s: float = 0.01) -> Worker:
        process = subprocess.Popen(
            [sys.executable, WORKER, name, str(place), self.address_file, str(step_s)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self.processes.append(process)
        return Worker(process)


@dataclass
class Worker:
    """A worker process and the steps that it has told."""

    process: subprocess.Popen[bytes]
    steps: list[tuple[int, str, int]] = field(default_factory=list)

    def read_until(self, step: int, epoch: int = 0) -> tuple[int, str, int]:
        """Wait until it has committed this step, in this epoch or a later one."""
        deadline_s = time.monotonic() + LIMIT_S
        stream = self.process.stdout
        assert stream is not None
        with selectors.DefaultSelector() as selector:
            selector.register(stream, selectors.EVENT_READ)
            while not self.steps or self.steps[-1][0] < step or self.steps[-1][2] < epoch:
                assert selector.select(deadline_s - time.monotonic()), self.steps[-3:]
                number, lineage, its_epoch = stream.readline().decode().split()
                self.steps.append((int(number), lineage, int(its_epoch)))
        return self.steps[-1]


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    found = Run(tmp_path, Limits(expected_members=3, rejoin_s=5.0, build_s=2.0))
    yield found
    for process in found.processes:
        process.kill()
        process.wait()
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                stream.close()


def _three(run: Run) -> list[Worker]:
    return [run.worker(name, place) for place, name in enumerate("abc")]


def test_it_starts_without_torch() -> None:
    code = "import sys, geartrain.elastic.process; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=LIMIT_S)


def test_a_worker_s_client_needs_no_torch() -> None:
    code = "import sys, geartrain.elastic.client; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=LIMIT_S)


def test_a_killed_worker_costs_the_others_no_step(run: Run) -> None:
    run.start_and_wait()
    workers = _three(run)
    for worker in workers:
        worker.read_until(5)
    workers[2].process.kill()
    before = max(w.steps[-1][0] for w in workers)
    for worker in workers[:2]:
        worker.read_until(before + 20, epoch=2)
    _check_histories(run, workers[:2])


def test_a_stopped_worker_is_dropped_after_its_limit_and_comes_back(run: Run) -> None:
    run.start_and_wait()
    workers = _three(run)
    for worker in workers:
        worker.read_until(30)
    os.kill(workers[1].process.pid, signal.SIGSTOP)
    _, _, epoch = workers[0].read_until(31, epoch=2)
    last, _, _ = workers[0].read_until(workers[0].steps[-1][0] + 20)
    assert "b: no sign of life" in run.log()
    os.kill(workers[1].process.pid, signal.SIGCONT)
    workers[1].read_until(last, epoch=epoch + 1)
    workers[0].read_until(last, epoch=epoch + 1)
    _check_histories(run, [workers[0], workers[2]])


@pytest.mark.parametrize("kills", [2, pytest.param(15, marks=pytest.mark.slow)])
def test_a_coordinator_that_is_killed_loses_and_doubles_no_step(
    run: Run, kills: int
) -> None:
    rng = random.Random(11)
    coordinator = run.start_and_wait()
    port = run.address().port
    workers = _three(run)
    reached, _, _ = workers[0].read_until(5)
    for _ in range(kills):
        threading.Event().wait(rng.uniform(0.0, 0.03))  # in any part of a step
        coordinator.kill()
        coordinator.wait()
        coordinator = run.start_and_wait()
        assert run.address().port == port
        for worker in workers:
            worker.read_until(reached + 5)
        reached = max(w.steps[-1][0] for w in workers)
    _check_histories(run, workers)
    assert "lost" not in run.log()


def _check_histories(run: Run, workers: list[Worker]) -> None:
    """Every step once, without gaps, the same on all, and as the journal has it."""
    journaled = {
        r.step: r.lineage for r in read_journal(run.journal) if isinstance(r, Committed)
    }
    for worker in workers:
        numbers = [step for step, _, _ in worker.steps]
        assert numbers == list(range(1, len(numbers) + 1))
        epochs = [epoch for _, _, epoch in worker.steps]
        assert epochs == sorted(epochs)
        for step, lineage, _ in worker.steps:
            assert journaled[step] == lineage


def test_a_second_coordinator_on_the_same_journal_is_refused(run: Run) -> None:
    first = run.start_and_wait()
    second = run.start()
    assert second.wait(LIMIT_S) == 1
    assert "another coordinator" in run.log()
    assert run.address().process_id == first.pid
    assert first.poll() is None


def test_it_ends_in_order_when_asked_to(run: Run) -> None:
    process = run.start_and_wait()
    process.terminate()
    assert process.wait(LIMIT_S) == 0


def test_it_dies_with_the_process_that_started_it(run: Run) -> None:
    code = (
        "import os, subprocess, sys, time\n"
        "subprocess.Popen([*sys.argv[1:], '--parent', str(os.getpid())])\n"
        "time.sleep(1000)"
    )
    command = [
        *(sys.executable, "-m", "geartrain.elastic.process"),
        *("--journal", str(run.journal), "--run-id", "test"),
        *("--address-file", str(run.address_file)),
    ]
    parent = subprocess.Popen([sys.executable, "-c", code, *command])
    run.processes.append(parent)
    _wait_until(lambda: run.address().process_id > 0)
    coordinator = psutil.Process(run.address().process_id)
    parent.kill()
    parent.wait()
    with contextlib.suppress(psutil.NoSuchProcess):
        coordinator.wait(LIMIT_S)


def test_a_token_that_others_may_read_is_refused(run: Run) -> None:
    token = run.folder / "token"
    token.write_text("0123456789abcdef0123456789abcdef")
    token.chmod(0o644)
    run.arguments = ("--token-file", str(token))
    assert run.start().wait(LIMIT_S) == 1
    assert "chmod 600" in run.log()
    assert "0123456789abcdef" not in run.log()


def test_beyond_loopback_without_a_token_it_does_not_start(run: Run) -> None:
    run.arguments = ("--host", "0.0.0.0")
    assert run.start().wait(LIMIT_S) == 1
    assert "token" in run.log()


def test_a_damaged_journal_is_an_error_that_names_the_line(run: Run) -> None:
    run.journal.write_bytes(b'{"crc":1,"record":{"type":"epoch_seen","epoch":3}}\n' * 2)
    assert run.start().wait(LIMIT_S) == 1
    assert "line 1" in run.log()


def _wait_until(is_true: Callable[[], bool], limit_s: float = LIMIT_S) -> None:
    deadline_s = time.monotonic() + limit_s
    while not is_true():
        assert time.monotonic() < deadline_s
        threading.Event().wait(0.01)
