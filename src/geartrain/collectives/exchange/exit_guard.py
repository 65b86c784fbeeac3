"""Threads that must be out of C++ before the interpreter ends.

A daemon thread that returns from a call into torch while the interpreter is being taken
down is ended by force, and C++ answers with "terminate called without an active
exception": the process dies of SIGABRT whatever the script's own end was.
"""

from __future__ import annotations

import threading
import time
import weakref
from typing import Protocol

_LIMIT_S = 2.0
"""Who is woken needs milliseconds. A thread that Gloo forgot stays there until long after
the process has gone, and does no harm then: only returning does."""


class Ending(Protocol):
    """What has threads that wait for peers."""

    def end_at_exit(self) -> None:
        """Wake them, and have them end; must not block."""


_endings: weakref.WeakSet[Ending] = weakref.WeakSet()
_threads: weakref.WeakSet[threading.Thread] = weakref.WeakSet()


_lock = threading.Lock()


def end_at_exit(ending: Ending) -> None:
    """Have something ended when the process exits, if it still lives then."""
    with _lock:
        _endings.add(ending)


def start_guarded(thread: threading.Thread) -> None:
    """Start a daemon thread that is waited for, up to two seconds in all, at exit."""
    with _lock:
        _threads.add(thread)
    thread.start()


def _end_all() -> None:
    with _lock:
        endings = list(_endings)
    for ending in endings:
        ending.end_at_exit()
    ends_at_s = time.monotonic() + _LIMIT_S
    # The last thing that some threads do is to start another one.
    while (alive := _alive()) and time.monotonic() < ends_at_s:
        alive[0].join(max(0.0, ends_at_s - time.monotonic()))


def _alive() -> list[threading.Thread]:
    with _lock:
        threads = list(_threads)
    return [t for t in threads if t.is_alive() and t is not threading.current_thread()]


# Finalizers run last made first: this one comes after all exchanges have ended in order.
weakref.finalize(_endings, _end_all)
