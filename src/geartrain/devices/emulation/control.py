"""Changing the speed of emulated devices while they run.

The launcher keeps ``emulation.json`` in its run directory and applies what it finds
there. It registers itself in a state directory, so that ``geartrain emulate set``
finds the run without being told where it is.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import platformdirs

from geartrain.devices.emulation.leftovers import sweep_registrations
from geartrain.devices.emulation.owner import current_owner
from geartrain.devices.emulation.schedule import ScheduleEntry, check_schedule
from geartrain.devices.emulation.throttle import (
    Throttle,
    check_core_fraction,
    unknown_device,
)
from geartrain.devices.fleet_spec import check_cores
from geartrain.devices.host import cores_present
from geartrain.errors import ConfigError
from geartrain.telemetry.documents import read_document, write_document

logger = logging.getLogger(__name__)

CONTROL_NAME = "emulation.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreFractionChange:
    """A device's share of a core was changed."""

    device_id: str
    before: float
    after: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Registration:
    """A running emulated fleet, in the state directory."""

    run_dir: str
    device_ids: tuple[str, ...]
    oversubscribed: bool = False
    """The fleet may be given more cores than there are, and says so."""
    schema_version: int = 1


class EmulationControl:
    """The launcher's side: applies the control file and the schedule.

    Args:
        run_dir: Where ``emulation.json`` is kept.
        throttle: What the changes are applied to.
        device_ids: The emulated devices of the run.
        schedule: Changes by time since the start of the clock.
        oversubscribed: The fleet may be given more cores than there are.
        state_dir: Where runs register; None takes the user's state directory.
        clock: Seconds, for the schedule.

    Raises:
        ConfigError: If the schedule does not fit the fleet.
    """

    def __init__(  # noqa: PLR0913 - the last three are for tests and schedules
        self,
        run_dir: Path,
        throttle: Throttle,
        device_ids: Sequence[str],
        *,
        schedule: Sequence[ScheduleEntry] = (),
        oversubscribed: bool = False,
        state_dir: Path | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._path = run_dir / CONTROL_NAME
        self._throttle = throttle
        self._fractions = {i: throttle.core_fraction(i) for i in device_ids}
        self._cores, self._oversubscribed = cores_present(), oversubscribed
        check_schedule(schedule, self._fractions, self._cores, oversubscribe=oversubscribed)
        self._due = sorted(schedule, key=lambda entry: entry.t_s)
        self._clock = clock
        self._started_at_s = clock()
        write_document(self._path, self._fractions)
        self._seen = self._stamp()
        directory = state_dir or default_state_dir()
        self._registration = directory / f"{current_owner().key}.json"
        self._register()

    def restart_clock(self) -> None:
        """Count the schedule's seconds from now on."""
        self._started_at_s = self._clock()

    def add(self, device_id: str) -> None:
        """Let the control file change one more device, which the throttle holds by now."""
        self._fractions[device_id] = self._throttle.core_fraction(device_id)
        write_document(self._path, self._fractions)
        self._seen = self._stamp()
        self._register()

    def poll(self) -> tuple[CoreFractionChange, ...]:
        """Apply what has changed; a call without a change costs one ``stat``.

        A control file that can't be applied is logged and left alone.
        """
        wanted: dict[str, float] = {}
        stamp = self._stamp()
        if stamp != self._seen:
            self._seen = stamp
            wanted.update(self._read())
        elapsed_s = self._clock() - self._started_at_s
        scheduled = False
        while self._due and self._due[0].t_s <= elapsed_s:
            entry = self._due.pop(0)
            wanted[entry.device_id] = entry.core_fraction
            scheduled = True
        changes = self._apply(wanted)
        if scheduled and changes:
            write_document(self._path, self._fractions)
            self._seen = self._stamp()
        return changes

    def close(self) -> None:
        """Take the registration back."""
        self._registration.unlink(missing_ok=True)

    def _register(self) -> None:
        registration = Registration(
            run_dir=str(self._path.parent.resolve()),
            device_ids=tuple(self._fractions),
            oversubscribed=self._oversubscribed,
        )
        try:
            write_document(self._registration, registration)
        except ConfigError as error:  # the run is worth more than being found
            logger.warning("geartrain emulate will not find this run: %s", error)

    def _apply(self, wanted: dict[str, float]) -> tuple[CoreFractionChange, ...]:
        changes = []
        for device_id, after in wanted.items():
            before = self._fractions.get(device_id)
            if before is None or before == after:
                continue
            self._throttle.set_core_fraction(device_id, after)
            self._fractions[device_id] = after
            changes.append(
                CoreFractionChange(device_id=device_id, before=before, after=after)
            )
        return tuple(changes)

    def _read(self) -> dict[str, float]:
        try:
            wanted = read_document(self._path, dict[str, float])
            for device_id, fraction in wanted.items():
                check_core_fraction(fraction, device_id)
            known = {i: wanted.get(i, before) for i, before in self._fractions.items()}
            check_cores(
                list(known.values()), self._cores, oversubscribe=self._oversubscribed
            )
        except ConfigError as error:
            logger.warning("%s is ignored: %s", self._path, error)
            return {}
        return wanted

    def _stamp(self) -> tuple[int, int]:
        try:
            status = self._path.stat()
        except OSError:
            return (0, 0)
        return (status.st_mtime_ns, status.st_ino)  # written anew, so a new inode


def default_state_dir() -> Path:
    """Where running emulated fleets register."""
    return platformdirs.user_state_path("geartrain") / "emulated"


def running_fleets(state_dir: Path | None = None) -> tuple[Registration, ...]:
    """Emulated fleets of living launchers of this user."""
    directory = state_dir or default_state_dir()
    sweep_registrations(directory)
    found = []
    for path in sorted(directory.glob("*.json")):
        try:
            found.append(read_document(path, Registration))
        except ConfigError as error:  # one that just ended
            logger.debug("passed over %s: %s", path, error)
    return tuple(found)


def set_running_core_fraction(
    device_id: str,
    core_fraction: float,
    run_dir: Path | None = None,
    *,
    state_dir: Path | None = None,
) -> Path:
    """Ask a running fleet to change a device's share of a core.

    Args:
        device_id: The emulated device.
        core_fraction: Its new share, 0.02 to 1.
        run_dir: Which run; None where only one is running.
        state_dir: Where runs register; None takes the user's state directory.

    Returns:
        The run directory; the launcher applies the change within a tenth of a second.

    Raises:
        ConfigError: If no run or several are found, the device or share is wrong, or
            there are too few cores for it.
    """
    check_core_fraction(core_fraction, device_id)
    fleet = _choose(running_fleets(state_dir), run_dir)
    if device_id not in fleet.device_ids:
        raise unknown_device(device_id, list(fleet.device_ids))
    path = Path(fleet.run_dir) / CONTROL_NAME
    fractions = read_document(path, dict[str, float])
    fractions[device_id] = core_fraction
    check_cores(
        list(fractions.values()), cores_present(), oversubscribe=fleet.oversubscribed
    )
    write_document(path, fractions)
    return Path(fleet.run_dir)


def _choose(fleets: tuple[Registration, ...], run_dir: Path | None) -> Registration:
    if run_dir is not None:
        wanted = str(run_dir.resolve())
        fleets = tuple(fleet for fleet in fleets if fleet.run_dir == wanted)
    if not fleets:
        where = "" if run_dir is None else f" in {run_dir}"
        msg = f"no emulated fleet is running{where}; start one with geartrain run --fleet"
        raise ConfigError(msg)
    if len(fleets) > 1:
        listed = ", ".join(fleet.run_dir for fleet in fleets)
        msg = (
            f"{len(fleets)} emulated fleets are running: {listed}; name one with --run-dir"
        )
        raise ConfigError(msg)
    return fleets[0]
