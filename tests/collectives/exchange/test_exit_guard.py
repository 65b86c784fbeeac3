"""What still runs when a process exits is ended first."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import torch
import torch.distributed as dist

from collectives.exchange.test_over_gloo import book_of, exchange
from geartrain.collectives.exchange import exit_guard
from geartrain.errors import CommunicationError


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


def leave_in_the_middle(rank: int, port: int) -> None:
    """A script that ends in its own way while exchanges are under way."""
    torch.set_num_threads(1)
    store = dist.TCPStore(  # type: ignore[attr-defined]  # torch doesn't re-export it
        "127.0.0.1", port, is_master=False
    )
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    member, _ = exchange(rank, 2, book_of(((1,), (1,)), "hierarchical"))
    member.all_reduce(torch.ones(1000)).wait()
    dist.barrier()
    try:
        for _ in range(20):
            member.all_reduce(torch.ones(10**6))
    except CommunicationError:
        pass  # the other one has left already
    sys.exit(3)


def test_a_script_that_ends_during_an_exchange_has_its_own_exit_status() -> None:
    store = dist.TCPStore(  # type: ignore[attr-defined]  # as above
        "127.0.0.1", 0, is_master=True, wait_for_workers=False
    )
    module = "collectives.exchange.test_exit_guard"
    script = f"import {module} as m; m.leave_in_the_middle({{rank}}, {store.port})"
    tests = str(Path(__file__).parents[2])
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", script.format(rank=rank)],
            env={**os.environ, "PYTHONPATH": tests, "GLOO_SOCKET_IFNAME": "lo"},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in (0, 1)
    ]
    try:
        told = [process.communicate(timeout=60)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()

    assert [process.returncode for process in processes] == [3, 3], told
