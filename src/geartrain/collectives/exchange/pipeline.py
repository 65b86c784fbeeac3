"""Stage threads: all stages work at once, each on its chunks in the order they came."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import SimpleQueue

import torch

from geartrain.collectives.exchange.exit_guard import end_at_exit, start_guarded

Step = Callable[[], None]


@dataclass(slots=True, kw_only=True)
class Job:
    """One chunk: a step for every stage, and who is told if one fails.

    Args:
        steps: One a stage thread, in order.
        fail: Called with the stage's name and the error.
        is_short: Whether handing it from thread to thread may take longer than its steps.
    """

    steps: Sequence[Step]
    fail: Callable[[str, Exception], None]
    is_short: bool = False


class Pipeline:
    """A thread a stage, joined by queues.

    The first jobs after a pause are begun one by one as others end: all at once they would
    fill the hosts' own links, and what is to cross the slow links would queue behind that.

    A step may block, but only for as long as what it waits for has a deadline. After the
    first failure no further step is begun. A short job that finds nothing in flight stays
    in the first thread, for each change of threads costs a busy machine milliseconds.

    Args:
        stage_names: Names of the threads, in order.
        max_in_flight: Jobs begun and not ended; bounds the memory of receive buffers.
        first_in_flight: The same after a pause; each job that ends allows one more.
    """

    def __init__(
        self,
        stage_names: Sequence[str],
        max_in_flight: int,
        first_in_flight: int | None = None,
    ) -> None:
        self.stage_names = tuple(stage_names)
        self._queues: list[SimpleQueue[Job | None]] = [SimpleQueue() for _ in stage_names]
        self._over = threading.Event()
        self._room = threading.Condition()
        self._first = min(first_in_flight or max_in_flight, max_in_flight)
        self._most = max_in_flight
        self._allowed = self._first
        self._in_flight = 0
        self._threads = [
            threading.Thread(target=self._work, args=(i,), name=name, daemon=True)
            for i, name in enumerate(stage_names)
        ]
        self._started = threading.Barrier(len(self._threads) + 1)

    def start(self) -> None:
        """Start the threads, each with one thread for torch's operators.

        The fleet's processes share their cores with the exchange, and adding is bound by
        memory. torch counts threads per thread, but also sets MKL's and a number for
        later threads, which must stay what they were.
        """
        num_threads = torch.get_num_threads()
        for thread in self._threads:
            start_guarded(thread)
        end_at_exit(self)
        self._started.wait()
        torch.set_num_threads(num_threads)

    def put(self, job: Job) -> None:
        """Queue a job; never blocks."""
        self._queues[0].put(job)

    @property
    def num_in_flight(self) -> int:
        """Jobs begun and not ended."""
        return self._in_flight

    @property
    def is_over(self) -> bool:
        """Whether it was stopped or a step failed."""
        return self._over.is_set()

    def stop(self) -> None:
        """Begin no further step; the threads end when what they wait for ends."""
        self._over.set()
        with self._room:
            self._room.notify_all()
        for queue in self._queues:
            queue.put(None)

    def end_at_exit(self) -> None:
        """Stop since the process ends."""
        self.stop()

    def join(self, timeout_s: float) -> bool:
        """Wait for the threads to end; False if one still waits for something."""
        deadline_at_s = time.monotonic() + timeout_s
        for thread in self._threads:
            if thread is not threading.current_thread() and thread.is_alive():
                thread.join(max(0.0, deadline_at_s - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _work(self, index: int) -> None:
        torch.get_num_threads()  # else torch would set the number anew at first use
        torch.set_num_threads(1)
        self._started.wait()
        queue = self._queues[index]
        while True:
            job = queue.get()
            if job is None or self._over.is_set():
                return
            is_alone = self._begin() if index == 0 else False
            here = self._stages_here(job, index, is_alone=is_alone)
            if not all(self._run(job, stage) for stage in here):
                return
            if here.stop == len(self._queues):
                self._end()
            else:
                self._queues[index + 1].put(job)
            del job  # frees its buffers while this thread waits for the next

    def _stages_here(self, job: Job, index: int, *, is_alone: bool) -> range:
        """The stages that this thread carries out: one, or all where nobody is busy."""
        if job.is_short and is_alone:
            return range(len(self._queues))
        return range(index, index + 1)

    def _begin(self) -> bool:
        """Wait until there is room for one more; whether nothing else is in flight."""
        with self._room:
            self._room.wait_for(
                lambda: self._in_flight < self._allowed or self._over.is_set()
            )
            self._in_flight += 1
            return self._in_flight == 1

    def _end(self) -> None:
        with self._room:
            self._in_flight -= 1
            self._allowed = min(self._allowed + 1, self._most)
            if self._in_flight == 0 and self._queues[0].empty():
                self._allowed = self._first
            self._room.notify_all()

    def _run(self, job: Job, index: int) -> bool:
        if self._over.is_set():
            return False
        try:
            job.steps[index]()
        except Exception as error:  # noqa: BLE001 - a thread has nobody to raise to
            self.stop()
            job.fail(self.stage_names[index], error)
            return False
        return True
