"""A directory as a store of objects: each appears whole, and stays after a power cut.

An object is written under another name, flushed to the disk and renamed. The directory's
own entry is flushed by ``sync``, once for many objects.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from uuid import uuid4

from geartrain.checkpoint.chunks import OBJECTS, POINTER, StoredObject
from geartrain.errors import CheckpointError
from geartrain.units import format_bytes

_DRAFTS = "drafts"
_LOCK = ".lock"
_POLL_S = 0.02  # flock has no deadline of its own
_MAX_POINTER_BYTES = 4096


class FileStore:
    """Objects as files below a directory, which is made when the first is put.

    Args:
        directory: Where they lie. Nothing else may be kept there.
    """

    def __init__(self, directory: str | Path) -> None:
        self._directory = Path(directory)
        self._unsynced: set[Path] = set()
        self._known_good: dict[str, tuple[int, int]] = {}
        """Size and time of the objects that this one wrote or compared."""
        self._guard = threading.Lock()

    @property
    def label(self) -> str:
        """The directory."""
        return str(self._directory)

    def put_if_absent(self, name: str, data: bytes | memoryview) -> bool:
        """Write an object; False where it was there already, with that content.

        One that was there with other content is damaged, since content has the names, and
        is replaced: a new version must not build on it.

        Raises:
            CheckpointError: If the disk refuses; nothing is changed then.
        """
        path = self._locate(name)
        with self._explained("write", name, num_bytes=len(data)):
            # Twice: another writer may put it while this one writes its draft.
            for _ in range(2):
                if self._is_there(path, name, data):
                    return False
                if self._write(path, data, replaces=path.exists()):
                    break
            else:
                self._write(path, data, replaces=True)
            self._remember(path, name)
        return True

    def get(self, name: str) -> bytes:
        """Read an object.

        Raises:
            CheckpointError: If there is none, or the disk refuses.
        """
        with self._explained("read", name):
            return self._locate(name).read_bytes()

    def get_into(self, name: str, buffer: memoryview) -> int:
        """Read an object of the buffer's size; return its own, and nothing more if other.

        Raises:
            CheckpointError: If there is none, or the disk refuses.
        """
        path = self._locate(name)
        with self._explained("read", name), path.open("rb", buffering=0) as stream:
            size = os.fstat(stream.fileno()).st_size
            position = 0
            while size == len(buffer) and position < size:  # reads may be short
                count = stream.readinto(buffer[position:])
                if not count:
                    return position
                position += count
            return size

    def has(self, name: str) -> bool:
        """Say whether there is an object of that name.

        Raises:
            CheckpointError: If the disk refuses to say.
        """
        with self._explained("look up", name):
            try:
                self._locate(name).lstat()
            except (FileNotFoundError, NotADirectoryError):
                return False
        return True

    def list_objects(self, prefix: str) -> Iterator[StoredObject]:
        """List the objects below a folder, such as ``objects/``.

        Raises:
            CheckpointError: If the disk refuses.
        """
        top = self._locate(prefix.rstrip("/"))
        with self._explained("list", prefix):
            for folder, _, files in os.walk(top, onerror=_raise_unless_missing):
                for file in files:
                    path = Path(folder, file)
                    with suppress(FileNotFoundError):  # collected meanwhile
                        found = path.stat()
                        yield StoredObject(
                            name=path.relative_to(self._directory).as_posix(),
                            num_bytes=found.st_size,
                            modified_at_s=found.st_mtime,
                        )

    def delete(self, name: str) -> None:
        """Remove an object, if it is there.

        Raises:
            CheckpointError: If the disk refuses.
        """
        with self._guard:
            self._known_good.pop(name, None)
        path = self._locate(name)
        with (
            self._explained("remove", name),
            suppress(FileNotFoundError, NotADirectoryError),
        ):
            path.unlink()
            with self._guard:
                self._unsynced.add(path.parent)

    def delete_untouched(self, name: str) -> None:
        """Remove an object that nobody has written or found there since this one did.

        Raises:
            CheckpointError: If the disk refuses.
        """
        with self._explained("remove", name), suppress(FileNotFoundError):
            found = self._locate(name).stat()
            with self._guard:
                was = self._known_good.get(name)
            if was == (found.st_size, found.st_mtime_ns):
                self.delete(name)

    def sync(self) -> None:
        """Return when all that was put survives a power cut.

        Raises:
            CheckpointError: If the disk refuses.
        """
        with self._guard:
            folders = sorted(self._unsynced, reverse=True)  # the inner before the outer
        with self._explained("flush", OBJECTS):
            for folder in folders:
                with self._guard:  # before: it may be needed again while it is flushed
                    self._unsynced.discard(folder)
                try:
                    _sync_directory(folder)
                except OSError:
                    with self._guard:
                        self._unsynced.add(folder)
                    raise

    def publish_pointer(self, manifest_name: str) -> None:
        """Replace ``LATEST`` in one step.

        Raises:
            CheckpointError: If the disk refuses; the pointer is as it was then.
        """
        with self._explained("write", POINTER):
            pointer = f"{manifest_name}\n".encode()
            self._write(self._directory / POINTER, pointer, replaces=True)
        self.sync()

    def read_pointer(self) -> str | None:
        """Return what ``LATEST`` holds, None without one; its end of line is left out.

        Raises:
            CheckpointError: If the disk refuses.
        """
        with self._explained("read", POINTER):
            try:
                with (self._directory / POINTER).open("rb") as stream:
                    text = stream.read(_MAX_POINTER_BYTES).decode(errors="replace")
            except FileNotFoundError:
                return None
        return text.removesuffix("\n")

    @contextmanager
    def locked(self, *, exclusive: bool, deadline_s: float) -> Iterator[None]:
        """Hold the store's lock: shared to write objects, exclusive to remove some.

        Where the file system knows no locks, the age of objects alone protects them.

        Raises:
            CheckpointError: If others hold it until the deadline, or the disk refuses.
        """
        with self._explained("lock", _LOCK):
            self._make_directory(self._directory)
            handle = os.open(self._directory / _LOCK, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            self._wait_for_lock(handle, exclusive=exclusive, deadline_s=deadline_s)
            yield
        finally:
            os.close(handle)

    def sweep_drafts(self) -> None:
        """Remove what writers that were killed left; call it with the exclusive lock."""
        shutil.rmtree(self._directory / _DRAFTS, ignore_errors=True)

    def _locate(self, name: str) -> Path:
        # Names come out of manifests, which others may have written.
        if not name.isprintable() or name[:1] in ("", "/") or ".." in name.split("/"):
            msg = f"{name!r} is no name of an object in {self.label}; give a relative one"
            raise CheckpointError(msg)
        return self._directory / name

    def _is_there(self, path: Path, name: str, data: bytes | memoryview) -> bool:
        try:
            found = path.stat()
        except (FileNotFoundError, NotADirectoryError):
            return False
        with self._guard:
            is_known = self._known_good.get(name) == (found.st_size, found.st_mtime_ns)
        if not is_known and (found.st_size != len(data) or path.read_bytes() != data):
            return False
        # Used now: no garbage, however old. Another time than before in any case, so that
        # its writer sees that somebody builds on it.
        now_ns = max(time.time_ns(), found.st_mtime_ns + 1)
        os.utime(path, ns=(now_ns, now_ns))
        self._remember(path, name)
        return True

    def _remember(self, path: Path, name: str) -> None:
        found = path.stat()
        with self._guard:
            self._known_good[name] = (found.st_size, found.st_mtime_ns)
            # Also where it was there: its writer may not have come to flush the entry.
            self._unsynced.add(path.parent)

    def _write(self, path: Path, data: bytes | memoryview, *, replaces: bool) -> bool:
        """Write a file whole; False where there is one by now that must not be replaced."""
        self._make_directory(path.parent)
        handle, draft = self._open_draft()
        try:
            try:
                _write_all(handle, memoryview(data))
                os.fsync(handle)
            finally:
                os.close(handle)
            is_written = _move(draft, path, replaces=replaces)
        finally:
            with suppress(OSError):
                draft.unlink(missing_ok=True)
        with self._guard:
            self._unsynced.add(path.parent)
        return is_written

    def _open_draft(self) -> tuple[int, Path]:
        draft = self._directory / _DRAFTS / uuid4().hex
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        self._make_directory(draft.parent)
        try:
            return os.open(draft, flags, 0o666), draft  # less what umask takes away
        except FileNotFoundError:  # swept between the two calls
            self._make_directory(draft.parent)
            return os.open(draft, flags, 0o666), draft

    def _make_directory(self, folder: Path) -> None:
        if folder.is_dir():
            return
        if folder != self._directory:
            self._make_directory(folder.parent)
            folder.mkdir(exist_ok=True)
        else:
            folder.mkdir(parents=True, exist_ok=True)
        with self._guard:
            self._unsynced.add(folder.parent)

    def _wait_for_lock(self, handle: int, *, exclusive: bool, deadline_s: float) -> None:
        kind = fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH
        give_up_at = time.monotonic() + deadline_s
        while True:
            try:
                fcntl.flock(handle, kind | fcntl.LOCK_NB)
            except BlockingIOError as error:
                if time.monotonic() >= give_up_at:
                    who = "a writer" if exclusive else "a collector of garbage"
                    msg = (
                        f"{self.label} was held by {who} for {deadline_s:g} s; try again "
                        "when it is done"
                    )
                    raise CheckpointError(msg) from error
                time.sleep(_POLL_S)
            except OSError:  # no locks here
                return
            else:
                return

    @contextmanager
    def _explained(self, doing: str, name: str, num_bytes: int = 0) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            needs = ""
            if num_bytes:
                free = _free(self._directory)
                needs = f" (needs {format_bytes(num_bytes)}, free {free})"
            msg = (
                f"cannot {doing} {name} in {self.label}: {error.strerror or error}{needs}; "
                "make it readable and writable with room to spare, or use another place; "
                "versions saved there before are as they were"
            )
            raise CheckpointError(msg) from error


def _move(draft: Path, path: Path, *, replaces: bool) -> bool:
    if not replaces:
        try:
            path.hardlink_to(draft)
        except FileExistsError:
            return False
        except OSError:  # a file system without links: the last of two writers wins
            pass
        else:
            return True
    draft.rename(path)
    return True


def _write_all(handle: int, data: memoryview) -> None:
    position = 0
    while position < len(data):  # writes may be short
        position += os.write(handle, data[position:])


def _sync_directory(folder: Path) -> None:
    try:
        handle = os.open(folder, os.O_RDONLY)
    except FileNotFoundError:  # of drafts, swept meanwhile
        return
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno != errno.EINVAL:  # what a file system says that has no such thing
            raise
    finally:
        os.close(handle)


def _raise_unless_missing(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError):
        raise error


def _free(directory: Path) -> str:
    with suppress(OSError):
        return format_bytes(shutil.disk_usage(directory).free)
    return "unknown"
