"""Carries what workers print to their logs, and what the leading one prints to the user."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import IO

from geartrain.launch.settings import LaunchObserver, StreamName

logger = logging.getLogger(__name__)

_CHUNK_BYTES = 1 << 16
_JOIN_S = 2.0
_KEPT_BYTES = 1 << 18
"""Of what a worker printed before it was known to lead."""


class SteadyObserver:
    """Keeps a run going whose user can't be shown anything any more.

    A terminal that was closed and a pipe whose reader has gone raise on every write;
    neither may end the training, nor block it by not reading its output.
    """

    def __init__(self, observer: LaunchObserver) -> None:
        self._observer = observer
        self._is_broken = False

    def on_output(self, stream: StreamName, data: bytes) -> None:
        """Hand on what the leading worker's script printed."""
        self._attempt(lambda: self._observer.on_output(stream, data))

    def on_notice(self, text: str) -> None:
        """Hand on a line of the launcher."""
        self._attempt(lambda: self._observer.on_notice(text))

    def on_tick(self) -> None:
        """Hand on a tick."""
        self._attempt(self._observer.on_tick)

    def _attempt(self, show: Callable[[], None]) -> None:
        if self._is_broken:
            return
        try:
            show()
        except OSError as error:
            self._is_broken = True
            logger.warning("the run goes on unseen, its output can't be written: %s", error)


class OutputPump:
    """A thread that reads one stream until its end.

    Args:
        source: What to read.
        stream: Its name.
        path: The log that all of it goes to.
        observer: Is shown what comes once ``show_since`` was called.
    """

    def __init__(
        self,
        source: IO[bytes],
        stream: StreamName,
        path: Path,
        observer: LaunchObserver,
    ) -> None:
        self._source = source
        self._stream = stream
        self._log = path.open("ab", buffering=0)
        self._observer = observer
        self._is_full = False
        self._lock = threading.Lock()
        self._is_shown = False
        self._held: deque[tuple[float, bytes]] = deque()  # Unix time; not shown yet
        self._num_held_bytes = 0
        self._thread = threading.Thread(
            target=self._pump, name=f"geartrain-{stream}", daemon=True
        )
        self._thread.start()

    def show_since(self, at_s: float) -> None:
        """Show what comes from now on, and what came since some moment.

        Args:
            at_s: Unix time: when this worker came to lead, which is known a little later.
        """
        if self._is_shown:
            return
        with self._lock:
            self._is_shown = True
            for came_at_s, data in self._held:
                if came_at_s >= at_s:
                    self._observer.on_output(self._stream, data)
            self._held.clear()

    def hide(self) -> None:
        """Show no more of it, until ``show_since`` is called again."""
        with self._lock:
            self._is_shown = False

    def _pump(self) -> None:
        with self._source, self._log:
            # read1 returns what is there: a prompt or progress bar must not wait.
            while data := self._source.read1(_CHUNK_BYTES):  # type: ignore[attr-defined]  # BufferedReader
                self._keep(data)
                with self._lock:
                    self._show(data)

    def _show(self, data: bytes) -> None:
        if self._is_shown:
            self._observer.on_output(self._stream, data)
            return
        self._held.append((time.time(), data))
        self._num_held_bytes += len(data)
        while self._num_held_bytes > _KEPT_BYTES:
            self._num_held_bytes -= len(self._held.popleft()[1])

    def _keep(self, data: bytes) -> None:
        try:
            self._log.write(data)
        except OSError as error:  # a full disk: the user still sees what is printed
            if not self._is_full:
                logger.warning("cannot write %s: %s", self._log.name, error.strerror)
            self._is_full = True

    def join(self) -> None:
        """Wait for the end of the stream, which comes when all writers have ended."""
        self._thread.join(timeout=_JOIN_S)  # a daemon of the script may keep it open
