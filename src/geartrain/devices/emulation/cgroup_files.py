"""Reading and writing the kernel's cgroup files, each write checked."""

from __future__ import annotations

import errno
import os
import time
from pathlib import Path

from geartrain.errors import DeviceError

_REMOVE_DEADLINE_S = 2.0
_RETRY_S = 0.01


class CgroupFiles:
    """The cgroup file system. Tests put a fake kernel in its place."""

    def make(self, group: Path) -> None:
        """Create a group and its missing parents.

        Raises:
            DeviceError: If the kernel refuses.
        """
        try:
            group.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            msg = f"cannot create the cgroup {group}: {error.strerror}; run as root"
            raise DeviceError(msg) from error

    def remove(self, group: Path) -> bool:
        """Remove a group; one whose last process is just dying is tried again.

        Returns:
            False where it is still in use after two seconds.
        """
        deadline_s = time.monotonic() + _REMOVE_DEADLINE_S
        while True:
            try:
                group.rmdir()
            except FileNotFoundError:
                return True
            except OSError as error:
                if error.errno != errno.EBUSY or time.monotonic() > deadline_s:
                    return False
                time.sleep(_RETRY_S)  # the kernel gives no event for "now empty" in v1
            else:
                return True

    def read(self, path: Path) -> str:
        """Read a control file.

        Raises:
            DeviceError: If it cannot be read.
        """
        try:
            return path.read_text().strip()
        except OSError as error:
            msg = f"cannot read {path}: {error.strerror}; is that cgroup still there?"
            raise DeviceError(msg) from error

    def write(self, path: Path, value: str) -> None:
        """Write a control file, in one write as the kernel wants it.

        Raises:
            DeviceError: If the kernel refuses the value.
        """
        try:
            handle = os.open(path, os.O_WRONLY | os.O_TRUNC)  # never creates the file
            try:
                os.write(handle, value.encode())
            finally:
                os.close(handle)
        except OSError as error:
            msg = f"the kernel refused {value!r} for {path}: {error.strerror}"
            raise DeviceError(msg) from error

    def write_checked(self, path: Path, value: str, tolerance: int = 0) -> None:
        """Write a control file and read it back.

        Args:
            path: The control file.
            value: What to write.
            tolerance: How far an integer may be off, as memory is kept in pages.

        Raises:
            DeviceError: If the kernel refuses the value or keeps another one.
        """
        self.write(path, value)
        kept = self.read(path)
        same = kept == value
        if not same and tolerance and kept.isdigit():
            same = abs(int(kept) - int(value)) <= tolerance
        if not same:
            msg = f"wrote {value!r} to {path} but it holds {kept!r}; expected the same"
            raise DeviceError(msg)

    def pids(self, group: Path) -> list[int]:
        """Processes in a group; 0 stands for one of another pid namespace."""
        try:
            return [int(line) for line in (group / "cgroup.procs").read_text().split()]
        except OSError:
            return []
