"""What every member of a run writes down about itself, for the checks. Torch-free.

One file a process, ``DEVICE-PID.jsonl``, outside of the run directory, so that a fault on
the run's disk does not reach the evidence. Each line goes out in one write; a process
that is killed leaves at most its last line torn.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec

from geartrain.errors import ConfigError

logger = logging.getLogger(__name__)

SUFFIX = ".jsonl"


class Hello(msgspec.Struct, frozen=True, kw_only=True, tag="hello"):
    """A process has a session."""

    at_s: float
    pid: int
    rank: int
    device_id: str


class Work(msgspec.Struct, frozen=True, kw_only=True, tag="work"):
    """It begins to compute its share of a step."""

    at_s: float
    step: int
    """Steps applied so far."""
    plan: str
    """Code of the plan in force: tells a step's attempts apart."""
    epoch: int
    step_in_epoch: int
    start: int
    stop: int
    """Its positions in the global batch."""
    count: int
    """Samples of the global batch."""
    num_tail: int
    """At the end of the batch, for whoever is free."""
    samples: tuple[int, ...]
    """Dataset index of each of its own positions."""
    epoch_steps: int
    """Global batches of an epoch."""


class Commit(msgspec.Struct, frozen=True, kw_only=True, tag="commit"):
    """It has a step: made here, or taken over from who had made it."""

    at_s: float
    step: int
    """Steps applied, this one included."""
    plan: str
    """Of its last ``Work``."""
    loss: float | None
    digest: str | None
    """Of weights and optimizer; None on a device that the plan leaves out."""


class Restore(msgspec.Struct, frozen=True, kw_only=True, tag="restore"):
    """It has loaded a state; the next step is one more than this."""

    at_s: float
    step: int


class Goodbye(msgspec.Struct, frozen=True, kw_only=True, tag="goodbye"):
    """Its training ended, in order or by an error."""

    at_s: float
    step: int
    digest: str | None
    why: Literal["finished", "stopped", "failed"]
    message: str = ""


Record = Hello | Work | Commit | Restore | Goodbye

_decoder = msgspec.json.Decoder(Record)


class WitnessWriter:
    """Appends records to a file of this process."""

    def __init__(self, folder: Path, name: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{name}{SUFFIX}"
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def write(self, record: Record) -> None:
        """Write a record at once; the kernel keeps it though the process be killed."""
        os.write(self._file, msgspec.json.encode(record) + b"\n")


@dataclass(frozen=True, slots=True, kw_only=True)
class Statement:
    """All that one process wrote down."""

    name: str
    hello: Hello
    records: tuple[Record, ...]

    @property
    def device_id(self) -> str:
        """Of its device."""
        return self.hello.device_id

    @property
    def works(self) -> tuple[Work, ...]:
        """Shares that it began."""
        return tuple(r for r in self.records if isinstance(r, Work))

    @property
    def commits(self) -> tuple[Commit, ...]:
        """Steps that it has."""
        return tuple(r for r in self.records if isinstance(r, Commit))

    @property
    def goodbye(self) -> Goodbye | None:
        """How it ended; None where it was killed."""
        last = self.records[-1]
        return last if isinstance(last, Goodbye) else None


class WitnessFolder:
    """Reads what the members write, while they write."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._offsets: dict[str, int] = {}
        self._records: dict[str, list[Record]] = {}
        self._hellos: dict[str, Hello] = {}
        self._last_step: dict[str, int] = {}

    def poll(self) -> bool:
        """Read what is new; whether there was something."""
        found = False
        for path in sorted(self._folder.glob(f"*{SUFFIX}")):
            found = self._read(path) or found
        return found

    def statements(self) -> tuple[Statement, ...]:
        """What was read so far, in the order in which the processes began."""
        started = [
            Statement(name=name, hello=records[0], records=tuple(records))
            for name, records in self._records.items()
            if records and isinstance(records[0], Hello)
        ]
        return tuple(sorted(started, key=lambda t: (t.hello.at_s, t.name)))

    def last_step(self) -> int:
        """The furthest step that anybody has."""
        return max(self._last_step.values(), default=0)

    def newest(self) -> dict[str, tuple[Hello, int]]:
        """Each device's newest process, and the last step that this one has."""
        found: dict[str, tuple[Hello, int]] = {}
        for name, hello in self._hellos.items():
            known = found.get(hello.device_id)
            if known is None or known[0].at_s < hello.at_s:
                found[hello.device_id] = (hello, self._last_step.get(name, 0))
        return found

    def _read(self, path: Path) -> bool:
        name = path.name.removesuffix(SUFFIX)
        with path.open("rb") as stream:
            stream.seek(self._offsets.get(name, 0))
            data = stream.read()
        *lines, torn = data.split(b"\n")
        self._offsets[name] = self._offsets.get(name, 0) + len(data) - len(torn)
        records = self._records.setdefault(name, [])
        for line in lines:
            record = _decode(line, path)
            records.append(record)
            if isinstance(record, Hello):
                self._hellos[name] = record
            elif isinstance(record, Commit):
                self._last_step[name] = record.step
        return bool(lines)


def read_statements(folder: Path) -> tuple[Statement, ...]:
    """Read what all processes of a run that has ended wrote down."""
    reader = WitnessFolder(folder)
    reader.poll()
    return reader.statements()


def write_statement(folder: Path, name: str, records: Sequence[Record]) -> None:
    """Write a statement at once, as a process would have."""
    writer = WitnessWriter(folder, name)
    for record in records:
        writer.write(record)


def _decode(line: bytes, path: Path) -> Record:
    try:
        return _decoder.decode(line)
    except msgspec.MsgspecError as error:
        shown = line[:80].decode(errors="replace")
        msg = f"{path} holds {shown!r}, which no witness writes: {error}"
        raise ConfigError(msg) from error
