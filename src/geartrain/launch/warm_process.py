"""The launcher's side of processes that are kept warm, and of workers forked from them."""

from __future__ import annotations

import logging
import os
import select
import signal
import socket
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

from geartrain.errors import CommunicationError
from geartrain.launch.processes import end_groups
from geartrain.launch.spare_messages import (
    Message,
    MessageChannel,
    ReapWorker,
    SpareReady,
    StartWorker,
    WorkerEnded,
    WorkerRefused,
    WorkerStarted,
)
from geartrain.launch.started_worker import Way

logger = logging.getLogger(__name__)

_SEND_S = 1.0
_REAP_S = 5.0
"""How long a killed worker may take to end; the kernel needs milliseconds."""
_TOLD_S = 1.0
"""How long the fork server may take to say how a worker ended."""
_EXIT_CODE_FIELD = 49
"""Field 52 of ``/proc/PID/stat`` (exit_code), counted from behind the name."""


class WarmProcess:
    """A process that has imported what workers need.

    Args:
        process: Runs ``geartrain.launch.fork_server``.
        end: The launcher's end of the socket pair to it.
    """

    def __init__(self, process: subprocess.Popen[bytes], end: socket.socket) -> None:
        self._process = process
        self._channel = MessageChannel(end)
        self._ready: SpareReady | None = None
        self._answers: dict[int, WorkerStarted | WorkerRefused] = {}
        self.is_retired = False
        """It is asked for nothing any more."""
        self.pid = process.pid

    @property
    def can_serve(self) -> bool:
        """Whether it is there, warm or about to be."""
        return not self.is_retired and not self._channel.has_ended

    @property
    def is_ready(self) -> bool:
        """Whether it has imported all."""
        return self.can_serve and self._ready is not None

    @property
    def ready(self) -> SpareReady | None:
        """What it said when it was ready."""
        return self._ready

    def poll(self, within_s: float = 0.0) -> None:
        """Take what it has said, waiting for the first message if need be."""
        if self._channel.has_ended:
            return
        try:
            for message, _ in self._channel.receive(within_s):
                self._take(message)
        except CommunicationError as error:
            logger.warning("process %d is used no more: %s", self.pid, error)
            self.is_retired = True

    def request(self, order: StartWorker, files: Sequence[int], within_s: float) -> int:
        """Have it fork or become a worker.

        Args:
            order: What the worker is to be.
            files: What becomes its stdout, its stderr, its socket to the launcher.
            within_s: Deadline.

        Returns:
            The worker's process id.

        Raises:
            CommunicationError: If it can't, or does not answer in time. There is no
                worker then, and there will be none.
        """
        claim = _Claim()
        try:
            self._channel.send(order, (*files, claim.file), within_s=_SEND_S)
            answer = self._wait_for_answer(order.order_id, within_s)
            if answer is None and not claim.withdraw():
                answer = self._wait_for_answer(order.order_id, within_s)
                if answer is None:  # a worker begins, and nobody knows which process
                    self.kill()
        except CommunicationError:
            claim.withdraw()
            raise
        finally:
            claim.close()
        if isinstance(answer, WorkerStarted):
            return answer.process_id
        said = answer.reason if answer else f"no answer within {within_s:g} s"
        msg = f"process {self.pid} started no worker: {said}"
        raise CommunicationError(msg)

    def is_done(self) -> bool:
        """Whether nothing depends on it any more."""
        return True

    def kill(self) -> None:
        """End it at once."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    def close(self) -> None:
        """End it and take it away."""
        self._channel.close()
        end_groups([self._process], grace_s=0.0)

    def _wait_for_answer(
        self, order_id: int, within_s: float
    ) -> WorkerStarted | WorkerRefused | None:
        deadline_s = time.monotonic() + within_s
        while order_id not in self._answers and self.can_serve:
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                return None
            self.poll(left_s)
        return self._answers.pop(order_id, None)

    def _take(self, message: Message) -> None:
        if isinstance(message, SpareReady):
            self._ready = message
        elif isinstance(message, WorkerStarted | WorkerRefused):
            self._answers[message.order_id] = message


class WaitingProcess(WarmProcess):
    """Becomes the one worker that it is asked for."""

    def hand_over(self) -> subprocess.Popen[bytes]:
        """Give the process away: it is the worker now."""
        self.is_retired = True
        self._channel.close()
        return self._process


class ForkingProcess(WarmProcess):
    """Forks workers, and says how they ended. They end with it."""

    def __init__(self, process: subprocess.Popen[bytes], end: socket.socket) -> None:
        super().__init__(process, end)
        self._told: dict[int, int] = {}
        self._workers: list[ForkedWorker] = []

    def poll(self, within_s: float = 0.0) -> None:
        """Take what it has said; where it has died, its workers' groups end too."""
        super().poll(within_s)
        if not self._channel.has_ended:
            return
        orphans, self._workers = self._workers, []
        for worker in orphans:
            worker.orphan()

    def adopt(
        self, process_id: int, stdout: IO[bytes] | None, stderr: IO[bytes] | None
    ) -> ForkedWorker:
        """Take a worker that it has just forked into account."""
        worker = ForkedWorker(self, process_id, stdout, stderr)
        self._workers.append(worker)
        return worker

    def exit_code_of(self, process_id: int) -> int | None:
        """How a worker ended, if it has said so."""
        self.poll()
        return self._told.get(process_id)

    def reap(self, worker: ForkedWorker) -> None:
        """Have it let the kernel forget a worker that has ended."""
        if worker not in self._workers:
            return
        self._workers.remove(worker)
        self._told.pop(worker.pid, None)
        with suppress(CommunicationError):  # a dead one has no zombies
            self._channel.send(ReapWorker(process_id=worker.pid), within_s=_SEND_S)

    def is_done(self) -> bool:
        """Whether no worker of it is left."""
        return not self._workers

    def _take(self, message: Message) -> None:
        super()._take(message)
        if isinstance(message, WorkerEnded):
            self._told[message.process_id] = message.exit_code


