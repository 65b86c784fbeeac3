"""Who made a cgroup or a registration: a process id and when that process started.

The start time tells a living owner from another process that got its number later.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

import psutil

_NAME = re.compile(r"geartrain-(?P<pid>\d+)-(?P<start>\d+)$")
_START_FIELD = 19
"""Field 22 of ``/proc/PID/stat`` (starttime), counted from behind the name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """A process, now or in the past."""

    pid: int
    start_ticks: int

    @property
    def key(self) -> str:
        """``PID-STARTTIME``, the same for as long as the process lives."""
        return f"{self.pid}-{self.start_ticks}"

    @property
    def name(self) -> str:
        """The name of what it makes."""
        return f"geartrain-{self.key}"

    def is_alive(self) -> bool:
        """Whether that very process still runs; a zombie does not."""
        return _start_ticks(self.pid) == self.start_ticks


def current_owner() -> Owner:
    """This process."""
    pid = os.getpid()
    ticks = _start_ticks(pid)
    assert ticks is not None, "this process runs"
    return Owner(pid=pid, start_ticks=ticks)


def parse_owner(name: str) -> Owner | None:
    """Read an owner from the name of something it made.

    Returns:
        None where the name is not one of ours.

    >>> parse_owner("geartrain-12-345").key
    '12-345'
    >>> parse_owner("system.slice") is None
    True
    """
    match = _NAME.match(name)
    if match is None:
        return None
    return Owner(pid=int(match["pid"]), start_ticks=int(match["start"]))


def _start_ticks(pid: int) -> int | None:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return _start_ticks_elsewhere(pid)
    except (OSError, ProcessLookupError):
        return None
    # The name in parentheses may hold spaces; what follows it does not.
    state, *rest = stat.rpartition(")")[2].split()
    return None if state in {"Z", "X"} else int(rest[_START_FIELD - 1])


def _start_ticks_elsewhere(pid: int) -> int | None:
    if Path("/proc/self/stat").exists():
        return None
    try:
        return round(psutil.Process(pid).create_time() * 100)
    except psutil.Error:
        return None
