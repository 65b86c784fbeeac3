"""Ties a process to its parent: it never outlives a launcher killed with -9."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent_id: int) -> None:
    """Have the kernel kill this process as soon as its parent ends.

    Linux only; elsewhere the worker still ends when its peers are gone. The kernel
    watches the thread that started the process, so launch from one that stays.

    Args:
        parent_id: Process id of the parent that started this process; one that is
            gone by now can't be watched any more, so that this process ends.

    Source: prctl(2), PR_SET_PDEATHSIG.
    """
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
    if os.getppid() != parent_id:
        os.kill(os.getpid(), signal.SIGKILL)
