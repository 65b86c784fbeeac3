"""Progress in plain lines, for logs and pipes."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, Literal, Self

from geartrain.monitoring.live_display import headline
from geartrain.monitoring.progress import RunProgress

_LINE_S = 5.0
"""A line this often while steps are made."""
_POLL_S = 0.5


class PlainDisplay:
    """Hands the script's output on untouched and adds a line now and then on stderr."""

    def __init__(
        self,
        run_dir: Path,
        stdout: BinaryIO,
        stderr: BinaryIO,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._progress = RunProgress(run_dir)
        self._streams = {"stdout": stdout, "stderr": stderr}
        self._lock = threading.Lock()
        self._clock = clock
        self._polled_at_s = clock()
        self._line_at_s = clock()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._progress.poll()
        with contextlib.suppress(OSError):  # nobody reads on
            self._print_events()
        self._progress.close()

    def on_output(self, stream: Literal["stdout", "stderr"], data: bytes) -> None:
        """Hand on what the script printed."""
        with self._lock:
            self._streams[stream].write(data)
            self._streams[stream].flush()

    def on_notice(self, text: str) -> None:
        """Print a line of the launcher's."""
        self.on_output("stderr", f"{text}\n".encode())

    def on_tick(self) -> None:
        """Print a line if it is time to."""
        now_s = self._clock()
        if now_s - self._polled_at_s < _POLL_S:
            return
        self._polled_at_s = now_s
        if not self._progress.poll():
            return
        self._print_events()
        snapshot = self._progress.snapshot()
        if snapshot.last_step is not None and now_s - self._line_at_s >= _LINE_S:
            self._line_at_s = now_s
            self.on_notice(f"[geartrain] {headline(snapshot)}")

    def _print_events(self) -> None:
        for event in self._progress.take_events():
            self.on_notice(
                f"[geartrain] {event.kind} at step {event.step}: {event.message}"
            )
