"""Plain DDP with geartrain's exchange trains as DDP does, and overlaps."""

from __future__ import annotations

import os
import signal
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import geartrain.collectives
from geartrain.collectives import DdpExchange, ddp_hook, job_network
from geartrain.errors import CommunicationError, ConfigError
from geartrain.planner.exchange.schedule import EXACT
from geartrain.topology.host_identity import make_host_identity
from geartrain.topology.profile import LinkProfile, Tier, Topology
from local_ranks import run_ranks

NUM_STEPS = 4


class Net(nn.Module):
    """Two hundred kilobytes in a few layers, and a part that is never used."""

    def __init__(self, *, has_unused: bool = False) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(8, 128), nn.Tanh(), nn.Linear(128, 256), nn.Tanh(), nn.Linear(256, 4)
        )
        if has_unused:
            self.unused = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.layers(x)
        return output


def make_model(*, has_unused: bool = False, **options: Any) -> DistributedDataParallel:
    torch.manual_seed(0)
    model = Net(has_unused=has_unused)
    return DistributedDataParallel(model, bucket_cap_mb=0.01, **options)


def samples(step: int, rows: slice) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(16, 8, generator=generator)
    y = torch.randint(0, 4, (16,), generator=generator)
    return x[rows], y[rows]


def flat(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def gradient_of(model: nn.Module) -> torch.Tensor:
    grads = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
    return torch.cat(grads)


def train(
    rank: int, world_size: int, options: dict[str, Any], *, hooked: bool, num_micro: int = 1
) -> torch.Tensor:
    """Four steps of equal shares, of so many micro-batches each."""
    model = make_model(**options)
    exchange = ddp_hook(model) if hooked else None
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    width = 16 // world_size // num_micro
    for step in range(NUM_STEPS):
        for micro in range(num_micro):
            model.require_backward_grad_sync = micro == num_micro - 1
            start = (rank * num_micro + micro) * width
            x, y = samples(step, slice(start, start + width))
            torch.autograd.backward(nn.functional.cross_entropy(model(x), y) / num_micro)
        optimizer.step()
        optimizer.zero_grad()
    if exchange is not None:
        exchange.close()
    return flat(model)


OPTIONS: list[dict[str, Any]] = [
    {"gradient_as_bucket_view": False},
    {"gradient_as_bucket_view": True},
    {"find_unused_parameters": True, "has_unused": True},
    {"static_graph": True},
]


def train_all_ways(rank: int, world_size: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    results = []
    for options in OPTIONS:
        for num_micro in (1, 2) if options == OPTIONS[1] else (1,):
            both = [
                train(rank, world_size, options, hooked=hooked, num_micro=num_micro)
                for hooked in (False, True)
            ]
            results.append((both[0], both[1]))
    return results


def test_trains_as_plain_ddp_with_the_same_bits_on_all_ranks() -> None:
    ranks = run_ranks(train_all_ways, 2)

    for (plain, ours), (_, others) in zip(ranks[0], ranks[1], strict=True):
        torch.testing.assert_close(ours, plain, rtol=0, atol=1e-6)
        assert torch.equal(ours, others)


def train_alone(rank: int, world_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    plain = train(rank, world_size, {}, hooked=False)
    return plain, train(rank, world_size, {}, hooked=True)


def test_one_rank_trains_as_without_the_hook() -> None:
    ((plain, ours),) = run_ranks(train_alone, 1)

    assert torch.equal(plain, ours)


# -- weights --------------------------------------------------------------------------

SHARES = {0: slice(0, 5), 1: slice(5, 16)}


def count(x: torch.Tensor) -> float:
    return float(len(x))


def train_unevenly(rank: int, world_size: int, how: str) -> torch.Tensor:
    """Means over 5 and 11 samples; the last batch has 5 and 2."""
    model = make_model()
    exchange = ddp_hook(model, weight=count if how == "function" else 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(NUM_STEPS):
        rows = slice(5, 7) if step == NUM_STEPS - 1 and rank else SHARES[rank]
        x, y = samples(step, rows)
        if how == "number":
            exchange.set_weight(len(x))
        torch.autograd.backward(nn.functional.cross_entropy(model(x), y))
        optimizer.step()
        optimizer.zero_grad()
    return flat(model)


@pytest.mark.parametrize("how", ["function", "number"])
def test_weights_make_it_the_mean_over_samples(how: str) -> None:
    torch.manual_seed(0)
    alone = Net()
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
    for step in range(NUM_STEPS):
        x, y = samples(step, slice(0, 7 if step == NUM_STEPS - 1 else 16))
        torch.autograd.backward(nn.functional.cross_entropy(alone(x), y))
        optimizer.step()
        optimizer.zero_grad()

    first, second = run_ranks(train_unevenly, 2, how)

    torch.testing.assert_close(first, flat(alone), rtol=0, atol=1e-6)
    assert torch.equal(first, second)


def spoil_one_rank(rank: int, world_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rank 1 has no samples and NaN for gradients; then nobody has any."""
    model = make_model()
    exchange = ddp_hook(model, weight=1)
    gradients = []
    for numbers in ((4, 0), (0, 0)):
        exchange.set_weight(numbers[rank])
        x, y = samples(0, slice(0, 4))
        loss = nn.functional.cross_entropy(model(x), y)
        torch.autograd.backward(loss * (float("nan") if rank else 1.0))
        gradients.append(gradient_of(model))
        model.zero_grad()
    return gradients[0], gradients[1]


def test_a_rank_of_weight_zero_is_not_read() -> None:
    results = run_ranks(spoil_one_rank, 2)
    torch.manual_seed(0)
    alone = Net()
    x, y = samples(0, slice(0, 4))
    torch.autograd.backward(nn.functional.cross_entropy(alone(x), y))
    expected = torch.cat(
        [p.grad.flatten() for p in alone.parameters() if p.grad is not None]
    )

    for weighted, nothing in results:
        torch.testing.assert_close(weighted, expected, rtol=0, atol=1e-6)
        assert not nothing.any()


# -- overlap --------------------------------------------------------------------------


def stay_ahead(rank: int, world_size: int) -> int:
    """Rank 1 begins its backward only when rank 0 has computed all of its own."""
    layers = [nn.Linear(8, 256), *(nn.Linear(256, 256) for _ in range(8))]
    model = DistributedDataParallel(nn.Sequential(*layers), bucket_cap_mb=0.2)
    exchange = ddp_hook(model)
    store = dist.distributed_c10d._get_default_store()
    num_queued = []
    x, _ = samples(0, slice(rank * 8, rank * 8 + 8))
    x.requires_grad_()

    def reach_the_inputs(_: torch.Tensor) -> None:
        # The gradient of the inputs comes last of all.
        waits = [one.pending for one in exchange._sent]
        num_queued.append(sum(not getattr(wait, "is_done", True) for wait in waits))
        store.set("computed", "1")

    for step in range(2):  # buckets are cut anew after the first
        if step == 1 and rank == 0:
            x.register_hook(reach_the_inputs)  # type: ignore[no-untyped-call]  # torch's
        loss = model(x).sum()
        if step == 1 and rank == 1:
            store.wait(["computed"])
        torch.autograd.backward(loss)
        model.zero_grad()
    return num_queued[0] if rank == 0 else 0


def test_backward_goes_on_while_buckets_are_exchanged() -> None:
    num_under_way, _ = run_ranks(stay_ahead, 2)

    assert num_under_way >= 2


# -- failures -------------------------------------------------------------------------


def lose_a_peer(rank: int, world_size: int) -> list[str]:
    model = make_model()
    exchange = ddp_hook(model, timeout_s=20)
    store = dist.distributed_c10d._get_default_store()
    x, y = samples(0, slice(0, 4))
    torch.autograd.backward(nn.functional.cross_entropy(model(x), y))
    loss = nn.functional.cross_entropy(model(x), y)
    if rank == 1:
        store.set("about to die", "1")
        os.kill(os.getpid(), signal.SIGKILL)
    store.wait(["about to die"])
    messages = []
    with pytest.raises(CommunicationError, match="rank 1") as caught:
        torch.autograd.backward(loss)
    messages.append(str(caught.value))
    exchange.close()
    return messages


def test_a_lost_peer_is_a_communication_error_in_backward() -> None:
    results = run_ranks(lose_a_peer, 2, may_die=(1,))

    assert "drop them" in results[0][0]


def use_after_close(rank: int, world_size: int) -> None:
    model = make_model()
    ddp_hook(model).close()
    x, y = samples(0, slice(0, 4))
    loss = nn.functional.cross_entropy(model(x), y)
    with pytest.raises(CommunicationError, match="was closed"):
        torch.autograd.backward(loss)


def test_a_closed_exchange_says_so() -> None:
    run_ranks(use_after_close, 2)


def disagree(rank: int, world_size: int) -> None:
    model = make_model()
    with pytest.raises(ConfigError, match="chose"):
        ddp_hook(model, compression="int8" if rank else None)
    exchange = ddp_hook(model)
    with pytest.raises(ConfigError, match="weight=1"):
        exchange.set_weight(3)
    with pytest.raises(ConfigError, match="no further hook"):
        ddp_hook(model)


def test_wrong_uses_are_refused() -> None:
    run_ranks(disagree, 2)

    with pytest.raises(ConfigError, match="wrap the model first"):
        ddp_hook(nn.Linear(2, 2))


# -- between hosts --------------------------------------------------------------------


def two_hosts() -> Topology:
    """Two racks of one host, over 100 Mbit/s."""
    hosts = [host_id(rank) for rank in range(2)]
    rate = 12.5e6
    tiers = [
        Tier(
            kind="host",
            tier_id=host,
            member_ids=(),
            uplink_send_bytes_per_s=rate,
            uplink_receive_bytes_per_s=rate,
        )
        for host in hosts
    ] + [
        Tier(
            kind="rack",
            tier_id=f"rack{index}",
            member_ids=(host,),
            uplink_send_bytes_per_s=rate,
            uplink_receive_bytes_per_s=rate,
        )
        for index, host in enumerate(hosts)
    ]
    links = [
        LinkProfile(source_id=one, target_id=two, bytes_per_s=rate, latency_s=1e-4)
        for one, two in (hosts, hosts[::-1])
    ]
    return Topology(tiers=tuple(tiers), links=tuple(links), source="measured")


def host_id(rank: int) -> str:
    return make_host_identity(f"node{rank}", "boot", str(rank)).host_id


def train_between_hosts(
    rank: int, world_size: int, compression: str | None
) -> tuple[torch.Tensor, set[str]]:
    identity = make_host_identity(f"node{rank}", "boot", str(rank))
    mock.patch.object(job_network, "read_host_identity", return_value=identity).start()
    model = make_model()
    exchange = ddp_hook(model, compression=compression, topology=two_hosts())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(NUM_STEPS):
        x, y = samples(step, slice(rank * 8, rank * 8 + 8))
        torch.autograd.backward(nn.functional.cross_entropy(model(x), y))
        optimizer.step()
        optimizer.zero_grad()
    assert exchange.collective is not None
    codecs = {observed.codec for observed in exchange.collective.observations()}
    assert exchange.bucket_cap_mb(0.1) < 25
    return flat(model), codecs


def test_gradients_between_hosts_travel_in_the_codec_asked_for() -> None:
    exact = run_ranks(train_between_hosts, 2, None)
    coded = run_ranks(train_between_hosts, 2, "int8")

    assert exact[0][1] == {EXACT}
    assert "int8" in coded[0][1]
    for results in (exact, coded):
        assert torch.equal(results[0][0], results[1][0])
    moved = (exact[0][0] - flat(make_unwrapped())).norm()
    assert 0 < (coded[0][0] - exact[0][0]).norm() < 0.02 * moved


def make_unwrapped() -> Net:
    torch.manual_seed(0)
    return Net()


def test_the_package_offers_its_hooks_by_name() -> None:
    assert geartrain.collectives.ddp_hook is ddp_hook
    assert geartrain.collectives.DdpExchange is DdpExchange
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        geartrain.collectives.nothing  # noqa: B018 - the access is the test
