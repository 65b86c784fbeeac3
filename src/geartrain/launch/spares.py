"""Where a node's workers come from: forked, from a warm process, or started cold.

Importing torch takes seconds, more than all else that a worker needs to begin. One
process a node has done it already. Use it from one thread, the launcher's.
"""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Self

from geartrain.errors import CommunicationError
from geartrain.launch.processes import start_module
from geartrain.launch.spare_messages import StartWorker
from geartrain.launch.started_worker import OwnChild, StartedWorker
from geartrain.launch.warm_process import ForkingProcess, WaitingProcess, WarmProcess

logger = logging.getLogger(__name__)

CAN_FORK = sys.platform == "linux" and hasattr(os, "pidfd_open")
"""Elsewhere libraries of the system start threads, and nobody tells of an end."""

_FIRST_RESTART_S = 1.0
_MAX_RESTART_S = 60.0
_MAX_FAILURES = 5
"""What ends so often before it was warm is not started again."""

Output = int | IO[bytes]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerOrder:
    """What a worker process is to be."""

    spec: Path
    """Its ``worker-RANK.json``; written before it is let go."""
    script: Path
    arguments: tuple[str, ...] = ()
    threads: int | None = None
    """Threads of an operator, as emulated devices have one; None: torch decides.

    Only workers with a number are forked: the fork server has its pools for one thread.
    """
    namespace: str | None = None
    """The network namespace of the emulated host that it is on."""
    cgroup_files: tuple[str, ...] = ()
    """``cgroup.procs`` files that a forked or warm worker enters before all else; the
    launcher may also move it itself, once it is ready."""

    def worker_arguments(self, preload: Sequence[str]) -> tuple[str, ...]:
        """Arguments of ``geartrain.launch.worker`` behind the launcher's two."""
        options = [] if self.threads is None else [f"--threads={self.threads}"]
        if self.namespace is not None:
            options.append("--emulated-host")
        options += [f"--preload={name}" for name in preload]
        return (*options, str(self.spec), str(self.script), *self.arguments)


@dataclass(frozen=True, slots=True, kw_only=True)
class SpareSettings:
    """What is kept ready on a node."""

    preload: tuple[str, ...]
    """What workers import."""
    forks: bool = False
    """Keep a fork server, for workers with a fixed number of threads."""
    num_waiting: int = 0
    """Warm processes kept for all other workers, each of which becomes one of them."""
    emulated_hosts: bool = False
    """Workers are on hosts whose addresses have no names."""
    log_path: Path | None = None
    """Where warm processes say what went wrong before they were workers."""


def spares_for(kinds: Sequence[str], preload: Sequence[str]) -> SpareSettings:
    """What to keep ready on a node with devices of these kinds.

    A fork server for emulated devices, and one warm process for all others, since what
    holds an accelerator's runtime, or threads, can't be forked.

    >>> spares_for(["emulated", "emulated"], ["torch"]).num_waiting
    0
    >>> spares_for(["cuda", "cuda", "cpu"], ["torch"]).num_waiting
    1
    """
    return SpareSettings(
        preload=tuple(preload),
        forks=CAN_FORK and "emulated" in kinds,
        num_waiting=int(any(kind != "emulated" for kind in kinds)),
    )


def start_cold(
    order: WorkerOrder,
    preload: Sequence[str],
    channel: socket.socket,
    outputs: tuple[Output, Output],
    *,
    place: Callable[[Sequence[str]], Sequence[str]] = list,
) -> StartedWorker:
    """Start a worker as a new process; the arguments are those of ``Spares.start``."""
    process = start_module(
        "geartrain.launch.worker",
        [
            f"--launcher-fd={channel.fileno()}",
            f"--launcher-pid={os.getpid()}",
            *order.worker_arguments(preload),
        ],
        stdout=outputs[0],
        stderr=outputs[1],
        pass_fds=(channel.fileno(),),
        place=place,
    )
    return OwnChild(process)


