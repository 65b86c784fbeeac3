"""Fetch one step ahead on a thread, and throw it away when it is not wanted."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

T = TypeVar("T")

_THREAD_NAME = "geartrain-prefetch"


class Prefetcher(Generic[T]):
    """Runs at most one job ahead, identified by a key.

    One thread for the lifetime of an iteration, not one a job: a new thread would
    set up its own OpenMP team whenever collating runs a parallel kernel.
    """

    def __init__(self) -> None:
        self._executor: ThreadPoolExecutor | None = None
        self._pending: tuple[Hashable, Future[T], threading.Event] | None = None

    def start(self, key: Hashable, job: Callable[[Callable[[], bool]], T]) -> None:
        """Start a job; it gets a function that tells it whether it was cancelled."""
        self._discard()
        if self._executor is None:
            self._executor = ThreadPoolExecutor(1, thread_name_prefix=_THREAD_NAME)
        cancelled = threading.Event()
        self._pending = (key, self._executor.submit(job, cancelled.is_set), cancelled)

    def take(self, key: Hashable) -> Future[T] | None:
        """Return the job with this key, or None; a job with another key is discarded."""
        if self._pending is None or self._pending[0] != key:
            self._discard()
            return None
        _, future, _ = self._pending
        self._pending = None
        return future

    def close(self) -> None:
        """End the thread; it finishes at most the sample that it is fetching."""
        if self._pending is not None:
            self._pending[2].set()
            self._pending = None
        if self._executor is not None:
            # The garbage collector may close an abandoned loop on this very thread.
            on_worker = threading.current_thread().name.startswith(_THREAD_NAME)
            self._executor.shutdown(wait=not on_worker, cancel_futures=True)
            self._executor = None

    def _discard(self) -> None:
        if self._pending is not None:
            _, future, cancelled = self._pending
            self._pending = None
            cancelled.set()
            future.exception()  # waits; whatever it raised belongs to an unwanted batch
