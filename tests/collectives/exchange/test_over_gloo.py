"""The real thing: processes, Gloo's sockets, shared memory, killed peers."""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import resource
import signal
import time

import pytest
import torch
import torch.distributed as dist

from collectives.exchange.memory_network import one_size, racks_of
from geartrain.collectives.codecs.registry import make_codec
from geartrain.collectives.exchange.gloo_transport import GlooTransport
from geartrain.collectives.exchange.membership import Membership
from geartrain.collectives.exchange.pending_exchange import PendingExchange
from geartrain.collectives.exchange.scheduled_collective import (
    ExchangeSettings,
    ScheduledCollective,
)
from geartrain.collectives.gradient_buckets import GradientBuckets
from geartrain.collectives.host_groups.choose import HostMember, make_host_group
from geartrain.errors import CommunicationError
from geartrain.planner.exchange.schedule import CommSchedule, ScheduleBook
from local_ranks import run_ranks

Sizes = tuple[tuple[int, ...], ...]


def book_of(
    sizes: Sizes, algorithm: str, num_chunks: int = 4, codec: str = "none"
) -> ScheduleBook:
    racks = racks_of(sizes, codecs=[codec] * len(sizes))
    leaders = tuple(leader for rack in racks for leader in rack.leaders)
    return one_size(
        CommSchedule(
            algorithm=algorithm,  # type: ignore[arg-type]  # pickled as text
            num_members=sum(map(sum, sizes)),
            racks=racks,
            ring_order=leaders[::-1] if algorithm == "ring" else (),
            num_chunks=num_chunks,
        )
    )


def exchange(
    rank: int, world_size: int, book: ScheduleBook, timeout_s: float = 30.0
) -> tuple[ScheduledCollective, GlooTransport]:
    store = dist.distributed_c10d._get_default_store()
    names = tuple(f"w{i}" for i in range(world_size))
    transport = GlooTransport(store, Membership(epoch=1, me=rank, member_ids=names))
    hosts = [host for rack in book.schedules[0].racks for host in rack.hosts]
    host = next(host for host in hosts if rank in host)
    group = make_host_group(
        [HostMember(name=names[i]) for i in host],
        host.index(rank),
        dist.PrefixStore(f"host/{host[0]}", store),  # type: ignore[attr-defined]
        only_host=len(hosts) == 1,
    )
    settings = ExchangeSettings(make_codec=make_codec, timeout_s=timeout_s)
    return ScheduledCollective(transport, group, book, names, settings), transport


def _sum_everything(rank: int, world_size: int, book: ScheduleBook) -> str:
    member, transport = exchange(rank, world_size, book)
    dtypes = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
    digest = hashlib.sha256()
    tensors = []
    for i, num_elements in enumerate((0, 1, 7, 1000, 100_003)):
        for dtype in dtypes:
            values = torch.arange(num_elements) % 8 + rank + i
            tensors.append(values.to(dtype))
    random = torch.randn(50_001, generator=torch.Generator().manual_seed(rank))
    pending = [member.all_reduce(tensor, 0.5) for tensor in [*tensors, random]]
    for sent in pending:
        sent.wait()
    for i, tensor in enumerate(tensors):
        expected = torch.arange(tensor.numel()) % 8 + i // len(dtypes)
        expected = 0.5 * (world_size * expected + sum(range(world_size)))
        assert torch.equal(tensor, expected.to(tensor.dtype)), (i, tensor[:9], expected[:9])
    digest.update(random.numpy().tobytes())
    coded = torch.randn(50_001, generator=torch.Generator().manual_seed(rank))
    member.all_reduce(coded, key="gradient").wait()
    digest.update(coded.numpy().tobytes())
    dist.barrier()
    assert member.close()
    transport.close()
    return digest.hexdigest()


@pytest.mark.parametrize(
    ("sizes", "algorithm", "codec"),
    [
        (((1,), (1,)), "hierarchical", "int8"),
        (((1, 1), (1, 1, 1)), "hierarchical", "int8"),
        (((1, 1), (1,), (1,)), "hierarchical", "fp16"),
        (((1, 1), (1, 1)), "leader", "none"),
        (((1, 1, 1),), "ring", "none"),
        (((2,), (2,)), "hierarchical", "none"),
        (((2,),), "local", "none"),
    ],
    ids=["two", "uneven", "three racks", "leader", "ring", "shared memory", "one host"],
)
def test_processes_get_the_exact_sum_with_the_same_bits(
    sizes: Sizes, algorithm: str, codec: str
) -> None:
    world_size = sum(map(sum, sizes))
    digests = run_ranks(_sum_everything, world_size, book_of(sizes, algorithm, codec=codec))

    assert len(set(digests)) == 1