class ForkedWorker:
    """A worker that is a child of the fork server.

    Args:
        server: Which has forked it, and must keep it as a zombie when it ends.
        process_id: Of the worker.
        stdout: Reads what it prints, where a pipe was asked for.
        stderr: The same for its errors.
    """

    way: Way = "forked"

    def __init__(
        self,
        server: ForkingProcess,
        process_id: int,
        stdout: IO[bytes] | None = None,
        stderr: IO[bytes] | None = None,
    ) -> None:
        self._server = server
        self.pid = process_id
        self.stdout = stdout
        self.stderr = stderr
        self._exit_code: int | None = None
        self._ended_at_s: float | None = None
        self._owns_number = True
        try:
            self._handle: int | None = os.pidfd_open(process_id)
        except ProcessLookupError:  # the fork server was killed meanwhile, it too
            self._handle = None

    def peek_exit_code(self) -> int | None:
        """How it ended, minus the signal if one ended it; None while it runs."""
        if self._exit_code is None and self._has_ended(within_s=0.0):
            self._exit_code = self._server.exit_code_of(self.pid)
            if self._exit_code is None:
                self._exit_code = self._find_exit_code()
        return self._exit_code

    def signal_group(self, number: int) -> None:
        """Signal it and all it started; does nothing once its number may be another's."""
        if not self._owns_number or self._handle is None:
            return
        try:
            os.killpg(self.pid, number)
        except ProcessLookupError:  # it was forked just now and has no group yet
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._handle, number)

    def reap(self) -> None:
        """Let the kernel forget it, which has ended or was just killed."""
        if self._owns_number and self._has_ended(within_s=_REAP_S):
            deadline_s = time.monotonic() + 2 * _TOLD_S
            while self.peek_exit_code() is None and time.monotonic() < deadline_s:
                self._server.poll(within_s=_TOLD_S)
        self._server.reap(self)
        self._let_go()

    def orphan(self) -> None:
        """Note that its server died: the kernel kills it, and this what it started."""
        self.signal_group(signal.SIGKILL)
        self._owns_number = False  # it is reaped by whoever adopts it

    def _find_exit_code(self) -> int | None:
        """What to say where the server has said nothing: it hangs, or was killed."""
        if self._ended_at_s is None:
            self._ended_at_s = time.monotonic()
        if self._server.can_serve and time.monotonic() < self._ended_at_s + _TOLD_S:
            return None
        # Not asked first: without the right to read it, the kernel shows a 0.
        found = _zombie_exit_code(self.pid) if self._owns_number else None
        return -signal.SIGKILL if found is None else found

    def _has_ended(self, within_s: float) -> bool:
        if self._handle is None:
            return True
        # poll, since select refuses numbers above 1023.
        handles = select.poll()
        handles.register(self._handle, select.POLLIN)
        return bool(handles.poll(within_s * 1000))

    def _let_go(self) -> None:
        self._owns_number = False
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None


class _Claim:
    """Lets exactly one side decide whether an order is carried out.

    A pipe with one byte in it: a worker that finds none ends before it begins, so that
    a fork server that wakes up late can't make a second worker of the same rank.
    """

    def __init__(self) -> None:
        self.file, writer = os.pipe()
        os.write(writer, b"1")
        os.close(writer)  # so that who finds nothing is told so, and does not wait

    def withdraw(self) -> bool:
        """Take the order back; False where a worker was faster."""
        return bool(os.read(self.file, 1))

    def close(self) -> None:
        """Let go of this side's end; a worker has its own."""
        os.close(self.file)


def _zombie_exit_code(process_id: int) -> int | None:
    """Read how a process ended that nobody has reaped; None where it is gone."""
    try:
        stat = Path(f"/proc/{process_id}/stat").read_text()
    except OSError:
        return None
    state, *rest = stat.rpartition(")")[2].split()
    if state not in {"Z", "X"}:
        return None
    return os.waitstatus_to_exitcode(int(rest[_EXIT_CODE_FIELD - 1]))
