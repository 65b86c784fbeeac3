"""One run of the launcher under measurement: started, watched, hit, ended."""

from __future__ import annotations

import os
import re
import secrets
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from geartrain.bench.chaos.capabilities import COORDINATOR_MODULE
from geartrain.bench.chaos.deeds import is_running
from geartrain.bench.chaos.evidence import Ending
from geartrain.bench.chaos.leftovers import end_marked, find_leftovers, marked_processes
from geartrain.bench.chaos.reference import RUNNER
from geartrain.bench.chaos.run_process import RunProcess, RunSettings
from geartrain.bench.chaos.settings import BUILT_IN_SCRIPT
from geartrain.bench.elastic.history import History, Member
from geartrain.elastic.address_file import read_address
from geartrain.errors import CommunicationError, DeviceError
from geartrain.telemetry import RunEvent, RunLogReader

CALM_STEPS = 12
"""Before the first fault: the first steps allocate, and are planned for anew."""
_START_S = 120.0
_STOP_S = 60.0
_LOOK_S = 0.02
"""Times are read from what the members wrote, so looking often gains nothing."""
_KEEN_LOOK_S = 0.001
SAVE_EVERY = 20
_SAVED_NAME = "saved"
_LAUNCHED = "geartrain.bench.elastic.launched"
_ADDRESS_OPTION = "--address-file"
_TRANSFERS_KEY = "to_survivors"
_LIMIT = re.compile(r"\(limit (\d+(?:\.\d+)?) s\)")


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSettings:
    """What is run."""

    folder: Path
    """For all that is written; made, and empty."""
    fleet_spec: str
    device_count: int
    sample_s: float
    saves: bool
    """Whether the script does, every so often."""


class Job:
    """A training on emulated devices, driven from the outside.

    Raises:
        DeviceError: If it does not begin to train.
    """

    def __init__(self, settings: JobSettings) -> None:
        self.settings = settings
        self.began_at_s = time.time()
        """From here on new members are joiners; set once the first ones train."""
        self._mark = secrets.token_hex(8)
        self._saved = settings.folder / _SAVED_NAME
        self._witness_dir = settings.folder / "witness"
        self.run_dir = settings.folder / "run"
        self._run = RunProcess(
            RunSettings(
                mark=self._mark,
                module=_LAUNCHED,
                arguments=self._arguments(),
                run_dir=self.run_dir,
                log_path=settings.folder / "launcher.log",
            )
        )
        self.history = History(self._witness_dir)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._run.close()
        end_marked(self._mark)  # whatever an error left running

    @property
    def has_ended(self) -> bool:
        """Whether the launcher has ended."""
        return self._run.has_ended

    def await_training(self) -> None:
        """Wait for the first steps of all devices.

        Raises:
            DeviceError: If they do not come.
        """
        trains = self.wait(lambda: self.history.last_step >= CALM_STEPS, _START_S)
        if not trains or len(self.living()) < self.settings.device_count:
            ending = self._run.stop(1.0)
            msg = (
                f"the run made {self.history.last_step} steps with "
                f"{len(self.living())} of {self.settings.device_count} devices, "
                f"{CALM_STEPS} with all were awaited ({ending.message}); see "
                f"{self.settings.folder}"
            )
            raise DeviceError(msg)
        self.began_at_s = time.time()

    def wait(
        self, condition: Callable[[], bool], timeout_s: float, *, keenly: bool = False
    ) -> bool:
        """Wait until something holds; False where it does not in time, or the run ended.

        Args:
            condition: Looked at after each reading of what the members wrote.
            timeout_s: Deadline.
            keenly: Look a thousand times a second, to meet a moment.
        """
        deadline_s = time.monotonic() + timeout_s
        while True:
            self.history.poll()
            if condition():
                return True
            if self.has_ended or time.monotonic() > deadline_s:
                return False
            time.sleep(_KEEN_LOOK_S if keenly else _LOOK_S)

    def living(self) -> dict[str, Member]:
        """Of each device that takes part the process; it has made a step."""
        return {
            device_id: member
            for device_id, member in self.history.newest().items()
            if member.commits and not member.has_ended and is_running(member.process_id)
        }

    def is_whole(self, num_steps: int, since_step: int) -> bool:
        """Whether all devices take part and have made some steps together.

        Args:
            num_steps: That each must have made, whoever came last included.
            since_step: They count from this one on.
        """
        living = self.living()
        return len(living) == self.settings.device_count and all(
            member.commits[-1].step >= max(member.commits[0].step, since_step) + num_steps
            for member in living.values()
        )

    def hit(self, members: Sequence[Member], number: signal.Signals) -> float:
        """Signal processes; the Unix time just before the last one got it."""
        at_s = time.time()
        for member in members:
            at_s = time.time()
            with suppress(ProcessLookupError):
                os.kill(member.process_id, number)
        return at_s

    def is_saving(self) -> bool:
        """Whether the script's state is being written just now."""
        return any(self._saved.parent.glob(f".{_SAVED_NAME}.saving-*"))

    def coordinator(self) -> tuple[int, Path] | None:
        """Process id of the coordinator, and the file that says where it listens."""
        for process_id in marked_processes(self._mark):
            words = _command_of(process_id)
            if COORDINATOR_MODULE in words:
                path = _option(words, _ADDRESS_OPTION)
                if path is not None:
                    return process_id, path
        return None

    def limits_told(self) -> list[tuple[str, float, float]]:
        """(device, Unix time, limit) of each member that was given up as silent."""
        found = []
        for event in self.events():
            limit = _LIMIT.search(event.message)
            if event.kind == "lost" and limit is not None:
                found.append((event.device_id, event.at_s, float(limit[1])))
        return found

    def num_transfers(self) -> int:
        """States that were sent to members which had been there before."""
        return sum(
            int(event.values.get(_TRANSFERS_KEY, 0.0))
            for event in self.events()
            if event.kind == "note"
        )

    def events(self) -> list[RunEvent]:
        """All that the run has told."""
        reader = RunLogReader(self.run_dir)
        try:
            return reader.new_events()
        finally:
            reader.close()

    def stop(self) -> tuple[Ending, list[str]]:
        """Ask it to stop; how it ended, and what it has left behind."""
        ending = self._run.stop(_STOP_S)
        self.history.poll()
        process_ids = [member.process_id for member in self.history.members]
        left = find_leftovers(self._mark, self._run.process_id, process_ids)
        return ending, left

    def _arguments(self) -> tuple[str, ...]:
        settings = self.settings
        saving: tuple[str, ...] = ()
        if settings.saves:
            saving = ("--save-every", str(SAVE_EVERY), "--save-to", str(self._saved))
        return (
            settings.fleet_spec,
            str(self.run_dir),
            str(RUNNER),
            str(self._witness_dir),
            "0",
            str(BUILT_IN_SCRIPT),
            f"--sample-s={settings.sample_s}",
            *saving,
        )


def coordinator_id(address_file: Path) -> int | None:
    """Process id of the coordinator that listens; None while there is no such file."""
    try:
        return read_address(address_file).process_id
    except CommunicationError:
        return None


def _command_of(process_id: int) -> list[str]:
    try:
        data = Path(f"/proc/{process_id}/cmdline").read_bytes()
    except OSError:  # it ended meanwhile
        return []
    return [word.decode(errors="replace") for word in data.split(b"\0")]


def _option(words: Sequence[str], name: str) -> Path | None:
    for index, word in enumerate(words):
        if word == name and index + 1 < len(words):
            return Path(words[index + 1])
        if word.startswith(f"{name}="):
            return Path(word.partition("=")[2])
    return None
