"""The run log: ``run.jsonl`` (StepRecords) and ``events.jsonl`` (RunEvents)."""

from __future__ import annotations

import logging
import math
from collections import Counter
from dataclasses import dataclass, field
from io import FileIO
from pathlib import Path
from typing import IO, Any, TypeVar

import msgspec

from geartrain.errors import ConfigError
from geartrain.telemetry.records import RunEvent, StepRecord

STEPS_NAME = "run.jsonl"
EVENTS_NAME = "events.jsonl"

logger = logging.getLogger(__name__)

T = TypeVar("T", StepRecord, RunEvent)

_BLOCK_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class LogEnd:
    """What the last steps of a log hold, for who goes on with it."""

    records: frozenset[tuple[int, str]] = frozenset()
    """Step and device of each StepRecord."""
    events: Counter[tuple[int, str, str]] = field(default_factory=Counter)
    """How many there are of a step, kind and device."""


class RunLogWriter:
    """Appends records to a run directory, a line each.

    A disk that is full ends the log, with a warning, and not the training.
    """

    def __init__(self, run_dir: Path) -> None:
        self._is_full = False
        try:
            run_dir.mkdir(parents=True, exist_ok=True)
            self._steps = (run_dir / STEPS_NAME).open("ab", buffering=0)
            self._events = (run_dir / EVENTS_NAME).open("ab", buffering=0)
        except OSError as error:
            msg = f"cannot write a run log in {run_dir}: {error.strerror}"
            raise ConfigError(msg) from error

    def take_over(self, since_step: int) -> LogEnd:
        """Go on where another process, which was killed, has left off.

        A line that it had half written is cut off.

        Args:
            since_step: What was written of this step and later ones is returned.

        Raises:
            ConfigError: If a file can't be read.
        """
        try:
            steps = _last_lines(Path(str(self._steps.name)), StepRecord, since_step)
            events = _last_lines(Path(str(self._events.name)), RunEvent, since_step)
        except OSError as error:
            msg = f"cannot go on with {self._steps.name}: {error.strerror}"
            raise ConfigError(msg) from error
        return LogEnd(
            frozenset((record.step, record.device_id) for record in steps),
            Counter((event.step, event.kind, event.device_id) for event in events),
        )

    def add_steps(self, records: list[StepRecord]) -> None:
        """Append the records of one step, all devices, in one write."""
        data = b"".join(msgspec.json.encode(r) + b"\n" for r in records)
        self._append(self._steps, data)

    def add_event(self, event: RunEvent) -> None:
        """Append an event."""
        self._append(self._events, msgspec.json.encode(event) + b"\n")

    def _append(self, stream: FileIO, data: bytes) -> None:
        if self._is_full:
            return
        try:
            while data:  # a disk with some room takes a part, and refuses the next one
                data = data[stream.write(data) :]
        except OSError as error:
            # For good: a line after a half-written one could not be read.
            self._is_full = True
            logger.warning(
                "the run goes on but is no longer recorded: cannot write %s: %s",
                stream.name,
                error.strerror,
            )

    def close(self) -> None:
        """Close the files; further writes fail."""
        self._steps.close()
        self._events.close()


class RunLogReader:
    """Follows a run log while it grows; a half-written line waits for its end."""

    def __init__(self, run_dir: Path) -> None:
        self._steps = _Tail(run_dir / STEPS_NAME)
        self._events = _Tail(run_dir / EVENTS_NAME)

    def new_steps(self) -> list[StepRecord]:
        """Records written since the last call."""
        return [_decode(line, StepRecord) for line in self._steps.new_lines()]

    def new_events(self) -> list[RunEvent]:
        """Events written since the last call."""
        return [_decode(line, RunEvent) for line in self._events.new_lines()]

    def close(self) -> None:
        """Close the files."""
        self._steps.close()
        self._events.close()


class _Tail:
    """Complete lines only: what follows the last one may yet be cut off."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stream: IO[bytes] | None = None
        self._num_read = 0

    def new_lines(self) -> list[bytes]:
        if self._stream is None:
            if not self._path.exists():
                return []
            self._stream = self._path.open("rb")
        self._stream.seek(self._num_read)
        *lines, rest = self._stream.read().split(b"\n")
        self._num_read = self._stream.tell() - len(rest)
        return lines

    def close(self) -> None:
        if self._stream is not None:
            self._stream.close()
            self._stream = None


def _last_lines(path: Path, kind: type[T], since_step: int) -> list[T]:
    """The records at a file's end that are of a step or later; cuts off half a line."""
    found: list[T] = []
    with path.open("r+b") as stream:
        at = _cut_off_half_line(stream)
        data = b""
        while at and (not found or found[0].step >= since_step):
            start = max(at - _BLOCK_BYTES, 0)
            stream.seek(start)
            data, at = stream.read(at - start) + data, start
            lines = data.splitlines()
            # Where the file goes on before it, the first line is a part of one.
            found = [_decode(line, kind) for line in (lines[1:] if at else lines)]
    return [record for record in found if record.step >= since_step]


def _cut_off_half_line(stream: IO[bytes]) -> int:
    """Leave complete lines only; returns the file's size in bytes."""
    at = stream.seek(0, 2)
    while at:
        start = max(at - _BLOCK_BYTES, 0)
        stream.seek(start)
        end = stream.read(at - start).rfind(b"\n") + 1
        if end:
            at = start + end
            break
        at = start
    stream.truncate(at)
    return at


def _with_nan(fields: Any) -> Any:  # Any: what JSON holds, checked by convert
    # JSON has no NaN or infinity, so a loss that diverged was written as null.
    if isinstance(fields, dict) and fields.get("loss", 0.0) is None:
        return fields | {"loss": math.nan}
    return fields


def _decode(line: bytes, kind: type[T]) -> T:
    try:
        return msgspec.convert(_with_nan(msgspec.json.decode(line)), kind)
    except msgspec.MsgspecError as error:
        shown = line[:80].decode(errors="replace")
        msg = f"run log holds {shown!r}, which is not a {kind.__name__}: {error}"
        raise ConfigError(msg) from error
