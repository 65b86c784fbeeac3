"""Epochs under real faults: killed, stopped, throttled and stale processes."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from fault_ranks import Ring, longest_silence_s, make_rank
from geartrain.collectives.faults.fault import Fault
from geartrain.collectives.faults.roll_call import roll_call
from geartrain.errors import CommunicationError, ConfigError
from local_ranks import run_ranks


def shared_store() -> Store:
    store: Store = dist.distributed_c10d._get_default_store()
    return store


def say(key: str, value: float | None = None) -> None:
    shared_store().set(key, repr(time.monotonic() if value is None else value))


def hear(key: str) -> float:
    shared_store().wait([key])
    return float(shared_store().get(key))


def kill_while_adding(
    rank: int, world_size: int, victims: tuple[int, ...]
) -> tuple[Fault, float, float, float]:
    """Survivors add until it fails, regroup, and add a megabyte."""
    me = make_rank(rank, world_size)
    ring = me.ring(list(range(world_size)), 0)
    megabyte = torch.ones(250_000)
    ring.add(torch.ones(1))
    if rank in victims:
        say(f"killed/{rank}")
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(CommunicationError, match="epoch 0 is over"):
        add_for_ever(ring, megabyte.clone())
    fault = me.fault()
    known_at_s = time.monotonic()
    survivors = [r for r in range(world_size) if r not in victims]
    members = roll_call(shared_store(), 1, rank, 2.0, survivors)
    total = me.ring(list(members), 1).add(megabyte)
    done_at_s = time.monotonic()
    killed_at_s = max(hear(f"killed/{victim}") for victim in victims)
    me.service.close()
    return fault, known_at_s - killed_at_s, done_at_s - killed_at_s, float(total[-1])


def add_for_ever(ring: Ring, tensor: torch.Tensor) -> None:
    while True:
        ring.add(tensor)


def test_a_kill_is_known_everywhere_at_once_and_survivors_go_on() -> None:
    results = run_ranks(kill_while_adding, 5, (2,), may_die=(2,))

    survivors = [result for rank, result in enumerate(results) if rank != 2]
    for fault, known_s, done_s, total in survivors:
        print(f"known after {known_s:.3f} s, 1 MB added after {done_s:.3f} s")  # noqa: T201
        assert fault.suspects == (2,)
        assert "cpu#2" in fault.detail
        assert known_s < 1.0
        assert done_s < 3.0
        assert total == 4.0


def test_two_killed_at_once_are_both_left_behind() -> None:
    results = run_ranks(kill_while_adding, 5, (0, 3), may_die=(0, 3))

    survivors = [result for rank, result in enumerate(results) if rank not in {0, 3}]
    for fault, known_s, _, total in survivors:
        assert set(fault.suspects) <= {0, 3}
        assert fault.suspects
        assert known_s < 1.0
        assert total == 3.0


def kill_one_while_idle(rank: int, world_size: int) -> tuple[Fault, float] | None:
    me = make_rank(rank, world_size)
    ring = me.ring(list(range(world_size)), 0)
    ring.add(torch.ones(1))
    if rank == 1:
        say("killed")
        os.kill(os.getpid(), signal.SIGKILL)
    fault = me.fault()
    return fault, time.monotonic() - hear("killed")


def test_a_kill_is_known_even_where_nobody_waits_for_the_dead() -> None:
    for result in run_ranks(kill_one_while_idle, 3, may_die=(1,)):
        if result is not None:
            fault, known_s = result
            assert (fault.kind, fault.suspects) in {("error", (1,)), ("aborted", (1,))}
            assert known_s < 1.0


def stop_one(rank: int, world_size: int) -> tuple[str, tuple[int, ...], float, str]:
    """Rank 1 freezes; the others go on without it; it wakes up and must stay out."""
    me = make_rank(rank, world_size)
    ring = me.ring(list(range(world_size)), 0)
    tensor = torch.ones(1000)
    ring.add(tensor.clone())
    if rank == 1:
        say("pid", os.getpid())
        say("stopped")
        os.kill(os.getpid(), signal.SIGSTOP)
        text = ""
        try:
            ring.add(tensor.clone())
        except CommunicationError as error:
            text = str(error)
        fault = me.fault()
        with pytest.raises(CommunicationError, match="epoch 0 is over"):
            ring.add(tensor.clone())
        with pytest.raises(CommunicationError, match="epoch 0 is over"):
            me.ring([0, 1, 2], 0)
        assert roll_call(shared_store(), 1, rank, 1.0) == (0, 2)
        say("awake and out")
        return fault.kind, fault.suspects, 0.0, text
    with pytest.raises(CommunicationError) as caught:
        ring.add(tensor.clone())
    fault = me.fault()
    known_s = time.monotonic() - hear("stopped")
    ring = me.ring(list(roll_call(shared_store(), 1, rank, 2.0, [0, 2])), 1)
    if rank == 0:
        os.kill(int(hear("pid")), signal.SIGCONT)
    going = True
    while going:
        total = float(ring.add(torch.ones(1000)).sum())
        is_out = torch.tensor([float(shared_store().check(["awake and out"]))])
        going = float(ring.add(is_out)) == 0.0  # all stop after the same exchange
    assert total == 2000.0
    me.service.close()
    return fault.kind, fault.suspects, known_s, str(caught.value)


def test_a_frozen_process_is_known_within_three_seconds_and_stays_out() -> None:
    (kind0, suspects0, known0_s, text0), (kind1, _, _, text1), last = run_ranks(stop_one, 3)

    print(f"silence known after {known0_s:.2f} s, {last[2]:.2f} s; paused: {text1}")  # noqa: T201
    assert {kind0, last[0]} <= {"silence", "aborted"}
    assert suspects0 == last[1] == (1,)
    assert known0_s < longest_silence_s()
    assert last[2] < longest_silence_s()
    assert "cpu#1" in text0
    assert kind1 in {"aborted", "error"}
    assert "epoch 0 is over" in text1


def kill_in_the_making(rank: int, world_size: int) -> tuple[str, float] | None:
    """Rank 2 dies between epochs 0 and 1, after the others have begun with 1."""
    me = make_rank(rank, world_size)
    me.ring(list(range(world_size)), 0)
    if rank == 2:
        hear("others begin")
        say("killed")
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 0:
        say("others begin")
    started_at_s = time.monotonic()
    with pytest.raises(CommunicationError) as caught:
        me.ring([0, 1, 2], 1, limit_s=2.0)
    waited_s = time.monotonic() - started_at_s
    assert me.fault().epoch in {0, 1}
    total = me.ring([0, 1], 2).add(torch.ones(10))
    assert float(total[0]) == 2.0
    me.service.close()
    return str(caught.value), waited_s


def test_after_a_kill_while_an_epoch_is_made_the_next_one_works() -> None:
    results = run_ranks(kill_in_the_making, 3, may_die=(2,))

    for result in results[:2]:
        assert result is not None
        text, waited_s = result
        assert "epoch 1" in text
        assert waited_s < 8.0


def abort_twice(rank: int, world_size: int) -> tuple[str, int]:
    me = make_rank(rank, world_size)
    first = me.ring([0, 1], 0)
    second = me.ring([0, 1], 1)
    second.add(torch.ones(1))
    me.service.abort(0, "that one is over already")
    second.add(torch.ones(1))
    if rank == 1:
        say("added twice")
    if rank == 0:
        hear("added twice")
        me.service.abort(1, "asked to")
        me.service.abort(1, "asked to again")
        text = str(second.parts.transport.over)
    else:
        text = me.fault().detail
    with pytest.raises(CommunicationError, match="epoch 1 is over"):
        second.add(torch.ones(1))
    with pytest.raises(CommunicationError, match="epoch 1 is over: this process has been"):
        me.ring([0, 1], 1)
    with pytest.raises(ConfigError, match="not rank"):
        me.ring([1 - rank], 2)
    assert me.faults.empty()
    return text, len(first.over)


def test_aborts_count_once_and_not_for_another_epoch() -> None:
    (text0, over0), (text1, over1) = run_ranks(abort_twice, 2)

    assert text0 == "asked to"
    assert text1 == "cpu#0 ended it: asked to"
    assert over0 >= 1
    assert over1 >= 1


def never_begin(rank: int, world_size: int) -> Fault:
    me = make_rank(rank, world_size, timeout_s=1.5)
    ring = me.ring([0, 1], 0)
    if rank == 0:
        with pytest.raises(CommunicationError):
            ring.add(torch.ones(1))
    return me.fault()


def test_who_never_begins_an_exchange_is_named_after_the_outer_limit() -> None:
    faults = run_ranks(never_begin, 2)

    assert faults[0].kind in {"deadline", "error"}
    assert faults[0].suspects == (1,)
    assert "cpu#1" in faults[0].detail
    assert faults[1].suspects == (1,)


def get_stuck(rank: int, world_size: int) -> tuple[Fault, float]:
    """All have begun, but rank 1 only says so."""
    me = make_rank(rank, world_size)
    ring = me.ring([0, 1], 0)
    ring.add(torch.ones(1))
    started_at_s = time.monotonic()
    if rank == 0:
        with pytest.raises(CommunicationError):
            ring.add(torch.ones(1))
    else:
        ring.parts.watch.entered(1, 0.0)
    return me.fault(), time.monotonic() - started_at_s


def test_an_exchange_that_all_began_and_that_is_stuck_ends_after_its_deadline() -> None:
    (fault, waited_s), (other, _) = run_ranks(get_stuck, 2)

    assert {fault.kind, other.kind} <= {"deadline", "aborted"}
    assert "exchange 1 made no headway" in fault.detail
    assert 2.0 <= waited_s < 6.0


def close_in_order(rank: int, world_size: int) -> int:
    me = make_rank(rank, world_size)
    for epoch in range(3):
        ring = me.ring(list(range(world_size)), epoch)
        ring.add(torch.ones(1_000_000))
    me.service.close()
    return me.faults.qsize()


def test_members_that_end_in_order_report_no_fault() -> None:
    assert run_ranks(close_in_order, 3) == [0, 0, 0]


def lose_the_store(rank: int, world_size: int) -> str:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    client = dist.TCPStore("127.0.0.1", store.port, is_master=False)  # type: ignore[attr-defined]
    me = make_rank(rank, world_size, client, build_timeout_s=2.0)
    me.ring([0], 0).add(torch.ones(1))
    del store
    with pytest.raises(CommunicationError) as caught:
        me.ring([0], 1)
    with pytest.raises(CommunicationError, match="store"):
        roll_call(client, 2, 0, 1.0)
    return str(caught.value)


def test_a_store_that_is_gone_is_said_to_be() -> None:
    assert "the store" in run_ranks(lose_the_store, 1)[0]


def live_over_ipv6(rank: int, world_size: int) -> tuple[Fault, float] | None:
    me = make_rank(rank, world_size, address="::1")
    ring = me.ring(list(range(world_size)), 0)
    ring.add(torch.ones(1))
    if rank == 1:
        say("killed")
        os.kill(os.getpid(), signal.SIGKILL)
    return me.fault(), time.monotonic() - hear("killed")


def test_a_kill_is_known_over_ipv6_too() -> None:
    result = run_ranks(live_over_ipv6, 2, may_die=(1,))[0]

    assert result is not None
    assert result[0].suspects == (1,)
    assert result[1] < 1.0
