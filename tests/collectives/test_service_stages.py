"""Kills at any moment of a staged exchange: all members know, no sum is half taken."""

from __future__ import annotations

import os
import queue
import signal
import threading
import time

import pytest
import torch
import torch.distributed as dist

from geartrain.collectives.exchange.scheduled_collective import (
    ExchangeSettings,
    ScheduledCollective,
)
from geartrain.collectives.faults.fault import Fault
from geartrain.collectives.faults.roll_call import roll_call
from geartrain.collectives.host_groups.lone import LoneGroup
from geartrain.collectives.service import EpochParts, ExchangeService, ServiceSettings
from geartrain.errors import CommunicationError
from geartrain.planner.exchange.schedule import CommSchedule, RackPart, ScheduleBook
from local_ranks import run_ranks

NUM_ELEMENTS = 2_000_000


def book_of(*rack_sizes: int) -> ScheduleBook:
    """Racks of lone processes, equal shares, eight chunks."""
    racks: list[RackPart] = []
    first = 0
    for size in rack_sizes:
        racks.append(
            RackPart(
                rack_id=f"rack{len(racks)}",
                hosts=tuple((member,) for member in range(first, first + size)),
                share=1 / len(rack_sizes),
                host_shares=(1 / size,) * size,
            )
        )
        first += size
    schedule = CommSchedule(
        algorithm="hierarchical", num_members=first, racks=tuple(racks), num_chunks=8
    )
    return ScheduleBook(up_to_bytes=(1 << 40,), schedules=(schedule,))


def make_exchange(parts: EpochParts, book: ScheduleBook) -> ScheduledCollective:
    return ScheduledCollective(
        parts.transport,
        LoneGroup(),
        book,
        parts.membership.member_ids,
        ExchangeSettings(watch=parts.watch),
    )


def kill_within_an_exchange(
    rank: int, world_size: int, delay_s: float
) -> tuple[Fault, float, float] | None:
    store = dist.distributed_c10d._get_default_store()
    faults: queue.SimpleQueue[Fault] = queue.SimpleQueue()
    names = tuple(f"cpu#{r}" for r in range(world_size))
    service = ExchangeService(
        store,
        rank,
        ServiceSettings(member_ids=names, make_exchange=make_exchange),
        faults.put,
    )
    exchange = service.rebuild([0, 1, 2, 3], 0, book_of(2, 2))
    exchange.all_reduce(torch.ones(10)).wait()
    if rank == 3:
        victim = os.getpid()
        threading.Timer(delay_s, os.kill, (victim, signal.SIGKILL)).start()
    with pytest.raises(CommunicationError):
        add_for_ever(exchange)
    fault = faults.get(timeout=20.0)
    members = roll_call(store, 1, rank, 2.0, [0, 1, 2])
    exchange = service.rebuild(list(members), 1, book_of(2, 1))
    started_at_s = time.monotonic()
    tensor = torch.full((NUM_ELEMENTS,), float(rank + 1))
    exchange.all_reduce(tensor).wait()
    took_s = time.monotonic() - started_at_s
    total = float(tensor.min()) if bool((tensor == tensor[0]).all()) else -1.0
    service.close()
    return fault, total, took_s


def add_for_ever(exchange: ScheduledCollective) -> None:
    """Several at once, so that all stages are at work."""
    while True:
        pending = [exchange.all_reduce(torch.ones(NUM_ELEMENTS)) for _ in range(3)]
        for one in pending:
            one.wait()


@pytest.mark.parametrize(
    "delay_s",
    [
        0.0,
        0.01,
        pytest.param(0.03, marks=pytest.mark.slow),
        pytest.param(0.07, marks=pytest.mark.slow),
        pytest.param(0.15, marks=pytest.mark.slow),
        pytest.param(0.3, marks=pytest.mark.slow),
    ],
)
def test_survivors_of_a_kill_at_any_moment_go_on_with_an_exact_sum(delay_s: float) -> None:
    results = run_ranks(kill_within_an_exchange, 4, delay_s, may_die=(3,))

    for result in results[:3]:
        assert result is not None
        fault, total, _ = result
        assert fault.suspects == (3,)
        assert total == 6.0
