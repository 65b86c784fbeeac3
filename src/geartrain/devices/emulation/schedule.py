"""Schedule files: how the speed of emulated devices changes over a run."""

from __future__ import annotations

import csv
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from geartrain.devices.emulation.throttle import check_core_fraction, unknown_device
from geartrain.devices.fleet_spec import check_cores
from geartrain.errors import ConfigError

HEADER = ("t_s", "device_id", "core_fraction")


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleEntry:
    """From ``t_s`` after the start on, a device has this share of a core."""

    t_s: float
    device_id: str
    core_fraction: float

    def __post_init__(self) -> None:
        if not (math.isfinite(self.t_s) and self.t_s >= 0):
            msg = f"t_s={self.t_s:g} must be seconds >= 0 since the start of the run"
            raise ConfigError(msg)
        if not self.device_id:
            msg = "device_id is empty; expected one such as emulated:0"
            raise ConfigError(msg)
        check_core_fraction(self.core_fraction, self.device_id)


def parse_schedule(path: Path) -> tuple[ScheduleEntry, ...]:
    """Read a schedule file.

    Args:
        path: A CSV file with the header ``t_s,device_id,core_fraction``.

    Returns:
        Its entries in order of time.

    Raises:
        ConfigError: If it can't be read or a line is wrong; the message names it.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")  # as spreadsheets save it, too
    except UnicodeDecodeError as error:
        msg = f"the schedule {path} is not UTF-8 text; give a CSV file"
        raise ConfigError(msg) from error
    except OSError as error:
        msg = f"cannot read the schedule {path}: {error.strerror}; give a CSV file"
        raise ConfigError(msg) from error
    header, *lines = text.splitlines() or [""]
    if tuple(name.strip() for name in header.split(",")) != HEADER:
        msg = f"{path}, line 1: {header!r}; expected the header {','.join(HEADER)}"
        raise ConfigError(msg)
    entries = []
    for number, row in enumerate(csv.reader(lines), start=2):
        if row and not row[0].lstrip().startswith("#"):
            entries.append(_entry(row, f"{path}, line {number}"))
    return tuple(sorted(entries, key=lambda entry: entry.t_s))


def check_schedule(
    schedule: Sequence[ScheduleEntry],
    core_fractions: Mapping[str, float],
    cores: float,
    *,
    oversubscribe: bool,
) -> None:
    """Check that a schedule fits the fleet that it is for, at every time.

    Args:
        schedule: Entries in order of time; those of one time change together.
        core_fractions: What each emulated device of the fleet starts with.
        cores: How many there are.
        oversubscribe: Whether the fleet may have more.

    Raises:
        ConfigError: If it names a device that the fleet lacks, or hands out more cores
            than there are.
    """
    fractions = dict(core_fractions)
    for t_s, entries in itertools.groupby(schedule, key=lambda entry: entry.t_s):
        for entry in entries:
            if entry.device_id not in fractions:
                raise unknown_device(entry.device_id, sorted(fractions))
            fractions[entry.device_id] = entry.core_fraction
        try:
            check_cores(list(fractions.values()), cores, oversubscribe=oversubscribe)
        except ConfigError as error:
            msg = f"from t_s={t_s:g} of the schedule on, {error}"
            raise ConfigError(msg) from error


def _entry(row: list[str], place: str) -> ScheduleEntry:
    if len(row) != len(HEADER):
        msg = f"{place}: {len(row)} values; expected {','.join(HEADER)}"
        raise ConfigError(msg)
    t_s, device_id, fraction = (value.strip() for value in row)
    try:
        return ScheduleEntry(
            t_s=float(t_s), device_id=device_id, core_fraction=float(fraction)
        )
    except ValueError as error:
        msg = f"{place}: {error}; expected {','.join(HEADER)}"
        raise ConfigError(msg) from error
    except ConfigError as error:
        msg = f"{place}: {error}"
        raise ConfigError(msg) from error
