"""Reads from the coordinator's journal who takes part, while the coordinator writes it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path

import msgspec

from geartrain.elastic.records import EpochFormed, Facts

_CHUNK_BYTES = 1 << 20


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
        self._rest = b""

    def poll(self) -> bool:
        """Read what is new; whether the members may have changed."""
        before = self.members
        with contextlib.suppress(OSError), self._path.open("rb") as journal:
            inode = os.fstat(journal.fileno()).st_ino
            if inode != self._inode:  # made, or replaced by a shorter one
                self._inode, self._num_bytes, self._rest = inode, 0, b""
            journal.seek(self._num_bytes)
            while data := journal.read(_CHUNK_BYTES):
                self._num_bytes += len(data)
                self._take(data)
        return self.members != before

    def _take(self, data: bytes) -> None:
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            # Nearly all lines are committed steps, which say nothing here.
            if b'"epoch_formed"' not in line and b'"facts"' not in line:
                continue
            with contextlib.suppress(msgspec.DecodeError):  # the coordinator's to judge
                record = _lines.decode(line).record
                self.members = {one.member_id: one.incarnation for one in record.members}
