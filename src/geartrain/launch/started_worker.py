"""A worker process, however it was started: forked, from a warm process, or cold."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import IO, Literal, Protocol

from geartrain.launch.processes import TERMINATE_GRACE_S, peek_exit_code

Way = Literal["forked", "warm", "cold"]

_POLL_S = 0.02


class StartedWorker(Protocol):
    """A process in a group of its own, whose number stays its own until ``reap``."""

    way: Way
    pid: int
    stdout: IO[bytes] | None
    """Reads what it prints, where a pipe was asked for."""
    stderr: IO[bytes] | None

    def peek_exit_code(self) -> int | None:
        """How it ended, minus the signal if one ended it; None while it runs."""

    def signal_group(self, number: int) -> None:
        """Signal it and all it started; one that is gone is passed over."""

    def reap(self) -> None:
        """Let the kernel forget it, which has ended or was just killed."""


class OwnChild:
    """A worker that is a child of this process.

    Args:
        process: In a session of its own, see ``processes.start_module``.
        way: ``cold``, or ``warm`` where it was kept ready.
        stdout: Reads what it prints; the process's own pipe where None.
        stderr: The same for its errors.
    """

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        way: Way = "cold",
        stdout: IO[bytes] | None = None,
        stderr: IO[bytes] | None = None,
    ) -> None:
        self._process = process
        self.way: Way = way
        self.pid = process.pid
        self.stdout = stdout or process.stdout
        self.stderr = stderr or process.stderr

    def peek_exit_code(self) -> int | None:
        """How it ended; None while it runs."""
        return peek_exit_code(self._process)

    def signal_group(self, number: int) -> None:
        """Signal it and all it started."""
        if self._process.returncode is None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, number)

    def reap(self) -> None:
        """Wait for it."""
        self._process.wait()


def end_workers(
    workers: Sequence[StartedWorker], grace_s: float = TERMINATE_GRACE_S
) -> None:
    """End workers and all they started: SIGTERM, a grace, SIGKILL; then reap.

    As ``processes.end_groups``, for workers that need not be children of this process.
    """
    running = [worker for worker in workers if worker.peek_exit_code() is None]
    for worker in running:
        worker.signal_group(signal.SIGTERM)
        worker.signal_group(signal.SIGCONT)  # duty cycling may have stopped it
    if running:
        time.sleep(_POLL_S)
    for worker in running:  # it takes the first one for a request to leave in order
        worker.signal_group(signal.SIGTERM)
    deadline_s = time.monotonic() + grace_s
    while time.monotonic() < deadline_s and any(
        worker.peek_exit_code() is None for worker in running
    ):
        time.sleep(_POLL_S)
    for worker in workers:
        worker.signal_group(signal.SIGKILL)
    for worker in workers:
        worker.reap()
