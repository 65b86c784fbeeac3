"""Stages of one epoch over real Gloo: messages, rings, deadlines, and their end."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from geartrain.collectives.exchange.gloo_group import TransportSettings
from geartrain.collectives.exchange.gloo_transport import GlooTransport
from geartrain.collectives.exchange.membership import Membership
from geartrain.errors import CommunicationError, ConfigError
from local_ranks import run_ranks


def make_transport(
    rank: int, world_size: int, epoch: int = 0, **settings: object
) -> GlooTransport:
    store = dist.distributed_c10d._get_default_store()
    membership = Membership(
        epoch=epoch, me=rank, member_ids=tuple(f"cpu#{r}" for r in range(world_size))
    )
    return GlooTransport(store, membership, TransportSettings(**settings))  # type: ignore[arg-type]  # any of them


def swap_many(rank: int, world_size: int, full_mesh_up_to: int, address: str) -> bool:
    """Two hundred messages of odd sizes under way at once, both ways."""
    transport = make_transport(
        rank, world_size, full_mesh_up_to=full_mesh_up_to, address=address
    )
    stage = transport.stage("swap", range(world_size))
    sizes = [(37 * k) % 1001 for k in range(100)]
    to, source = (rank + 1) % world_size, (rank - 1) % world_size
    sends = [stage.send(torch.full((n,), 1000.0 * rank + n), to) for n in sizes]
    received = [torch.zeros(n) for n in sizes]
    handles = [stage.receive(tensor, source) for tensor in received]
    for handle in handles + sends:
        handle.wait()
    transport.close()
    return all(bool((t == 1000.0 * source + t.numel()).all()) for t in received)


@pytest.mark.parametrize("full_mesh_up_to", [64, 2], ids=["full mesh", "lazy"])
@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_messages_arrive_whole_and_in_order(full_mesh_up_to: int, address: str) -> None:
    assert run_ranks(swap_many, 3, full_mesh_up_to, address) == [True] * 3


def ring_in_another_order(rank: int, world_size: int) -> list[float]:
    transport = make_transport(rank, world_size)
    tensor = torch.arange(5.0) * (rank + 1)
    transport.stage("ring", [2, 0, 1]).all_reduce(tensor).wait()
    message = torch.tensor([float(rank)], dtype=torch.float64)
    pair = transport.stage("pair", [1, 0]) if rank < 2 else None
    if rank == 0 and pair:
        pair.send(message, 1).wait()
    elif rank == 1 and pair:
        pair.receive(message, 0).wait()
    return [*tensor.tolist(), message.item()]


def test_a_stage_may_have_some_members_and_any_order() -> None:
    sums = [0.0, 6.0, 12.0, 18.0, 24.0]

    assert run_ranks(ring_in_another_order, 3) == [[*sums, 0.0], [*sums, 0.0], [*sums, 2.0]]


def abort_while_waiting(rank: int, world_size: int, address: str) -> tuple[float, str]:
    """Rank 0 aborts while all wait for messages that never come."""
    transport = make_transport(rank, world_size, address=address)
    stage = transport.stage("wait", range(world_size))
    ready = transport.stage("ready", range(world_size))
    handle = stage.receive(torch.zeros(8), (rank + 1) % world_size)
    ready.all_reduce(torch.ones(1)).wait()
    started_at_s = time.monotonic()
    if rank == 0:
        threading.Timer(0.1, transport.abort, args=("rank 0 says so",)).start()
    with pytest.raises(CommunicationError) as caught:
        handle.wait()
    waited_s = time.monotonic() - started_at_s
    with pytest.raises(CommunicationError, match="epoch 0 is over"):
        stage.send(torch.zeros(8), (rank + 1) % world_size)
    with pytest.raises(CommunicationError, match="epoch 0 is over"):
        transport.stage("other", range(world_size))
    transport.abort("again")
    return waited_s, str(caught.value)


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_abort_wakes_all_waiters_here_and_there(address: str) -> None:
    results = run_ranks(abort_while_waiting, 3, address)

    assert all(waited_s < 1.0 for waited_s, _ in results)
    assert "rank 0 says so" in results[0][1]
    assert "receiving 32 bytes from cpu#2" in results[1][1]


def abort_half_way(rank: int, world_size: int) -> tuple[float, int]:
    """The receiver aborts as soon as the first bytes of a long message are there."""
    transport = make_transport(rank, world_size, timeout_s=1.0)
    stage = transport.stage("long", range(world_size))
    if rank == 0:
        handle = stage.send(torch.ones(2**28, dtype=torch.uint8), 1)
    else:
        received = torch.zeros(2**28, dtype=torch.uint8)
        handle = stage.receive(received, 0)
        ends_at_s = time.monotonic() + 10.0
        while received[0] == 0 and time.monotonic() < ends_at_s:
            threading.Event().wait(0.0001)
        assert received[0] == 1
        transport.abort("enough")
        assert received[-1] == 0
    started_at_s = time.monotonic()
    with pytest.raises(CommunicationError, match="epoch 0 is over"):
        handle.wait()
    waited_s = time.monotonic() - started_at_s
    del handle
    return waited_s, wait_until_dropped()


def wait_until_dropped(deadline_s: float = 10.0) -> int:
    """Groups that are still being dropped after the deadline."""
    ends_at_s = time.monotonic() + deadline_s
    dropping = [t for t in threading.enumerate() if t.name == "drop group"]
    for thread in dropping:
        thread.join(max(0.0, ends_at_s - time.monotonic()))
    return sum(thread.is_alive() for thread in dropping)


def test_who_waits_for_a_message_that_was_half_way_ends_by_the_outer_limit() -> None:
    for waited_s, num_dropping in run_ranks(abort_half_way, 2):
        assert waited_s < 3.0
        assert num_dropping == 0


def talk_to_the_deaf(rank: int, world_size: int, dies: bool) -> list[float]:
    """Rank 2 makes the stage and never talks: pairs with it are never connected."""
    transport = make_transport(rank, world_size, full_mesh_up_to=1)
    stage = transport.stage("deaf", range(world_size))
    store = dist.distributed_c10d._get_default_store()
    if rank == 2:
        store.set("there", "1")
        if dies:
            os.kill(os.getpid(), signal.SIGKILL)
        store.wait(["done/0", "done/1"])
        return []
    store.wait(["there"])
    handles = [
        stage.send(torch.ones(10), 2),
        stage.receive(torch.ones(10), 2),
        stage.all_reduce(torch.ones(10)),
    ]
    threading.Timer(0.3, transport.abort, args=("enough",)).start()
    started_at_s = time.monotonic()
    waited_s = []
    for handle in handles:
        with pytest.raises(CommunicationError, match="epoch 0 is over"):
            handle.wait()
        waited_s.append(time.monotonic() - started_at_s)
    store.set(f"done/{rank}", "1")
    return waited_s


@pytest.mark.parametrize("dies", [False, True])
def test_abort_wakes_who_waits_for_a_pair_that_never_connects(dies: bool) -> None:
    results = run_ranks(talk_to_the_deaf, 3, dies, may_die=(2,))

    assert all(waited_s < 2.0 for waited_s in results[0] + results[1])


def lose_a_peer(rank: int, world_size: int) -> tuple[float, str]:
    transport = make_transport(rank, world_size)
    stage = transport.stage("wait", range(world_size))
    handle = stage.all_reduce(torch.ones(1))
    handle.wait()
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    started_at_s = time.monotonic()
    with pytest.raises(CommunicationError) as caught:
        stage.all_reduce(torch.ones(100_000)).wait()
    return time.monotonic() - started_at_s, str(caught.value)


def test_a_killed_peer_frees_the_members_that_are_not_next_to_it() -> None:
    results = run_ranks(lose_a_peer, 5, may_die=(2,))

    survivors = [result for rank, result in enumerate(results) if rank != 2]
    assert all(waited_s < 1.0 for waited_s, _ in survivors)
    assert all("epoch 0 is over" in text and "cpu#2" in text for _, text in survivors)


def wait_for_nobody(rank: int, world_size: int) -> tuple[float, str]:
    transport = make_transport(rank, world_size, build_timeout_s=0.5)
    if rank > 0:
        return 0.0, ""
    started_at_s = time.monotonic()
    with pytest.raises(CommunicationError) as caught:
        transport.stage("lonely", range(world_size))
    return time.monotonic() - started_at_s, str(caught.value)


def test_a_stage_that_some_do_not_ask_for_ends_by_its_deadline() -> None:
    waited_s, text = run_ranks(wait_for_nobody, 2)[0]

    assert 0.4 < waited_s < 2.0
    assert "stage lonely with cpu#1 could not be made within 0.5 s" in text


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def running_threads() -> int:
    """Gloo's own too."""
    return len(list(Path("/proc/self/task").iterdir()))


