"""Carries what rank 0 prints to its log and to the user."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import IO

from geartrain.launch.settings import LaunchObserver, StreamName

_CHUNK_BYTES = 1 << 16
_JOIN_S = 2.0


class OutputPump:
    """A thread that reads one stream until its end."""

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
        self._thread = threading.Thread(
            target=self._pump, name=f"geartrain-{stream}", daemon=True
        )
        self._thread.start()

    def _pump(self) -> None:
        with self._source, self._log:
            # read1 returns what is there: a prompt or progress bar must not wait.
            while data := self._source.read1(_CHUNK_BYTES):  # type: ignore[attr-defined]  # BufferedReader
                self._log.write(data)
                self._observer.on_output(self._stream, data)

    def join(self) -> None:
        """Wait for the end of the stream, which comes when all writers have ended."""
        self._thread.join(timeout=_JOIN_S)  # a daemon of the script may keep it open
