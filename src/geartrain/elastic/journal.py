"""The coordinator's memory on disk: one JSON line a record, each with a checksum.

The checksums form a chain, so that a line that was lost or moved shows as well as one that
was damaged. A line that was being written when the machine died is cut off: nothing that it
says had been told to anybody. Anything else that does not fit is an error, since going on
from half a memory could let two histories of a run exist.
"""

from __future__ import annotations

import fcntl
import logging
import os
import tempfile
import time
import zlib
from collections.abc import Sequence
from pathlib import Path

import msgspec

from geartrain.elastic.records import Committed, Facts, JournalRecord, apply, replay
from geartrain.errors import CheckpointError

logger = logging.getLogger(__name__)

COMPACT_BYTES = 4 << 20
"""A journal this long is replaced by what it adds up to; about 30,000 steps."""
LATEST_SYNC_S = 1.0
_UNUSED = b"\0"
"""What reserved room reads as; JSON holds none."""


class _Line(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    crc: int
    """CRC-32 of the record's bytes, begun with that of the line before."""
    record: msgspec.Raw


_encoder = msgspec.json.Encoder()
_lines: msgspec.json.Decoder[_Line] = msgspec.json.Decoder(_Line)
_records: msgspec.json.Decoder[JournalRecord] = msgspec.json.Decoder(JournalRecord)


class Journal:
    """An open journal, which no second coordinator can open.

    Records of committed steps are written before anybody hears of them, so that they
    outlive the process, but reach the disk a moment later: a member that has applied such a
    step proves it if the whole machine dies in between. All others are on disk first.

    Args:
        path: File; created if it is not there, and so is ``path`` + ``.lock``.
        sync_commits: Also wait for the disk at each committed step.
        compact_bytes: See :data:`COMPACT_BYTES`.

    Attributes:
        records: What the file held when it was opened.

    Raises:
        CheckpointError: If another process has it open, or it is damaged, or can't be
            read or written.
    """

    def __init__(
        self,
        path: Path,
        *,
        sync_commits: bool = False,
        compact_bytes: int = COMPACT_BYTES,
    ) -> None:
        self.path = path
        self._sync_commits = sync_commits
        self._compact_bytes = compact_bytes
        self._lock = _lock(path.with_name(path.name + ".lock"))
        self._file = -1
        try:
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            data = path.read_bytes().rstrip(_UNUSED)
            self.records, self._crc, self._num_bytes = _read(data, str(path))
            if cut := len(data) - self._num_bytes:
                logger.warning("%s: an unfinished line of %d bytes is cut off", path, cut)
                os.ftruncate(self._file, self._num_bytes)
            self._reserve()
            os.fsync(self._file)
            _sync_directory(path.parent)
        except (OSError, CheckpointError) as error:
            for descriptor in (self._file, self._lock):
                if descriptor >= 0:
                    os.close(descriptor)
            if isinstance(error, OSError):
                raise _failed(path, error) from error
            raise
        self._facts = replay(self.records)
        self._synced_at_s = time.monotonic()
        self._is_synced = True

    def append(self, records: Sequence[JournalRecord]) -> None:
        """Write records; on return they outlive this process, and all but commits the host.

        Raises:
            CheckpointError: If the disk is full or gone; the journal is as it was before.
        """
        if not records:
            return
        crc, lines = self._crc, []
        for record in records:
            body = _encoder.encode(record)
            crc = zlib.crc32(body, crc)
            lines.append(b'{"crc":%d,"record":%b}\n' % (crc, body))
        must_sync = self._sync_commits or not all(type(r) is Committed for r in records)
        try:
            self._write(b"".join(lines), must_sync=must_sync)
        except OSError as error:
            raise _failed(self.path, error) from error
        self._crc = crc
        for record in records:
            self._facts = apply(self._facts, record)
        if self._num_bytes > self._compact_bytes:
            self._compact()
        elif time.monotonic() - self._synced_at_s > LATEST_SYNC_S:
            self.sync()

    def sync(self) -> None:
        """Wait until all that was written is on disk; cheap where it is already.

        Raises:
            CheckpointError: If the disk is full or gone.
        """
        if self._is_synced:
            return
        try:
            os.fdatasync(self._file)
        except OSError as error:
            raise _failed(self.path, error) from error
        self._is_synced, self._synced_at_s = True, time.monotonic()

    def close(self) -> None:
        """Let another coordinator open it; twice is fine."""
        if self._file >= 0:
            try:
                self.sync()
                os.ftruncate(self._file, self._num_bytes)
            finally:
                os.close(self._file)
                os.close(self._lock)
                self._file = self._lock = -1

    def _write(self, data: bytes, *, must_sync: bool) -> None:
        try:
            done = 0
            while done < len(data):
                done += os.pwrite(self._file, data[done:], self._num_bytes + done)
            self._is_synced = False
            if must_sync:
                os.fdatasync(self._file)
                self._is_synced, self._synced_at_s = True, time.monotonic()
        except OSError:
            os.ftruncate(self._file, self._num_bytes)
            raise
        self._num_bytes += len(data)

    def _reserve(self) -> None:
        """Hold room, as zeros, for some 60,000 steps on a disk that others fill up."""
        try:
            os.posix_fallocate(self._file, self._num_bytes, 2 * self._compact_bytes)
        except OSError as error:  # the journal is as good as its disk, then
            logger.debug("no room is reserved for %s: %s", self.path, error)
            os.ftruncate(self._file, self._num_bytes)

    def _compact(self) -> None:
        """Replace the file by one line; a failure leaves the long one in place."""
        body = _encoder.encode(self._facts)
        crc = zlib.crc32(body)
        line = b'{"crc":%d,"record":%b}\n' % (crc, body)
        try:
            file = _replace_file(self.path, line)
        except OSError as error:
            logger.warning("%s stays long, it can't be cut short: %s", self.path, error)
            self._compact_bytes *= 2
            return
        os.close(self._file)
        self._file, self._crc, self._num_bytes = file, crc, len(line)
        self._reserve()
        self._is_synced, self._synced_at_s = True, time.monotonic()
        self._compact_bytes = max(self._compact_bytes, 4 * len(line))


def read_journal(path: Path) -> tuple[JournalRecord, ...]:
    """Read a journal without opening it for writing; a coordinator may go on with it.

    Raises:
        CheckpointError: If it is damaged or can't be read.
    """
    try:
        return _read(path.read_bytes().rstrip(_UNUSED), str(path))[0]
    except OSError as error:
        raise _failed(path, error) from error


def _read(data: bytes, source: str) -> tuple[tuple[JournalRecord, ...], int, int]:
    """Return the records, the last checksum, and the bytes that they take."""
    records: list[JournalRecord] = []
    crc, num_bytes = 0, 0
    lines = data.split(b"\n")
    for number, line in enumerate(lines[:-1], start=1):
        reason = ""
        try:
            parsed = _lines.decode(line)
            body = bytes(parsed.record)
            if parsed.crc != (expected := zlib.crc32(body, crc)):
                reason = f"its checksum is {parsed.crc}, not {expected}"
            else:
                records.append(_records.decode(body))
        except (msgspec.DecodeError, RecursionError) as error:
            reason = str(error)
        if reason:
            is_last = number == len(lines) - 1 and not lines[-1]
            if is_last:
                break
            msg = (
                f"{source} is damaged in line {number} ({reason}); restore the file, or "
                "begin from a checkpoint with a new one"
            )
            raise CheckpointError(msg)
        crc, num_bytes = parsed.crc, num_bytes + len(line) + 1
    _check_versions(records, source)
    return tuple(records), crc, num_bytes


def _check_versions(records: Sequence[JournalRecord], source: str) -> None:
    version = Facts().schema_version
    for record in records:
        if isinstance(record, Facts) and record.schema_version != version:
            msg = (
                f"{source} has schema_version={record.schema_version}, but this geartrain "
                f"reads {version}; end the run with the version that began it"
            )
            raise CheckpointError(msg)


def _lock(path: Path) -> int:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise _failed(path, error) from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(lock)
        msg = f"{path} is locked: another coordinator of this run is alive; end it first"
        raise CheckpointError(msg) from error
    return lock


def _replace_file(path: Path, data: bytes) -> int:
    file, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        os.write(file, data)
        os.fsync(file)
        Path(name).replace(path)
        _sync_directory(path.parent)
    except OSError:
        os.close(file)
        Path(name).unlink(missing_ok=True)
        raise
    return file


def _sync_directory(path: Path) -> None:
    directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def _failed(path: Path, error: OSError) -> CheckpointError:
    msg = (
        f"the journal {path} can't be read or written: {error.strerror}; free space or "
        "choose another place"
    )
    return CheckpointError(msg)
