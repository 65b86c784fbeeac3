"""Child processes in groups of their own: started, observed, ended, never leaked."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import IO

from geartrain.errors import GeartrainError

TERMINATE_GRACE_S = 2.0
"""Between SIGTERM and SIGKILL; a script error has to end all within 5 s in all."""
_POLL_S = 0.02


def start_module(  # noqa: PLR0913 - Popen's own, by name
    module: str,
    arguments: Sequence[str],
    *,
    stdin: int | IO[bytes] = subprocess.DEVNULL,
    stdout: int | IO[bytes] | None = None,
    stderr: int | IO[bytes] | None = None,
    pass_fds: Sequence[int] = (),
    place: Callable[[Sequence[str]], Sequence[str]] = list,
) -> subprocess.Popen[bytes]:
    """Start ``python -m module`` in a session, and so a process group, of its own.

    Ctrl-C in the terminal then reaches the launcher only, which decides. ``place``
    turns the command line into one that runs elsewhere and becomes that same command.
    """
    return subprocess.Popen(
        place([sys.executable, "-m", module, *arguments]),
        stdin=stdin,
        stdout=stdout,
        stderr=stderr,
        pass_fds=tuple(pass_fds),
        start_new_session=True,
    )


def peek_exit_code(process: subprocess.Popen[bytes]) -> int | None:
    """How the process ended; None while it runs, minus the signal if one ended it.

    The process is not reaped, so its group's id can't be given to somebody else
    before ``end_groups`` has signalled the group.
    """
    if process.returncode is not None:
        return process.returncode
    status = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    if status is None:
        return None
    if status.si_code == os.CLD_EXITED:
        return int(status.si_status)
    return -int(status.si_status)


def end_groups(
    processes: Sequence[subprocess.Popen[bytes]], grace_s: float = TERMINATE_GRACE_S
) -> None:
    """End the processes and all they started: SIGTERM, a grace, SIGKILL; then reap."""
    alive = [p for p in processes if p.returncode is None]
    running = [p for p in alive if peek_exit_code(p) is None]
    for process in running:
        _signal_group(process, signal.SIGTERM)
        _signal_group(process, signal.SIGCONT)  # duty cycling may have stopped it
    time.sleep(_POLL_S)
    for process in running:  # a worker takes the first one for a request to leave in order
        _signal_group(process, signal.SIGTERM)
    deadline_s = time.monotonic() + grace_s
    while time.monotonic() < deadline_s and any(peek_exit_code(p) is None for p in running):
        time.sleep(_POLL_S)
    for process in alive:
        _signal_group(process, signal.SIGKILL)
        process.wait()


def _signal_group(process: subprocess.Popen[bytes], number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)


class StoreProcess:
    """The rendezvous store's process; its port is known once it has started.

    Args:
        address: The one address it listens on.
        place: Turns its command line into one that runs where that address is.
    """

    def __init__(
        self,
        address: str = "127.0.0.1",
        place: Callable[[Sequence[str]], Sequence[str]] = list,
    ) -> None:
        self.address = address
        self._process = start_module(
            "geartrain.launch.store_server",
            [str(os.getpid()), address],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            place=place,
        )
        self._port: int | None = None

    @property
    def process_id(self) -> int:
        """The process's id."""
        return self._process.pid

    def poll_port(self) -> int | None:
        """The store's port at its address; None while it starts.

        Raises:
            GeartrainError: If the store ended instead.
        """
        if self._port is not None:
            return self._port
        stream = self._process.stdout
        assert stream is not None
        with selectors.DefaultSelector() as selector:
            selector.register(stream, selectors.EVENT_READ)
            if not selector.select(timeout=0):
                return None
        line = stream.readline().strip()
        if not line:
            code = self._process.wait()
            msg = (
                f"the rendezvous store ended with exit code {code} instead of serving; "
                f"check that torch imports and that sockets on {self.address} are allowed"
            )
            raise GeartrainError(msg)
        self._port = int(line)
        return self._port

    def close(self) -> None:
        """End the store."""
        end_groups([self._process], grace_s=0.0)
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()
