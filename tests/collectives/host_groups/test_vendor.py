"""Vendor groups, with Gloo over loopback where a vendor's library would be.

Everything but the library is the code that runs on accelerators.
"""

import os
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore

from geartrain.collectives.host_groups.meeting import Meeting
from geartrain.collectives.host_groups.vendor import VendorGroup, VendorLinks
from geartrain.collectives.host_groups.vendor_link import make_link
from geartrain.errors import CommunicationError, ConfigError
from local_ranks import run_ranks


def make_group(rank: int, world_size: int, timeout_s: float = 20.0) -> VendorGroup:
    store = dist.distributed_c10d._get_default_store()
    links = VendorLinks(
        reduce=make_link("gloo", PrefixStore("r", store), rank, world_size, timeout_s),
        publish=make_link("gloo", PrefixStore("p", store), rank, world_size, timeout_s),
    )
    names = tuple(f"device {i}" for i in range(world_size))
    meeting = Meeting(store=PrefixStore("m", store), names=names, index=rank)
    return VendorGroup(meeting, links, torch.device("cpu"))


def _sum_and_publish(rank: int, world_size: int) -> list[tuple[Any, float, torch.Tensor]]:
    group = make_group(rank, world_size)
    outcomes = []
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        for size in (0, 1, 1001, 1_500_001):
            weight = 0.0 if rank == 1 else 0.5
            parts = [
                torch.randn(size, generator=torch.Generator().manual_seed(r)).to(dtype)
                for r in range(world_size)
            ]
            tensor = parts[rank].clone() if weight else torch.full_like(parts[0], torch.nan)
            running = group.open(tensor, [(0, size // 3), (size // 3, size)], weight)
            for index in range(2):
                running.reduce(index)
            if running.host_tensor is not None:  # the other hosts' part
                running.host_tensor.add_(1.0)
            for index in range(2):
                running.publish(index)
            running.finish()
            exact = sum(p.double() * 0.5 for r, p in enumerate(parts) if r != 1) + 1.0
            error = float((tensor.double() - exact).abs().max()) if size else 0.0
            outcomes.append((dtype, error, tensor[:100].clone()))
    group.close()
    return outcomes


def test_vendors_sum_reaches_the_leader_and_comes_back_to_all() -> None:
    by_rank = run_ranks(_sum_and_publish, 3)

    for outcomes in zip(*by_rank, strict=True):
        dtype, error, values = outcomes[0]
        assert error <= {torch.bfloat16: 0.02, torch.float32: 1e-6}.get(dtype, 1e-14)
        for _, _, other_values in outcomes[1:]:
            assert torch.equal(values, other_values)


def _die_in_the_middle(rank: int, world_size: int) -> tuple[float, str]:
    group = make_group(rank, world_size)
    store = dist.distributed_c10d._get_default_store()
    for round_index in range(10_000):
        if rank == 2 and round_index == 3:
            store.set("died", str(time.time()))
            os.kill(os.getpid(), 9)
        try:
            running = group.open(torch.ones(100_000), [(0, 100_000)])
            running.reduce(0)
            running.publish(0)
            running.finish()
        except CommunicationError as error:
            group.abort()
            return time.time() - float(store.get("died")), str(error)
    raise AssertionError


def test_killed_process_of_a_vendor_group_is_noticed() -> None:
    outcomes = run_ranks(_die_in_the_middle, 3, may_die=(2,))

    for waited_s, message in outcomes[:2]:
        assert waited_s < 5.0
        assert message


def test_library_that_this_torch_lacks_is_named() -> None:
    with pytest.raises(ConfigError, match="no hccl"):
        make_link("hccl", HashStore(), 0, 1, 5.0)