def wait_until_few(limit: int, deadline_s: float = 10.0) -> int:
    """Groups are dropped in threads of their own: wait for those by polling the kernel."""
    ends_at_s = time.monotonic() + deadline_s
    while open_files() > limit and time.monotonic() < ends_at_s:
        threading.Event().wait(0.01)
    return open_files()


def receive_until_aborted(transport: GlooTransport, rank: int) -> None:
    stage = transport.stage("b", [0, 1])
    if rank == 0:
        threading.Thread(target=transport.abort, args=("enough",)).start()
    stage.receive(torch.ones(10), 1 - rank).wait()


def many_epochs(rank: int, world_size: int) -> tuple[int, int, int, int]:
    def one(epoch: int) -> None:
        transport = make_transport(rank, world_size, epoch)
        tensor = torch.ones(10)
        transport.stage("a", range(world_size)).all_reduce(tensor).wait()
        with pytest.raises(CommunicationError):
            receive_until_aborted(transport, rank)

    for epoch in range(3):
        one(epoch)
    files, tasks = wait_until_few(0, 0.3), running_threads()
    for epoch in range(3, 100):
        one(epoch)
    gc.collect()  # an error that was caught keeps its frames
    left = wait_until_few(files)
    return files, left, tasks, running_threads()


def test_a_hundred_epochs_leave_no_socket_and_no_thread() -> None:
    for files, left, tasks, tasks_left in run_ranks(many_epochs, 2, timeout_s=100.0):
        assert left <= files
        assert tasks_left <= tasks


def test_a_stage_without_this_process_is_refused() -> None:
    membership = Membership(epoch=0, me=0, member_ids=("a", "b"))

    with pytest.raises(ConfigError, match="must be distinct and hold 0"):
        GlooTransport(dist.HashStore(), membership).stage("x", [1])  # type: ignore[attr-defined]


def send_strange_tensors(rank: int, world_size: int) -> bool:
    transport = make_transport(rank, world_size)
    stage = transport.stage("types", range(world_size))
    same = True
    for dtype in (torch.bfloat16, torch.float16, torch.uint8, torch.float8_e4m3fn):
        sent = torch.arange(6).to(dtype).reshape(2, 3)
        if rank == 0:
            stage.send(sent, 1).wait()
        else:
            received = torch.zeros(2, 3).to(dtype)
            stage.receive(received, 0).wait()
            same &= torch.equal(received.float(), sent.float())
    with pytest.raises(ConfigError, match="contiguous"):
        stage.send(torch.zeros(4, 4).T[:2], 1 - rank)
    return same


def test_any_dtype_and_shape_is_sent_as_it_is() -> None:
    assert all(run_ranks(send_strange_tensors, 2))
