"""Plain DDP with geartrain's hook over a slow link: one rank's part."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import PrefixStore
from torch.nn.parallel import DistributedDataParallel

from geartrain.bench.comm.exactness import checksum
from geartrain.bench.comm.messages import OURS, Order, Report, Timing
from geartrain.bench.comm.worker import LabWorker
from geartrain.collectives import ddp_hook
from geartrain.collectives.ddp_exchange import DdpExchange

_WIDTH = 512
_DEPTH = 10
"""2.6 million parameters, 10.5 MB of gradients."""
_SAMPLES = 1536
_WARMUP_STEPS = 2
"""DDP makes its buckets anew after the first."""
_INTERFACE = "eth0"
_SEED = 11


def train_with_ddp(worker: LabWorker, order: Order) -> Report:
    """Time compute, exchange and whole steps in turn.

    Returns:
        Medians over ``order.repeats`` rounds of the slowest rank's times: ``forward_s``,
        ``compute_s`` (forward and backward), ``exchange_s`` (all gradients at once, after
        backward), ``step_s`` (DDP with geartrain's hook and the bucket size that it
        says), ``default_cap_step_s`` (the hook on DDP's own bucket size) and
        ``ddp_step_s`` (DDP alone); and ``bucket_cap_mb``.
    """
    member = worker.member
    os.environ["GLOO_SOCKET_IFNAME"] = _INTERFACE
    dist.init_process_group(
        "gloo",
        store=PrefixStore("ddp", worker.store),
        rank=member.rank,
        world_size=member.world_size,
    )
    network = worker.find_network()
    collective = worker.open_exchange("overlap", None)
    plain, stock = _model(), _model()
    stock_ddp = DistributedDataParallel(stock)
    default = DistributedDataParallel(_model())
    hook = ddp_hook(default, topology=network.topology)
    batch = torch.randn(
        _SAMPLES, _WIDTH, generator=torch.Generator().manual_seed(member.rank)
    )
    cap_mb = _agreed_cap_mb(worker, hook, plain, batch)
    ours = DistributedDataParallel(_model(), bucket_cap_mb=cap_mb)
    own_hook = ddp_hook(ours, topology=network.topology)
    gradients = torch.ones(sum(p.numel() for p in plain.parameters()))

    def forward() -> None:
        with torch.no_grad():
            plain(batch)

    def exchange() -> None:
        collective.all_reduce(gradients, 1 / member.world_size, key="all").wait()

    timed: dict[str, Callable[[], None]] = {
        "forward_s": forward,
        "compute_s": lambda: _backward(plain, batch),
        "exchange_s": exchange,
        "step_s": lambda: _backward(ours, batch),
        "default_cap_step_s": lambda: _backward(default, batch),
        "ddp_step_s": lambda: _backward(stock_ddp, batch),
    }
    seconds: dict[str, list[float]] = {name: [] for name in timed}
    for index in range(_WARMUP_STEPS + order.repeats):
        for name, function in timed.items():
            worker.baselines.barrier()
            started_at_s = time.perf_counter()
            function()
            if index >= _WARMUP_STEPS:
                seconds[name].append(time.perf_counter() - started_at_s)
    flat = torch.cat([p.grad.flatten() for p in ours.parameters() if p.grad is not None])
    other = torch.cat([p.grad.flatten() for p in stock.parameters() if p.grad is not None])
    error = float((flat - other).norm() / other.norm())
    for one in (hook, own_hook):
        one.close()
    dist.destroy_process_group()
    return Report(
        figures={name: statistics.median(values) for name, values in seconds.items()}
        | {"bucket_cap_mb": cap_mb},
        timings=(
            Timing(
                scheme=OURS,
                seconds=statistics.median(seconds["step_s"]),
                checksum=checksum(flat),
                relative_error=error,
            ),
        ),
    )


def _agreed_cap_mb(
    worker: LabWorker, hook: DdpExchange, plain: nn.Module, batch: torch.Tensor
) -> float:
    """The bucket size that geartrain says, for the slowest rank's backward."""
    loss = plain(batch).square().mean()
    started_at_s = time.perf_counter()
    loss.backward()
    backward_s = time.perf_counter() - started_at_s
    cap_mb = hook.bucket_cap_mb(backward_s)
    return max(worker.rendezvous_of("cap").gather("cap", cap_mb, float))


def _model() -> nn.Sequential:
    torch.manual_seed(_SEED)
    layers = [m for _ in range(_DEPTH) for m in (nn.Linear(_WIDTH, _WIDTH), nn.ReLU())]
    return nn.Sequential(*layers)


def _backward(model: nn.Module, batch: torch.Tensor) -> None:
    model.zero_grad()
    model(batch).square().mean().backward()
