"""Turns before ordinary work, for the moments in which links are measured."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Iterator

_NICE = -20
"""Not real-time: that would also keep the kernel's own network threads waiting."""


def raise_priority() -> None:
    """Let this thread run before ordinary work, where the system permits it.

    On a host whose cores are all busy a burst would else wait for its turn, and its link
    would read too slow.
    """
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)


@contextlib.contextmanager
def raised_priority() -> Iterator[None]:
    """The same, and the thread's former priority afterwards."""
    if sys.platform != "linux":
        yield
        return
    thread_id = threading.get_native_id()
    before = os.getpriority(os.PRIO_PROCESS, thread_id)
    raise_priority()
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, thread_id, before)
