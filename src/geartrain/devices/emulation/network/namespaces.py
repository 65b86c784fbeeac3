"""Network namespaces: who is in one, and how to work inside."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

from geartrain.errors import DeviceError

NAMESPACES_DIR = Path("/run/netns")
"""Where iproute2 keeps the names."""
_CLONE_NEWNET = 0x40000000
"""From linux/sched.h."""
_KILL_DEADLINE_S = 5.0
_KILL_POLL_S = 0.01


def namespace_path(name: str) -> Path:
    """The file that stands for a namespace."""
    return NAMESPACES_DIR / name


def enter(name: str) -> None:
    """Move this thread, and the threads it starts later, into a network namespace.

    Sockets that exist stay where they were made. Needs root.

    Raises:
        DeviceError: If there is no such namespace or the kernel refuses.

    Source: setns(2).
    """
    path = namespace_path(name)
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        msg = f"no network namespace at {path} ({error.strerror}); is its lab closed?"
        raise DeviceError(msg) from error
    try:
        _set_namespace(file, str(path))
    finally:
        os.close(file)


@contextlib.contextmanager
def entered(name: str) -> Iterator[None]:
    """Work inside a network namespace; this thread only.

    Sockets made meanwhile stay in that namespace, so that one process can talk through
    a whole lab.

    Raises:
        DeviceError: If there is no such namespace or the kernel refuses.
    """
    home = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    try:
        enter(name)
        try:
            yield
        finally:
            _set_namespace(home, "this thread's own namespace")
    finally:
        os.close(home)


def processes_in(*names: str) -> list[int]:
    """Process ids inside any of these namespaces, in order; this process left out."""
    wanted = set()
    for name in names:
        with contextlib.suppress(OSError):
            status = namespace_path(name).stat()
            wanted.add((status.st_dev, status.st_ino))
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        with contextlib.suppress(OSError):  # it ended meanwhile
            status = (entry / "ns" / "net").stat()
            if (status.st_dev, status.st_ino) in wanted:
                found.append(int(entry.name))
    return sorted(found)


def kill_inside(*names: str) -> list[int]:
    """Kill whatever runs inside these namespaces, until nothing does.

    Returns:
        The process ids that are still there at the deadline; empty as a rule.
    """
    deadline_at_s = time.monotonic() + _KILL_DEADLINE_S
    while left := processes_in(*names):
        for process_id in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process_id, signal.SIGKILL)
        if time.monotonic() > deadline_at_s:
            break
        time.sleep(_KILL_POLL_S)
    return left


def _set_namespace(file: int, what: str) -> None:
    # Python has os.setns only from 3.12 on.
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(file, _CLONE_NEWNET) != 0:
        reason = os.strerror(ctypes.get_errno())
        msg = f"cannot enter {what}: {reason}; entering a namespace needs root"
        raise DeviceError(msg)
