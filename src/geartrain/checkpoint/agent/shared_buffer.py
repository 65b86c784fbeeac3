"""Memory that a trainer writes and its agent keeps.

An anonymous file (memfd) without a name: it lives as long as any process has it open,
so it outlives a killed trainer in the agent, and both killed leave nothing behind.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import weakref

from geartrain.errors import CheckpointError


class SharedBuffer:
    """One such piece of memory, mapped.

    Args:
        descriptor: Taken over; closed with the last user of the memory.

    Raises:
        CheckpointError: If the system has no memory for it.
    """

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._finalizer = weakref.finalize(self, os.close, descriptor)
        self.num_bytes = os.fstat(descriptor).st_size
        try:
            # Populated: page faults would make the first copies several times slower.
            self._map = mmap.mmap(
                descriptor, self.num_bytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE
            )
        except (OSError, ValueError) as error:
            self._finalizer()
            msg = (
                f"{self.num_bytes} bytes of shared memory can't be mapped ({error}); lower "
                "the agent's memory limit or raise the container's"
            )
            raise CheckpointError(msg) from error

    @classmethod
    def create(cls, num_bytes: int) -> SharedBuffer:
        """Make one, at least a page long.

        Raises:
            CheckpointError: If the system has no memory for it.
        """
        size = max(mmap.PAGESIZE, num_bytes)
        try:
            descriptor = os.memfd_create(
                "geartrain-state", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
            )
        except OSError as error:
            msg = f"no shared memory can be made ({error}); raise the limit of open files"
            raise CheckpointError(msg) from error
        try:
            os.posix_fallocate(descriptor, 0, size)  # fails here, not by SIGBUS later
            # Nobody can shrink it under a mapping, which would kill the others by SIGBUS.
            seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
        except OSError as error:
            os.close(descriptor)
            msg = (
                f"{size} bytes of shared memory can't be had ({error}); lower the agent's "
                "memory limit or raise the container's"
            )
            raise CheckpointError(msg) from error
        return cls(descriptor)

    @property
    def view(self) -> memoryview:
        """All of it, format ``B``."""
        return memoryview(self._map)
