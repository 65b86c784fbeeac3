"""What still runs when a process exits is ended first."""

from __future__ import annotations

import threading

from geartrain.collectives.exchange import exit_guard


class Waiting:
    """A thread that waits until it is told to end, and then hands over to another one."""

    def __init__(self) -> None:
        self.told = threading.Event()
        self.ended: list[str] = []
        self.thread = threading.Thread(target=self._run, daemon=True)

    def end_at_exit(self) -> None:
        self.told.set()

    def _run(self) -> None:
        assert self.told.wait(10)
        last = threading.Thread(target=lambda: self.ended.append("last"), daemon=True)
        exit_guard.start_guarded(last)
        self.ended.append("first")


def test_threads_are_woken_and_waited_for_with_those_that_they_start() -> None:
    waiting = Waiting()
    exit_guard.end_at_exit(waiting)
    exit_guard.start_guarded(waiting.thread)

    exit_guard._end_all()

    assert sorted(waiting.ended) == ["first", "last"]
    assert not waiting.thread.is_alive()
