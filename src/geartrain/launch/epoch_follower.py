"""Reads from the coordinator's journal who takes part, while the coordinator writes it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import IO

import msgspec

from geartrain.elastic.records import EpochFormed, Facts

_CHUNK_BYTES = 1 << 16


class _Line(msgspec.Struct, frozen=True):
    record: EpochFormed | Facts


_lines = msgspec.json.Decoder(_Line)


class EpochFollower:
    """The members of a run's latest epoch.

    A launcher can't ask: it is in no emulated host's network, and would have to wait.

    Args:
        path: The journal; it need not be there yet.

    Attributes:
        members: Incarnation by member id.
    """

    def __init__(self, path: Path) -> None:
        self.members: Mapping[str, str] = {}
        self._path = path
        self._inode = -1
        self._num_bytes = 0

    def poll(self) -> bool:
        """Read what is new; whether the members may have changed."""
        before = self.members
        with contextlib.suppress(OSError), self._path.open("rb") as journal:
            inode = os.fstat(journal.fileno()).st_ino
            if inode != self._inode:  # made, or replaced by a shorter one
                self._inode, self._num_bytes = inode, 0
            while self._take(journal):
                pass
        return self.members != before

    def _take(self, journal: IO[bytes]) -> bool:
        """Read the next whole lines; False where there are none yet."""
        lines, newline, _ = self._read(journal).rpartition(b"\n")
        for line in lines.split(b"\n"):
            # Nearly all lines are committed steps, which say nothing here.
            if b'"epoch_formed"' not in line and b'"facts"' not in line:
                continue
            with contextlib.suppress(msgspec.DecodeError):  # the coordinator's to judge
                record = _lines.decode(line).record
                self.members = {one.member_id: one.incarnation for one in record.members}
        self._num_bytes += len(lines) + len(newline)
        return bool(newline)

    def _read(self, journal: IO[bytes]) -> bytes:
        """What is new, at least a line where there is one."""
        num_bytes = _CHUNK_BYTES
        while True:
            journal.seek(self._num_bytes)
            data = journal.read(num_bytes)
            # Behind the last line there may be room that is held by zeros.
            written = data.partition(b"\0")[0]
            if len(written) < num_bytes or b"\n" in written:
                return written
            num_bytes *= 2  # a line this long
