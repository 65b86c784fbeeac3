"""The coordinator of a run: a process beside the workers, started again when it dies."""

from __future__ import annotations

import logging
import os
import secrets
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from geartrain.elastic.limits import Limits
from geartrain.errors import ConfigError
from geartrain.launch.processes import end_groups, peek_exit_code, start_module
from geartrain.launch.settings import LaunchSettings
from geartrain.parallel.worker_spec import CoordinatorSpec

logger = logging.getLogger(__name__)

ADDRESS_NAME = "coordinator.json"
TOKEN_NAME = "coordinator.token"  # noqa: S105 - a file's name
JOURNAL_NAME = "coordinator.journal"
LOG_NAME = "coordinator.log"

_TOKEN_BYTES = 32
_FIRST_WAIT_S = 0.1
_MAX_WAIT_S = 2.0
MAX_DEATHS = 20
"""So many within ``DEATHS_WITHIN_S`` end the run: it can't be kept."""
DEATHS_WITHIN_S = 60.0
_BUILD_S = 1.0
"""Where devices share a host's cores an exchange takes up to 0.8 s to stand, and one that
is given up is begun anew by all. Who freezes meanwhile is found out as soon, by silence."""
_SOUND_S = 2.0
"""Whoever served for so long did not die of how it starts: waiting would mend nothing."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where the coordinator listens."""

    host: str = "127.0.0.1"
    """The one address it listens on."""
    command: Callable[[Sequence[str]], Sequence[str]] = list
    """Turns its command line into one that runs where that address is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Deaths:
    """When a coordinator died, as far as it still counts. Pure.

    >>> once = Deaths().noted(10.0)
    >>> once.wait_s, once.noted(10.5).wait_s, once.are_too_many
    (0.0, 0.1, False)
    """

    at_s: tuple[float, ...] = ()
    num_in_a_row: int = 0
    """Deaths soon after the start, one after the other, and what came before them."""

    def noted(self, now_s: float, lived_s: float = 0.0) -> Deaths:
        """One more, of who had served for so long; those of long ago count no longer."""
        recent = tuple(at_s for at_s in self.at_s if now_s - at_s < DEATHS_WITHIN_S)
        before = 0 if lived_s >= _SOUND_S else min(self.num_in_a_row, len(recent))
        return Deaths(at_s=(*recent, now_s), num_in_a_row=before + 1)

    @property
    def wait_s(self) -> float:
        """How long the next start waits: not at all after the first death in a row."""
        if self.num_in_a_row < 2:  # noqa: PLR2004 - the first one
            return 0.0
        doubled_s: float = _FIRST_WAIT_S * 2.0 ** (self.num_in_a_row - 2)
        return min(doubled_s, _MAX_WAIT_S)

    @property
    def are_too_many(self) -> bool:
        """Whether it is not started again."""
        return len(self.at_s) >= MAX_DEATHS


class CoordinatorProcess:
    """Starts the coordinator, and again when it dies.

    Its journal lies in the run directory: what comes back knows all that was decided.

    Args:
        settings: Of the run.
        place: Where it is to listen.

    Raises:
        ConfigError: If its files can't be written.
    """

    def __init__(self, settings: LaunchSettings, place: Place) -> None:
        self._run_dir = settings.run_dir
        self._place = place
        self._limits = limits_of(settings)
        self._deaths = Deaths()
        self._due_at_s: float | None = None
        self._started_at_s = 0.0
        try:
            for name in (JOURNAL_NAME, ADDRESS_NAME):
                (self._run_dir / name).unlink(missing_ok=True)  # of another run
            _write_token(self._run_dir / TOKEN_NAME)
            self._log = (self._run_dir / LOG_NAME).open("ab", buffering=0)
        except OSError as error:
            msg = f"the coordinator's files can't be made in {self._run_dir}: {error}"
            raise ConfigError(msg) from error
        self._process: subprocess.Popen[bytes] = self._start()

    @property
    def spec(self) -> CoordinatorSpec:
        """How workers reach it."""
        return CoordinatorSpec(
            address_file=str(self._run_dir / ADDRESS_NAME),
            run_id=self._run_dir.name,
            token_file=str(self._run_dir / TOKEN_NAME),
        )

    @property
    def process_id(self) -> int:
        """Of the process that runs now, or ran last."""
        return self._process.pid

    @property
    def failure(self) -> str | None:
        """Why the run can't go on: it died too often; None while it can."""
        if not self._deaths.are_too_many:
            return None
        return (
            f"the coordinator died {MAX_DEATHS} times within {DEATHS_WITHIN_S:.0f} s; its "
            f"log is {self._run_dir / LOG_NAME}"
        )

    def poll(self) -> str | None:
        """Start it again if it has died and that is due.

        Returns:
            What to tell the user, if anything happened.
        """
        now_s = time.monotonic()
        if self.failure is not None:
            return None
        if self._due_at_s is None:
            if peek_exit_code(self._process) is None:
                return None
            end_groups([self._process], grace_s=0.0)
            self._deaths = self._deaths.noted(now_s, now_s - self._started_at_s)
            if self._deaths.are_too_many:
                return None
            self._due_at_s = now_s + self._deaths.wait_s
        if now_s < self._due_at_s:
            return None
        self._due_at_s = None
        code = self._process.returncode
        try:
            self._process = self._start()
        except OSError as error:  # there is no process to be had
            logger.warning("the coordinator could not be started: %s", error)
            return None  # it counts as dead once more
        return (
            f"the coordinator died ({_describe_exit(code)}), started again; steps wait "
            "until it is back"
        )

    def close(self) -> None:
        """End it, and remove the token."""
        end_groups([self._process], grace_s=0.0)
        self._log.close()
        (self._run_dir / TOKEN_NAME).unlink(missing_ok=True)

    def _start(self) -> subprocess.Popen[bytes]:
        run_dir = self._run_dir
        self._started_at_s = time.monotonic()
        return start_module(
            "geartrain.elastic.process",
            [
                f"--journal={run_dir / JOURNAL_NAME}",
                f"--address-file={run_dir / ADDRESS_NAME}",
                f"--token-file={run_dir / TOKEN_NAME}",
                f"--run-id={run_dir.name}",
                f"--host={self._place.host}",
                f"--limits={msgspec.json.encode(self._limits).decode()}",
                f"--parent={os.getpid()}",
            ],
            stdout=subprocess.DEVNULL,
            stderr=self._log,
            place=self._place.command,
        )


def needs_coordinator(settings: LaunchSettings) -> bool:
    """Whether a run has members that may come and go."""
    return (
        settings.mode == "train"
        and settings.on_loss != "stop"
        and len(settings.fleet.devices) > 1
    )


def limits_of(settings: LaunchSettings) -> Limits:
    """How patient the coordinator of a run is.

    Which failing device is started again, and when, is the launcher's to decide, so the
    coordinator sets no limit to failures and no waits of its own.
    """
    return Limits(
        backoff_s=0.0,
        build_s=_BUILD_S,
        expected_members=len(settings.fleet.devices),
        min_members=settings.min_devices,
        start_s=settings.peer_timeout_s,
    )


def _write_token(path: Path) -> None:
    """Write a new secret that only this user may read.

    Raises:
        OSError: If it can't be written.
    """
    path.unlink(missing_ok=True)
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(file, "w") as writing:
        writing.write(secrets.token_hex(_TOKEN_BYTES))


def _describe_exit(code: int | None) -> str:
    if code is not None and code < 0:
        return f"by signal {-code}"
    return f"exit code {code}"
