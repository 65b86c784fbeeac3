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

    A step may block, but only for as long as what it waits for has a deadline. After the
    first failure no further step is begun. A short job that finds nothing in flight stays
    in the first thread, for each change of threads costs a busy machine milliseconds.

    Args:
        stage_names: Names of the threads, in order.
        max_in_flight: Jobs begun and not ended; bounds the memory of receive buffers.
    """

    def __init__(self, stage_names: Sequence[str], max_in_flight: int) -> None:
        self.stage_names = tuple(stage_names)
        self._queues: list[SimpleQueue[Job | None]] = [SimpleQueue() for _ in stage_names]
        self._room = threading.Semaphore(max_in_flight)
        self._over = threading.Event()
        self._lock = threading.Lock()
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
    def is_over(self) -> bool:
        """Whether it was stopped or a step failed."""
        return self._over.is_set()

    def stop(self) -> None:
        """Begin no further step; the threads end when what they wait for ends."""
        self._over.set()
        self._room.release()
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
            if index == 0:
                self._room.acquire()
            here = self._stages_here(job, index)
            if not all(self._run(job, stage) for stage in here):
                return
            if here.stop == len(self._queues):
                self._end()
            else:
                self._queues[index + 1].put(job)
            del job  # frees its buffers while this thread waits for the next

    def _stages_here(self, job: Job, index: int) -> range:
        """The stages that this thread carries out: one, or all where nobody is busy."""
        if index > 0:
            return range(index, index + 1)
        with self._lock:
            is_alone = self._in_flight == 0
            self._in_flight += 1
        return range(len(self._queues) if job.is_short and is_alone else 1)

    def _end(self) -> None:
        with self._lock:
            self._in_flight -= 1
        self._room.release()

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