def _sum_another_size(
    rank: int, world_size: int, book: ScheduleBook, sizes: tuple[int, ...]
) -> str:
    member, transport = exchange(rank, world_size, book, timeout_s=2.0)
    member.all_reduce(torch.ones(10)).wait()
    with pytest.raises(CommunicationError) as caught:
        member.all_reduce(torch.ones(sizes[rank])).wait()
    transport.abort("test ends")
    assert member.close()
    return str(caught.value)


@pytest.mark.parametrize("algorithm", ["hierarchical", "leader"])
def test_tensors_of_different_sizes_are_an_error_and_end_no_process(algorithm: str) -> None:
    book = book_of(((1,), (1,)), algorithm)

    for text in run_ranks(_sum_another_size, 2, book, (1000, 3000)):
        assert "gradient exchange failed" in text
        assert "waits for w" in text or "waiting for w" in text


def _die_in_the_middle(rank: int, world_size: int, book: ScheduleBook) -> tuple[str, float]:
    member, transport = exchange(rank, world_size, book)
    member.all_reduce(torch.ones(1000)).wait()
    dist.barrier()
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    began_at_s = time.monotonic()
    pending: list[PendingExchange] = []
    with contextlib.suppress(CommunicationError):  # the loss may be known already
        pending.extend(member.all_reduce(torch.ones(10**6)) for _ in range(4))
    for sent in pending:
        with pytest.raises(CommunicationError):
            sent.wait()
    with pytest.raises(CommunicationError) as caught:
        member.all_reduce(torch.ones(10**6))
    text = str(caught.value)
    took_s = time.monotonic() - began_at_s
    transport.abort("test ends")
    assert member.close()
    return text, took_s


def test_a_killed_peer_fails_all_that_is_under_way() -> None:
    sizes = ((1, 1), (1, 1))
    results = run_ranks(_die_in_the_middle, 4, book_of(sizes, "hierarchical"), may_die=(2,))

    survivors = [result for rank, result in enumerate(results) if rank != 2]
    assert all("gradient exchange failed" in text for text, _ in survivors)
    assert any("w2" in text for text, _ in survivors)
    assert max(took_s for _, took_s in survivors) < 20


def _train(rank: int, world_size: int, book: ScheduleBook) -> list[float]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1)
    )
    member, transport = exchange(rank, world_size, book)
    buckets = GradientBuckets(list(model.named_parameters()), bucket_bytes=512)
    buckets.collective = member
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs = torch.randn(12, 8, generator=torch.Generator().manual_seed(1))
    targets = inputs.sum(1, keepdim=True)
    mine = slice(0, 8) if rank == 0 else slice(8, 12)
    buckets.weight = (mine.stop - mine.start) / len(inputs)
    losses = []
    for _ in range(5):
        buckets.begin_step()
        # Two micro-batches, the buckets of the last one sent during backward.
        for part in (0, 1):
            if part == 1:
                buckets.send_during_backward()
            x, y = inputs[mine].chunk(2)[part], targets[mine].chunk(2)[part]
            loss = torch.nn.functional.mse_loss(model(x), y) / 2
            loss.backward()  # type: ignore[no-untyped-call]  # torch's
        buckets.send_rest()
        buckets.wait()
        optimizer.step()
        losses.append(torch.nn.functional.mse_loss(model(inputs), targets).item())
    dist.barrier()
    assert member.close()
    transport.close()
    return losses


def test_uneven_batches_train_as_one_device_would() -> None:
    results = run_ranks(_train, 2, book_of(((1,), (1,)), "hierarchical", num_chunks=2))

    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs = torch.randn(12, 8, generator=torch.Generator().manual_seed(1))
    targets = inputs.sum(1, keepdim=True)
    for step in range(5):
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(inputs), targets)
        loss.backward()  # type: ignore[no-untyped-call]  # torch's
        optimizer.step()
        alone = torch.nn.functional.mse_loss(model(inputs), targets).item()
        assert results[0][step] == results[1][step]
        assert math.isclose(results[0][step], alone, rel_tol=1e-5)


def _sum_400_mb(rank: int, world_size: int, book: ScheduleBook) -> float:
    member, transport = exchange(rank, world_size, book, timeout_s=120)
    member.all_reduce(torch.ones(1000)).wait()
    tensor = torch.full((100_000_000,), float(rank + 1))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    member.all_reduce(tensor).wait()
    extra_bytes = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    assert bool((tensor == sum(range(1, world_size + 1))).all())
    dist.barrier()
    assert member.close()
    transport.close()
    return extra_bytes / tensor.nbytes


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [((1,), (1,)), ((1, 1), (1,)), ((1,), (1,), (1,))])
def test_a_large_tensor_needs_little_memory_besides(sizes: Sizes) -> None:
    world_size = sum(map(sum, sizes))
    book = book_of(sizes, "hierarchical", num_chunks=16)

    extra = run_ranks(_sum_400_mb, world_size, book, timeout_s=170)

    assert max(extra) <= 1.5
