"""Ctrl-C, SIGTERM and a closed terminal, counted instead of raised while workers run."""

from __future__ import annotations

import signal
import threading
import time
from types import FrameType
from typing import Self

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class StopRequests:
    """Counts requests to stop; the second one asks to kill.

    Signals can be taken over in the main thread only; elsewhere this counts nothing
    and whoever owns the main thread decides.
    """

    def __init__(self) -> None:
        self.count = 0
        self.first_at_s: float | None = None
        self._previous: dict[signal.Signals, object] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                if signal.getsignal(number) is signal.SIG_IGN and number == signal.SIGHUP:
                    continue  # nohup: the run is to outlive its terminal
                self._previous[number] = signal.signal(number, self._take)
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]  # what signal() gave

    def _take(self, _number: int, _frame: FrameType | None) -> None:
        self.count += 1
        if self.first_at_s is None:
            self.first_at_s = time.time()
