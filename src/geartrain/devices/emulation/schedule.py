"""Schedule files: how the speed of emulated devices changes over a run."""

from __future__ import annotations

import csv
import math
from dataclasses import dataclass
from pathlib import Path

from geartrain.devices.emulation.throttle import check_core_fraction
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
        text = path.read_text()
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
