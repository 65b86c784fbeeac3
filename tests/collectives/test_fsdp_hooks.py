"""FSDP2 on CPU, sharded inside two emulated hosts of two ranks, summed between them."""

from __future__ import annotations

from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from geartrain.collectives import fsdp_hooks, job_network
from geartrain.errors import CommunicationError, ConfigError
from geartrain.topology.host_identity import make_host_identity
from geartrain.topology.profile import LinkProfile, Tier, Topology
from local_ranks import run_ranks

NUM_STEPS = 3
RATE = 12.5e6


def host_of(rank: int) -> str:
    return make_host_identity(f"node{rank // 2}", "boot", str(rank // 2)).host_id


def two_racks() -> Topology:
    hosts = [host_of(0), host_of(2)]
    make_tier = partial(Tier, uplink_send_bytes_per_s=RATE, uplink_receive_bytes_per_s=RATE)
    tiers = [
        *(make_tier(kind="host", tier_id=host, member_ids=()) for host in hosts),
        *(
            make_tier(kind="rack", tier_id=f"rack of {host}", member_ids=(host,))
            for host in hosts
        ),
    ]
    links = [
        LinkProfile(source_id=one, target_id=two, bytes_per_s=RATE, latency_s=1e-4)
        for one, two in (hosts, hosts[::-1])
    ]
    return Topology(tiers=tuple(tiers), links=tuple(links), source="measured")


def make_net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 63), nn.Linear(63, 4))


def make_sharded(rank: int, *, pretends: bool = True) -> nn.Sequential:
    if pretends:
        identity = make_host_identity(f"node{rank // 2}", "boot", str(rank // 2))
        mock.patch.object(job_network, "read_host_identity", return_value=identity).start()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("hosts", "local"))
    model = make_net()
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh["local"])
    fully_shard(model, mesh=mesh["local"])
    return model


def samples(step: int, rows: slice) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(16, 8, generator=generator)
    return x[rows], torch.randint(0, 4, (16,), generator=generator)[rows]


def loss_of(model: nn.Module, step: int, rows: slice) -> torch.Tensor:
    x, y = samples(step, rows)
    return nn.functional.cross_entropy(model(x), y)


def whole(model: nn.Module) -> torch.Tensor:
    parts = [
        p.full_tensor() if isinstance(p, DTensor) else p.detach()
        for p in model.parameters()
    ]
    return torch.cat([part.detach().flatten() for part in parts])


def train_alone(num_micro: int) -> torch.Tensor:
    model = make_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(NUM_STEPS):
        torch.autograd.backward(loss_of(model, step, slice(0, 16)) * num_micro)
        optimizer.step()
        optimizer.zero_grad()
    return whole(model)


def train_sharded(rank: int, world_size: int) -> list[torch.Tensor]:
    """By means of equal shares; by two backwards a step; by uneven shares."""
    results = []
    bounds = (0, 1, 4, 8, 16)
    for how in ("once", "twice", "uneven"):
        model = make_sharded(rank)
        exchange = fsdp_hooks(model, topology=two_racks(), weighted=how == "uneven")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for step in range(NUM_STEPS):
            rows = slice(rank * 4, rank * 4 + 4)
            if how == "uneven":
                rows = slice(bounds[rank], bounds[rank + 1])
                exchange.set_weight(rows.stop - rows.start)
            for _ in range(2 if how == "twice" else 1):
                torch.autograd.backward(loss_of(model, step, rows))
            optimizer.step()
            optimizer.zero_grad()
        assert exchange.collective is not None
        assert len(exchange.collective.observations()) >= 3 * NUM_STEPS
        results.append(whole(model))
        exchange.close()
    return results


def test_trains_as_one_device_whatever_the_shares() -> None:
    ranks = run_ranks(train_sharded, 4)

    for results in ranks:
        for result, num_micro in zip(results, (1, 2, 1), strict=True):
            torch.testing.assert_close(result, train_alone(num_micro), rtol=0, atol=1e-6)


def train_coded(rank: int, world_size: int, compression: str | None) -> Any:
    model = make_sharded(rank)
    exchange = fsdp_hooks(model, topology=two_racks(), compression=compression)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(NUM_STEPS):
        torch.autograd.backward(loss_of(model, step, slice(rank * 4, rank * 4 + 4)))
        optimizer.step()
        optimizer.zero_grad()
    assert exchange.collective is not None
    return whole(model), {seen.codec for seen in exchange.collective.observations()}


def test_only_shards_between_hosts_are_coded() -> None:
    results = run_ranks(train_coded, 4, "int8")

    exact = train_alone(1)
    moved = (exact - whole(make_net())).norm()
    for coded, codecs in results:
        assert codecs == {"int8"}
        assert torch.equal(coded, results[0][0])
        assert 0 < (coded - exact).norm() < 0.02 * moved


def refuse(rank: int, world_size: int) -> None:
    with pytest.raises(ConfigError, match="fully_shard"):
        fsdp_hooks(make_net())
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("hosts", "local"))
    both = make_net()
    fully_shard(both, mesh=mesh)
    with pytest.raises(ConfigError, match="2 dimensions"):
        fsdp_hooks(both)
    model = make_sharded(rank, pretends=False)
    exchange = fsdp_hooks(model)
    with pytest.raises(ConfigError, match="weighted=True"):
        exchange.set_weight(3)
    loss = loss_of(model, 0, slice(0, 4))
    exchange.close()
    with pytest.raises(CommunicationError, match="was closed"):
        torch.autograd.backward(loss)


def test_wrong_uses_are_refused() -> None:
    run_ranks(refuse, 4)