class Spares:
    """Starts workers as fast as the node can; cold where nothing is warm.

    Call ``poll`` now and then: it notes what is warm and replaces what has ended.

    Args:
        settings: What to keep ready. The processes begin to warm up at once.
    """

    def __init__(self, settings: SpareSettings) -> None:
        self._settings = settings
        path = settings.log_path
        self._log = None if path is None else path.open("ab", buffering=0)
        self._num_orders = 0
        self._restarts = _Restarts()
        self._forking: ForkingProcess | None = None
        self._retired: list[ForkingProcess] = []  # with workers that still run
        self._waiting: list[WaitingProcess] = []
        self._fill()

    @property
    def can_fork(self) -> bool:
        """Whether a worker with a fixed number of threads would be forked now."""
        return self._forking is not None and self._forking.is_ready

    @property
    def num_waiting(self) -> int:
        """Warm processes that are ready to become a worker."""
        return sum(process.is_ready for process in self._waiting)

    @property
    def process_ids(self) -> tuple[int, ...]:
        """Of the warm processes; workers are not among them."""
        return tuple(process.pid for process in self._all())

    def poll(self) -> None:
        """Take what warm processes have said, and replace those that have ended."""
        was_warm = [process for process in self._all() if process.ready]
        for process in self._all():
            process.poll()
            if process.ready and process not in was_warm:
                self._restarts.note_success()
        for process in self._all():
            if not process.can_serve:
                self._retire(process)
        self._clear()
        self._fill()

    def start(
        self,
        order: WorkerOrder,
        channel: socket.socket,
        outputs: tuple[Output, Output],
        *,
        place: Callable[[Sequence[str]], Sequence[str]] = list,
        within_s: float = 5.0,
    ) -> StartedWorker:
        """Start a worker; it says READY on its end of the channel.

        Args:
            order: What it is to be.
            channel: The worker's end of a socket pair; the caller closes it.
            outputs: Its stdout and stderr: a file, its number, or ``subprocess.PIPE``.
            place: For a cold start: turns the command line into one that runs elsewhere.
            within_s: How long a warm process may take, before it is a cold start.

        Returns:
            The worker, in a session and process group of its own.
        """
        self.poll()
        warm = self._choose(order)
        if warm is not None:
            try:
                return self._start_warm(warm, order, channel, outputs, within_s)
            except CommunicationError as error:
                logger.warning("a worker is started cold, which takes longer: %s", error)
                self._restarts.note_failure()
                self._retire(warm)
        return start_cold(order, self._settings.preload, channel, outputs, place=place)

    def close(self) -> None:
        """End the warm processes. Forked workers end with them: end those before."""
        for process in self._all():
            process.close()
        self._forking, self._retired, self._waiting = None, [], []
        if self._log is not None:
            self._log.close()

    def _all(self) -> list[WarmProcess]:
        forking: list[WarmProcess] = [] if self._forking is None else [self._forking]
        return [*self._retired, *forking, *self._waiting]

    def _choose(self, order: WorkerOrder) -> WarmProcess | None:
        if order.threads is None:
            return next((p for p in self._waiting if p.is_ready), None)
        return self._forking if self.can_fork else None

    def _start_warm(
        self,
        warm: WarmProcess,
        order: WorkerOrder,
        channel: socket.socket,
        outputs: tuple[Output, Output],
        within_s: float,
    ) -> StartedWorker:
        self._num_orders += 1
        message = StartWorker(
            order_id=self._num_orders,
            arguments=order.worker_arguments(self._settings.preload),
            threads=order.threads,
            namespace=order.namespace,
            cgroup_files=order.cgroup_files,
            directory=str(Path.cwd()),
        )
        with _Pipes() as pipes:
            writers = [pipes.writer_of(output) for output in outputs]
            process_id = warm.request(message, (*writers, channel.fileno()), within_s)
            stdout, stderr = pipes.take_readers()
        if isinstance(warm, ForkingProcess):
            return warm.adopt(process_id, stdout, stderr)
        assert isinstance(warm, WaitingProcess), "there are only these two"
        self._waiting.remove(warm)
        return OwnChild(warm.hand_over(), "warm", stdout, stderr)

    def _retire(self, process: WarmProcess) -> None:
        """Use a process no more; one whose workers still run stays until they end."""
        if process.ready is None and not process.is_retired:
            self._restarts.note_failure()  # it ended while it warmed up
        process.is_retired = True
        if self._forking is not None and process is self._forking:
            self._retired.append(self._forking)
            self._forking = None
        elif isinstance(process, WaitingProcess) and process in self._waiting:
            self._waiting.remove(process)
            process.close()

    def _clear(self) -> None:
        for idle in [process for process in self._retired if process.is_done()]:
            self._retired.remove(idle)
            idle.close()

    def _fill(self) -> None:
        if not self._restarts.are_due:
            return
        if self._settings.forks and self._forking is None:
            self._forking = ForkingProcess(*self._launch())
        while len(self._waiting) < self._settings.num_waiting:
            self._waiting.append(WaitingProcess(*self._launch("--once")))

    def _launch(self, *options: str) -> tuple[subprocess.Popen[bytes], socket.socket]:
        ours, theirs = socket.socketpair()
        with theirs:
            process = start_module(
                "geartrain.launch.fork_server",
                [
                    f"--control-fd={theirs.fileno()}",
                    f"--owner-pid={os.getpid()}",
                    *options,
                    *(f"--preload={name}" for name in self._settings.preload),
                    *(["--emulated-hosts"] if self._settings.emulated_hosts else []),
                ],
                stdout=subprocess.DEVNULL,
                stderr=self._log or subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
            )
        return process, ours


class _Pipes:
    """Pipes to a worker that is asked for; what nobody took is closed."""

    def __enter__(self) -> Self:
        self._stack = ExitStack()
        self._readers: list[IO[bytes] | None] = []
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()
        for reader in self._readers:
            if reader is not None:
                reader.close()

    def writer_of(self, output: Output) -> int:
        """The file that a worker writes to, for what ``Popen`` would take."""
        if output == subprocess.PIPE:
            reading, writing = os.pipe()
            self._stack.callback(os.close, writing)
            self._readers.append(os.fdopen(reading, "rb"))
            return writing
        self._readers.append(None)
        if output == subprocess.DEVNULL:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            self._stack.callback(os.close, nowhere)
            return nowhere
        return output if isinstance(output, int) else output.fileno()

    def take_readers(self) -> tuple[IO[bytes] | None, ...]:
        """What reads from the pipes, None for an output that is no pipe."""
        taken, self._readers = tuple(self._readers), []
        return taken


class _Restarts:
    """When a warm process that has ended is replaced: later each time it fails."""

    def __init__(self) -> None:
        self._num_failures = 0
        self._due_at_s = 0.0

    @property
    def are_due(self) -> bool:
        return self._num_failures < _MAX_FAILURES and time.monotonic() >= self._due_at_s

    def note_success(self) -> None:
        self._num_failures = 0

    def note_failure(self) -> None:
        wait_s = min(_FIRST_RESTART_S * 2.0**self._num_failures, _MAX_RESTART_S)
        self._due_at_s = time.monotonic() + wait_s
        self._num_failures += 1
        if self._num_failures == _MAX_FAILURES:
            logger.warning(
                "%d warm processes failed in a row; workers are started cold from now on",
                _MAX_FAILURES,
            )
