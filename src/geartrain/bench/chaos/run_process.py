"""``geartrain run`` as a process of its own: started, seen into, ended, never leaked."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec

from geartrain.bench.chaos.evidence import Ending
from geartrain.errors import DeviceError

MARK_VARIABLE = "GEARTRAIN_CHAOS"
"""All that a run starts has it in its environment, so that what is left can be found."""

_MOUNT_S = 10.0
_KILL_S = 20.0
_POLL_S = 0.02
_INTERRUPTED = 130
_MOUNT_AND_BECOME = (
    'mount -t tmpfs -o size="$1",mode=755 tmpfs "$2" && shift 2 && exec "$@"'
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSettings:
    """How a run is started."""

    mark: str
    """Value of the variable that all its processes have."""
    arguments: tuple[str, ...]
    """Of ``geartrain``, or of the module."""
    module: str = "geartrain.cli"
    """What is run, if not ``geartrain``; it ends as ``geartrain run --json`` does."""
    run_dir: Path
    log_path: Path
    """What it prints."""
    disk_bytes: int | None = None
    """The run directory lies on a disk of this size, of its own; None: it does not."""


class RunProcess:
    """The launcher of a run.

    A small disk is a tmpfs in a mount namespace of the launcher's. It is gone with the
    last process, also where everybody is killed; this object keeps it as long as it is
    open, and copies what is on it when the run has ended.

    Raises:
        DeviceError: If the disk can't be made.
    """

    def __init__(self, settings: RunSettings) -> None:
        self._settings = settings
        settings.run_dir.mkdir(parents=True, exist_ok=True)
        with settings.log_path.open("wb") as log:
            self._process = subprocess.Popen(
                _command(settings),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._directory: int | None = None
        try:
            if settings.disk_bytes is not None:
                self._directory = self._await_disk()
        except BaseException:
            self.close()
            raise

    @property
    def process_id(self) -> int:
        """Of the launcher."""
        return self._process.pid

    @property
    def run_dir(self) -> Path:
        """The run directory, as this process reaches it."""
        if self._directory is None:
            return self._settings.run_dir
        return Path(f"/proc/{os.getpid()}/fd/{self._directory}")

    @property
    def has_ended(self) -> bool:
        """Whether the launcher has ended."""
        return self._process.poll() is not None

    def stop(self, timeout_s: float) -> Ending:
        """Ask it to stop, and wait; kill it where that takes too long."""
        started_at_s = time.monotonic()
        asked = not self.has_ended
        if asked:
            self._process.send_signal(signal.SIGINT)
        try:
            exit_code = self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._end()
            text = (
                f"it did not stop within {timeout_s:.0f} s and was killed; {self._tail()}"
            )
            return self._ending("hung", text, time.monotonic() - started_at_s)
        stop_s = time.monotonic() - started_at_s if asked else 0.0
        message = self._message()
        if exit_code == 0:
            return self._ending("finished", message, stop_s)
        if exit_code == _INTERRUPTED and asked:
            return self._ending("stopped", message, stop_s)
        return self._ending("failed", message or self._tail(), stop_s)

    def close(self) -> None:
        """End what still runs, bring the run's files home, let go of its disk."""
        self._end()
        if self._directory is not None:
            with contextlib.suppress(shutil.Error, OSError):
                shutil.copytree(self.run_dir, self._settings.run_dir, dirs_exist_ok=True)
            os.close(self._directory)
            self._directory = None

    # -- internals ------------------------------------------------------------------------

    def _ending(
        self,
        outcome: Literal["finished", "stopped", "failed", "hung"],
        message: str,
        stop_s: float,
    ) -> Ending:
        return Ending(
            outcome=outcome,
            exit_code=self._process.returncode,
            message=message,
            stop_s=stop_s,
        )

    def _end(self) -> None:
        """A second Ctrl-C has the launcher kill and clean up; then the hard way."""
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
            if self.has_ended:
                return
            self._process.send_signal(number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_KILL_S)

    def _await_disk(self) -> int:
        """A descriptor of the directory on the disk, once that is mounted."""
        outside = self._settings.run_dir.stat().st_dev
        inside = Path(f"/proc/{self.process_id}/root{self._settings.run_dir}")
        deadline_s = time.monotonic() + _MOUNT_S
        while time.monotonic() < deadline_s and not self.has_ended:
            descriptor = os.open(inside, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            if os.fstat(descriptor).st_dev != outside:
                return descriptor
            os.close(descriptor)
            time.sleep(_POLL_S)
        msg = (
            f"a disk of its own for {self._settings.run_dir} was not mounted: "
            f"{self._tail()}; leave the kinds of disk out"
        )
        raise DeviceError(msg)

    def _message(self) -> str:
        """What the launcher said in its last line, which is JSON."""
        for line in reversed(self._lines()):
            with contextlib.suppress(msgspec.DecodeError):
                document: Any = msgspec.json.decode(line)  # Any: JSON of geartrain run
                if isinstance(document, dict):
                    return str(document.get("message") or document.get("error") or "")
        return ""

    def _tail(self) -> str:
        lines = [line.decode(errors="replace") for line in self._lines()]
        return "its output ends with: " + " | ".join(lines[-3:])

    def _lines(self) -> list[bytes]:
        return [line for line in self._settings.log_path.read_bytes().splitlines() if line]


def _command(settings: RunSettings) -> list[str]:
    program = [sys.executable, "-m", settings.module, *settings.arguments]
    return [*_placed(settings), *marked(settings.mark, program)]


def marked(mark: str, argv: Sequence[str]) -> list[str]:
    """A command line whose processes all have the mark in their environment.

    They are asked to end when this process does, also where it is killed.
    """
    setpriv = shutil.which("setpriv")
    bound = [] if setpriv is None else [setpriv, "--pdeathsig", "TERM"]
    # On one thread, as emulated devices are: a small model gains nothing by more.
    return [*bound, "env", f"{MARK_VARIABLE}={mark}", "OMP_NUM_THREADS=1", *argv]


def _placed(settings: RunSettings) -> list[str]:
    if settings.disk_bytes is None:
        return []
    shell = ["sh", "-c", _MOUNT_AND_BECOME, "sh"]
    where = [str(settings.disk_bytes), str(settings.run_dir)]
    return ["unshare", "--mount", "--propagation", "private", *shell, *where]
