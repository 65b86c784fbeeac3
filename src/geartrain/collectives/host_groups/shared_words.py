"""Counters in shared memory that processes raise and wait for.

Waiting is a futex: a waiter sleeps in the kernel until the counter changes, without
polling and without a file descriptor for each pair. Raising a counter is one system call
that adds 1 and wakes whoever waits for it (FUTEX_WAKE_OP), so no wake-up can be lost; the
kernel's atomic operation is a full barrier on every architecture, so whoever sees the
counter also sees the data that was written before.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import threading
import time
from typing import TYPE_CHECKING

from geartrain.errors import ConfigError

if TYPE_CHECKING:
    import mmap
    from collections.abc import Callable

_SYSTEM_CALL = {
    "x86_64": 202,
    "aarch64": 98,
    "riscv64": 98,
    "loongarch64": 98,
    "ppc64le": 221,
    "s390x": 238,
}
"""Number of the futex system call, by machine (asm/unistd.h)."""

_WAIT, _WAKE, _WAKE_OP = 0, 1, 5
_ADD_ONE = (1 << 28) | (1 << 12)
"""FUTEX_OP(FUTEX_OP_ADD, 1, FUTEX_OP_CMP_EQ, 0): see futex(2)."""
_ALL = 2**31 - 1
_MASK = 2**32 - 1
_HALF = 2**31

CHECK_EVERY_S = 0.05
"""How long a waiter sleeps before it looks whether the others are still alive."""


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class SharedWords:
    """32-bit counters at the beginning of a shared mapping.

    Counters wrap around; they are compared by their distance.

    Args:
        memory: The mapping, shared between processes.
        num_words: Counters in it.
        spin_s: How long a waiter looks at the counter before it sleeps. Waking up takes
            tens of microseconds, but spinning with more processes than cores takes the
            core from the one that is waited for.

    Raises:
        ConfigError: On a machine whose futex call is not known.
    """

    def __init__(self, memory: mmap.mmap, num_words: int, spin_s: float = 0.0) -> None:
        machine = platform.machine()
        number = _SYSTEM_CALL.get(machine)
        if number is None:
            msg = (
                f"no shared-memory exchange on {machine}: expected one of "
                f"{', '.join(_SYSTEM_CALL)}. Run one process a host there"
            )
            raise ConfigError(msg)
        self._number = ctypes.c_long(number)
        self._syscall = ctypes.CDLL(None, use_errno=True).syscall
        self._syscall.restype = ctypes.c_long
        # The view keeps the mapping alive as long as an address into it is used.
        self._buffer = (ctypes.c_uint32 * num_words).from_buffer(memory)
        first = ctypes.addressof(self._buffer)
        self._addresses = [ctypes.c_void_p(first + 4 * i) for i in range(num_words)]
        self._spin_s = spin_s
        self._order = threading.Lock()

    def read(self, index: int) -> int:
        """The counter's value now."""
        return self._buffer[index]

    def add(self, index: int) -> None:
        """Raise a counter by 1 and wake whoever waits for it."""
        address = self._addresses[index]
        self._syscall(
            self._number,
            address,
            ctypes.c_int(_WAKE_OP),
            ctypes.c_int(_ALL),
            ctypes.c_long(0),
            address,
            ctypes.c_int(_ADD_ONE),
        )

    def set_and_wake_all(self, index: int, value: int) -> None:
        """Set one word, then wake everybody, whatever they wait for."""
        self._buffer[index] = value
        for address in self._addresses:
            self._syscall(self._number, address, ctypes.c_int(_WAKE), ctypes.c_int(_ALL))

    def has_reached(self, index: int, target: int) -> bool:
        """Whether the counter is at the target or past it."""
        return ((self._buffer[index] - target) & _MASK) < _HALF

    def wait(self, index: int, target: int, check: Callable[[], None]) -> None:
        """Sleep until the counter reaches the target.

        Args:
            index: Which counter.
            target: Its value modulo 2**32.
            check: Called before each sleep and every ``CHECK_EVERY_S``; raises to end
                the wait.
        """
        target &= _MASK
        if not self.has_reached(index, target) and not self._spin(index, target):
            while True:
                value = self._buffer[index]
                if ((value - target) & _MASK) < _HALF:
                    break
                check()
                self._sleep(index, value)
        # What is read from now on must not be older than the counter. x86 keeps loads
        # in order; elsewhere the hand-over of a lock does (release, then acquire when
        # torch takes the interpreter's lock).
        with self._order:
            pass

    def _spin(self, index: int, target: int) -> bool:
        if not self._spin_s:
            return False
        end_at_s = time.perf_counter() + self._spin_s
        while time.perf_counter() < end_at_s:
            if self.has_reached(index, target):
                return True
        return False

    def _sleep(self, index: int, value: int) -> None:
        timeout = _Timespec(0, int(CHECK_EVERY_S * 1e9))
        result = self._syscall(
            self._number,
            self._addresses[index],
            ctypes.c_int(_WAIT),
            ctypes.c_uint32(value),
            ctypes.byref(timeout),
            ctypes.c_void_p(None),
            ctypes.c_int(0),
        )
        if result == 0:
            return
        error = ctypes.get_errno()
        if error not in (errno.EAGAIN, errno.ETIMEDOUT, errno.EINTR):
            raise OSError(error, os.strerror(error))
