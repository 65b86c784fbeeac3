"""Several real processes that add up in shared memory."""

import ctypes
import dataclasses
import itertools
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from geartrain.collectives.host_groups.meeting import Meeting
from geartrain.collectives.host_groups.shared_memory import SharedMemoryGroup
from geartrain.collectives.host_groups.shared_segment import SharedSegment
from geartrain.errors import CommunicationError, ConfigError
from local_ranks import run_ranks

_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def meeting(rank: int, world_size: int, key: str = "one") -> Meeting:
    store = PrefixStore(key, dist.distributed_c10d._get_default_store())
    names = tuple(f"process {i}" for i in range(world_size))
    return Meeting(store=store, names=names, index=rank)


def names_in(folder: str) -> set[str]:
    return {path.name for path in Path(folder).iterdir()}


def num_in(folder: str) -> int:
    return len(names_in(folder))


def part_of(rank: int, size: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    return torch.randn(size, generator=generator, dtype=torch.float64).to(dtype)


def expected_sum(
    world_size: int, size: int, dtype: torch.dtype, weights: list[float], seed: int = 0
) -> torch.Tensor:
    """In rank order, in float32 for 16 bits, rounded once."""
    wide = torch.float32 if dtype.itemsize == 2 else dtype
    terms = [
        part_of(r, size, dtype, seed).to(wide) * weights[r]
        if weights[r]
        else torch.zeros(size, dtype=wide)
        for r in range(world_size)
    ]
    total = terms[0].clone()
    for term in terms[1:]:
        total += term
    return total.to(dtype)


def exchange(
    group: SharedMemoryGroup, tensor: torch.Tensor, weight: float = 1.0, chunks: int = 3
) -> None:
    bounds = [i * tensor.numel() // chunks for i in range(chunks + 1)]
    ranges = list(itertools.pairwise(bounds))
    running = group.open(tensor, ranges, weight)
    for index in range(chunks):
        running.reduce(index)
        running.publish(index)
    running.finish()


def _sum_everything(rank: int, world_size: int, only_host: bool, shares: Any) -> int:
    group = SharedMemoryGroup(
        meeting(rank, world_size), only_host=only_host, slice_shares=shares
    )
    weights = [0.5, 0.0, 1.0, 0.125][:world_size]
    num_checked = 0
    for dtype in _DTYPES:
        # Chunks added by each, in slices, in several pieces; odd and empty ones.
        large = 3_000_001 if dtype == torch.bfloat16 else 130_003
        for size in (0, 1, 31, 1000, large):
            tensor = part_of(rank, size, dtype)
            if weights[rank] == 0:
                tensor[:] = torch.nan
            exchange(group, tensor, weights[rank])
            want = expected_sum(world_size, size, dtype, weights)
            assert torch.equal(tensor, want), (dtype, size)
            num_checked += 1
    group.close()
    return num_checked


@pytest.mark.parametrize("only_host", [True, False])
def test_sum_is_that_in_rank_order_whatever_dtype_size_and_weight(only_host: bool) -> None:
    assert run_ranks(_sum_everything, 3, only_host, None) == [20] * 3


def test_sum_has_the_same_bits_with_slices_of_unequal_size() -> None:
    assert run_ranks(_sum_everything, 4, True, [0.8, 0.0, 0.1, 0.8]) == [20] * 4


def _many_in_flight(rank: int, world_size: int) -> bool:
    """As the exchange does: sums in one thread, publishing in another, far behind."""
    group = SharedMemoryGroup(meeting(rank, world_size))
    sizes = [(i * 7919) % 30_011 for i in range(200)]
    tensors = [part_of(rank, size, torch.float32, i) for i, size in enumerate(sizes)]
    running = [
        group.open(t, [(0, t.numel() // 2), (t.numel() // 2, t.numel())], 0.5)
        for t in tensors
    ]
    for one in running:
        one.reduce(0)
        one.reduce(1)
    for one in running:
        if group.is_leader:  # another host's part comes in
            assert one.host_tensor is not None
            one.host_tensor.add_(1.0)
        one.publish(0)
        one.publish(1)
        one.finish()
    for i, (tensor, size) in enumerate(zip(tensors, sizes, strict=True)):
        want = expected_sum(world_size, size, torch.float32, [0.5] * world_size, i) + 1
        assert torch.equal(tensor, want), i
    return True


def test_200_tensors_of_odd_sizes_in_flight() -> None:
    assert all(run_ranks(_many_in_flight, 3))


def _leader_only_has_memory_for_16_bits(rank: int, world_size: int) -> Any:
    group = SharedMemoryGroup(meeting(rank, world_size))
    tensor = torch.ones(100).bfloat16()
    running = group.open(tensor, [(0, 100)])
    running.reduce(0)
    host = running.host_tensor
    return None if host is None else (host.dtype, float(host.sum()))


def test_leader_gets_a_float32_host_tensor_for_16_bits() -> None:
    found = run_ranks(_leader_only_has_memory_for_16_bits, 2)

    assert found == [(torch.float32, 200.0), None]


def _gradient_of_a_model(rank: int, world_size: int) -> bool:
    group = SharedMemoryGroup(meeting(rank, world_size), only_host=True)
    tensor = torch.ones(10, requires_grad=True)
    exchange(group, tensor, 0.5)
    return bool((tensor == 1.0).all())


def test_tensor_that_requires_a_gradient_is_summed() -> None:
    assert all(run_ranks(_gradient_of_a_model, 2))


def _integers(rank: int, world_size: int) -> str:
    group = SharedMemoryGroup(meeting(rank, world_size))
    with pytest.raises(ConfigError) as caught:
        group.open(torch.zeros(3, dtype=torch.int32), [(0, 3)])
    return str(caught.value)


def test_integers_are_refused() -> None:
    assert "int32" in run_ranks(_integers, 2)[0]


def _unequal_tensors(rank: int, world_size: int) -> str:
    group = SharedMemoryGroup(meeting(rank, world_size), only_host=True)
    with pytest.raises(CommunicationError) as caught:
        exchange(group, torch.zeros(100 + rank), chunks=1)
    return str(caught.value)


def test_members_that_exchange_different_tensors_are_told() -> None:
    messages = run_ranks(_unequal_tensors, 2)

    assert any("exchanges 10" in message for message in messages)


def _die_in_the_middle(rank: int, world_size: int) -> tuple[float, str]:
    group = SharedMemoryGroup(meeting(rank, world_size), only_host=True)
    tensor = torch.zeros(3_000_000)
    store = dist.distributed_c10d._get_default_store()
    for round_index in range(10_000):
        if rank == 2 and round_index == 5:
            store.set("died", str(time.time()))
            os.kill(os.getpid(), 9)
        try:
            exchange(group, tensor)
        except CommunicationError as error:
            return time.time() - float(store.get("died")), str(error)
    raise AssertionError


def test_killed_member_is_noticed_by_all_and_named() -> None:
    outcomes = run_ranks(_die_in_the_middle, 4, may_die=(2,))

    for rank in (0, 1, 3):
        waited_s, message = outcomes[rank]
        assert waited_s < 2.0  # 0.1 s on a quiet machine
        assert "lost process 2" in message


def _abort_while_waiting(rank: int, world_size: int) -> tuple[float, str]:
    group = SharedMemoryGroup(meeting(rank, world_size), only_host=True)
    store = dist.distributed_c10d._get_default_store()
    if rank == 0:
        store.wait(["waiting"])
        store.set("aborted", str(time.time()))
        group.abort()
        store.wait(["seen"])
        return 0.0, ""
    store.set("waiting", "1")
    with pytest.raises(CommunicationError) as caught:
        exchange(group, torch.zeros(10))
    waited_s = time.time() - float(store.get("aborted"))
    with pytest.raises(CommunicationError):
        group.open(torch.zeros(10), [(0, 10)])
    store.set("seen", "1")
    return waited_s, str(caught.value)


def test_abort_by_one_wakes_the_others() -> None:
    waited_s, message = run_ranks(_abort_while_waiting, 2)[1]

    assert waited_s < 1.0
    assert "aborted" in message


def _stop_after_a_death(rank: int, world_size: int) -> str:
    group = SharedMemoryGroup(meeting(rank, world_size), only_host=True)
    store = dist.distributed_c10d._get_default_store()
    if rank == 1:
        store.set("about to die", "")
        os.kill(os.getpid(), 9)
    store.wait(["about to die"])
    group.abort()  # as who heard of it from the network does
    message = ""
    deadline_at_s = time.monotonic() + 10
    # The kernel lets go of what the dead one held when its last thread has gone.
    while "lost" not in message and time.monotonic() < deadline_at_s:
        with pytest.raises(CommunicationError) as caught:
            group.open(torch.zeros(10), [(0, 10)])
        message = str(caught.value)
    return message


def test_who_died_is_named_also_where_the_end_was_only_asked_for() -> None:
    message = run_ranks(_stop_after_a_death, 2, may_die=[1])[0]

    assert "lost process 1 in the exchange" in message


def _wait_in_vain(rank: int, world_size: int) -> str:
    group = SharedMemoryGroup(
        dataclasses.replace(meeting(rank, world_size), timeout_s=0.2), only_host=True
    )
    store = dist.distributed_c10d._get_default_store()
    if rank == 1:
        store.wait(["given up"])
        return ""
    with pytest.raises(CommunicationError) as caught:
        exchange(group, torch.zeros(10))
    store.set("given up", "1")
    return str(caught.value)


def test_wait_has_an_outer_limit_and_names_who_is_waited_for() -> None:
    message = run_ranks(_wait_in_vain, 2)[0]

    assert "waited 0.2 s for process 1 to bring its gradients" in message


def _leave_early(rank: int, world_size: int) -> bool:
    group = SharedMemoryGroup(meeting(rank, world_size), only_host=True)
    tensor = torch.ones(2_000_000)
    exchange(group, tensor)
    group.close()
    group.close()
    with pytest.raises(CommunicationError):
        group.open(tensor, [(0, 10)])
    return bool((tensor == world_size).all())


def test_member_that_closes_first_does_not_disturb_the_others() -> None:
    assert all(run_ranks(_leave_early, 4))


def _mapped_files() -> list[str]:
    lines = Path("/proc/self/maps").read_text().splitlines()
    return [line for line in lines if "geartrain-exchange" in line]


def _map_and_drop(rank: int, world_size: int) -> tuple[int, int, int, bool]:
    before = num_in("/proc/self/fd")
    in_shm = names_in("/dev/shm")
    for epoch in range(20):
        group = SharedMemoryGroup(meeting(rank, world_size, f"epoch {epoch}"))
        exchange(group, torch.ones(1000))
        mapped = len(_mapped_files())
        group.close()
        del group
    after = num_in("/proc/self/fd")
    return (
        mapped,
        len(_mapped_files()),
        after - before,
        names_in("/dev/shm") <= in_shm,
    )


def test_20_epochs_leave_no_mapping_no_descriptor_and_no_file() -> None:
    for mapped, left, more_descriptors, is_clean in run_ranks(_map_and_drop, 2):
        assert mapped == 1
        assert left == 0
        assert more_descriptors <= 0
        assert is_clean


def _die_in_setup(rank: int, world_size: int, when: str) -> tuple[float, str]:
    if rank == 1 and when == "before":
        os.kill(os.getpid(), 9)
    if rank == 1 and when == "mapped":
        SharedSegment._map = lambda *_: os.kill(os.getpid(), 9)  # type: ignore[method-assign]
    if rank == 0 and when == "leader":
        SharedSegment._expect_mapped = lambda *_: os.kill(os.getpid(), 9)  # type: ignore[method-assign]
    began_at_s = time.monotonic()
    with pytest.raises(CommunicationError) as caught:
        SharedMemoryGroup(
            dataclasses.replace(meeting(rank, world_size), setup_timeout_s=2.0)
        )
    return time.monotonic() - began_at_s, str(caught.value)


@pytest.mark.parametrize(
    ("when", "victim", "limit_s"),
    [("before", 1, 4.0), ("mapped", 1, 1.5), ("leader", 0, 1.5)],
)
def test_member_killed_in_setup_fails_all_and_leaves_nothing(
    when: str, victim: int, limit_s: float
) -> None:
    before = names_in("/dev/shm")

    outcomes = run_ranks(_die_in_setup, 3, when, may_die=(victim,))

    assert names_in("/dev/shm") <= before
    for rank in {0, 1, 2} - {victim}:
        assert outcomes[rank][0] < limit_s
        assert outcomes[rank][1]


def _end_in_setup(rank: int, world_size: int) -> tuple[float, str]:
    ended = threading.Event()
    store = dist.distributed_c10d._get_default_store()
    if rank == 2:  # never comes
        store.wait(["gave up 0", "gave up 1"])
        return 0.0, ""
    threading.Timer(0.2, ended.set).start()
    began_at_s = time.monotonic()
    with pytest.raises(CommunicationError) as caught:
        SharedMemoryGroup(dataclasses.replace(meeting(rank, world_size), ended=ended))
    store.set(f"gave up {rank}", "1")
    return time.monotonic() - began_at_s, str(caught.value)


def test_setup_ends_when_the_epoch_does() -> None:
    for waited_s, message in run_ranks(_end_in_setup, 3)[:2]:
        assert waited_s < 2.0
        assert "process" in message


def _in_another_namespace(rank: int, world_size: int) -> str:
    if rank == 1:
        clone_newnet = 0x40000000
        assert ctypes.CDLL(None, use_errno=True).unshare(clone_newnet) == 0
    with pytest.raises(CommunicationError) as caught:
        SharedMemoryGroup(
            dataclasses.replace(meeting(rank, world_size), setup_timeout_s=1.0)
        )
    return str(caught.value)


@pytest.mark.root
def test_process_in_another_network_namespace_is_told() -> None:
    messages = run_ranks(_in_another_namespace, 2)

    assert "waiting for process 1" in messages[0]
    assert "is it in this network namespace?" in messages[1]


def _settings_differ(rank: int, world_size: int) -> str:
    with pytest.raises(CommunicationError) as caught:
        SharedMemoryGroup(
            dataclasses.replace(meeting(rank, world_size), setup_timeout_s=2.0),
            only_host=rank == 0,
        )
    return str(caught.value)


def test_members_with_different_settings_are_told() -> None:
    assert "same settings" in run_ranks(_settings_differ, 2)[1]
