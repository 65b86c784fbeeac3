"""Messages of a pair that connects only when it first talks.

Gloo connects such a pair inside the first call, which blocks until the peer makes its own,
and can't be told to give up. So the calls are made in their order by a thread of the
pair's own, until the first one has returned.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from geartrain.collectives.exchange.exit_guard import start_guarded


class FirstContact:
    """The calls that wait for a pair to connect."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._calls: deque[Callable[[], None]] = deque()
        self._is_running = False
        self._is_made = False

    def add(self, call: Callable[[], None]) -> bool:
        """Queue a call that reports its own errors; False where the pair is connected."""
        with self._lock:
            if self._is_made:
                return False
            self._calls.append(call)
            if not self._is_running:
                self._is_running = True
                start_guarded(
                    threading.Thread(target=self._run, name="first contact", daemon=True)
                )
        return True

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._calls:
                    self._is_made = True
                    return
                call = self._calls.popleft()
            call()
