"""Faults from a recorded trace instead of a seed: CSV ``at_s,node_id,kind``."""

from __future__ import annotations

import csv
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from geartrain.bench.chaos.kinds import KINDS, FaultKind
from geartrain.bench.chaos.schedule import Fault
from geartrain.errors import ConfigError

HEADER = ("at_s", "node_id", "kind")


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceEntry:
    """One line of a trace."""

    at_s: float
    node_id: str
    kind: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """A trace on a fleet."""

    faults: tuple[Fault, ...]
    device_of_node: dict[str, str]
    """Nodes share a device where a trace has more of them than the fleet devices."""
    num_left_out: int
    """Entries beyond the duration, or of a kind that was not asked for or is impossible."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplaySettings:
    """How a trace is put on a fleet."""

    device_ids: tuple[str, ...]
    kinds: tuple[FaultKind, ...]
    """That are wanted and possible."""
    speed: float
    """How many seconds of the trace pass in one."""
    duration_s: float
    """Entries that come later are left out."""
    seed: int = 0
    """From which device on nodes are dealt out."""

    def __post_init__(self) -> None:
        if not (self.speed > 0 and math.isfinite(self.speed)):
            msg = (
                f"speed={self.speed} must be > 0 and finite; 60 replays an hour in a minute"
            )
            raise ConfigError(msg)

    def device_of(self, node_id: str, num_before: int) -> str:
        """The device that a node is."""
        if node_id in self.device_ids:
            return node_id
        return self.device_ids[(num_before + self.seed) % len(self.device_ids)]


def parse_trace(path: Path) -> tuple[TraceEntry, ...]:
    """Read a trace.

    Args:
        path: CSV with the header ``at_s,node_id,kind``; lines that begin with # are
            comments. Kinds are those of the table.

    Returns:
        Its entries in order of time.

    Raises:
        ConfigError: If it can't be read or a line is wrong; the message names it.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")  # as spreadsheets save it, too
    except (OSError, UnicodeDecodeError) as error:
        msg = f"cannot read the trace {path}: {error}; give a CSV file {','.join(HEADER)}"
        raise ConfigError(msg) from error
    header, *lines = text.splitlines() or [""]
    if tuple(name.strip() for name in header.split(",")) != HEADER:
        msg = f"{path}, line 1: {header!r}; expected the header {','.join(HEADER)}"
        raise ConfigError(msg)
    entries = [
        _entry(row, f"{path}, line {number}")
        for number, row in enumerate(csv.reader(lines), start=2)
        if row and not row[0].lstrip().startswith("#")
    ]
    return tuple(sorted(entries, key=lambda entry: entry.at_s))


def replay(entries: Sequence[TraceEntry], settings: ReplaySettings) -> Replay:
    """Put a trace on a fleet, its clock compressed.

    A node that is called as a device is that device; the others are dealt out in the
    order of their first fault. A trace says when a fault began; how long it lasts is the
    kind's matter.

    Args:
        entries: Of the trace, in order of time; the first one is at 0 s.
        settings: How.
    """
    allowed = {kind.name: kind for kind in settings.kinds}
    start_s = entries[0].at_s if entries else 0.0
    device_of_node: dict[str, str] = {}
    faults = []
    for entry in entries:
        at_s = (entry.at_s - start_s) / settings.speed
        kind = allowed.get(entry.kind)
        if at_s >= settings.duration_s or kind is None:
            continue
        if entry.node_id not in device_of_node:
            device_of_node[entry.node_id] = settings.device_of(
                entry.node_id, len(device_of_node)
            )
        faults.append(
            Fault(
                at_s=at_s,
                kind=kind.name,
                device_id=device_of_node[entry.node_id],
                duration_s=math.sqrt(kind.least_s * kind.most_s),
            )
        )
    return Replay(
        faults=tuple(faults),
        device_of_node=device_of_node,
        num_left_out=len(entries) - len(faults),
    )


def write_trace(path: Path, entries: Sequence[TraceEntry]) -> None:
    """Write a trace that ``parse_trace`` reads."""
    with path.open("w", newline="") as stream:
        writer = csv.writer(stream)
        writer.writerow(HEADER)
        writer.writerows((f"{e.at_s:g}", e.node_id, e.kind) for e in entries)


def _entry(row: list[str], place: str) -> TraceEntry:
    if len(row) != len(HEADER):
        msg = f"{place}: {len(row)} values; expected {','.join(HEADER)}"
        raise ConfigError(msg)
    at_text, node_id, kind = (value.strip() for value in row)
    try:
        at_s = float(at_text)
    except ValueError as error:
        msg = f"{place}: at_s={at_text!r} is not a number of seconds"
        raise ConfigError(msg) from error
    if not (math.isfinite(at_s) and at_s >= 0):
        msg = f"{place}: at_s={at_text} must be finite and >= 0"
        raise ConfigError(msg)
    if not node_id:
        msg = f"{place}: node_id is empty; name the node that had the fault"
        raise ConfigError(msg)
    if kind not in KINDS:
        msg = f"{place}: unknown kind {kind!r}; known are {', '.join(KINDS)}"
        raise ConfigError(msg)
    return TraceEntry(at_s=at_s, node_id=node_id, kind=kind)
