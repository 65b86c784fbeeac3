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

_WIDTH = 512
_DEPTH = 10
"""2.6 million parameters, 10.5 MB of gradients."""
_SAMPLES = 1536
_WARMUP_STEPS = 3
"""DDP makes its buckets anew after the first."""
_INTERFACE = "eth0"
_SEED = 11


def train_with_ddp(worker: LabWorker, order: Order) -> Report:
    """Time compute, exchange and whole steps in turn.

    Returns:
        Medians over ``order.repeats`` rounds of the slowest rank's times: ``forward_s``,
        ``compute_s`` (forward and backward), ``exchange_s`` (all gradients at once, after
        backward), ``step_s`` (DDP with its defaults and geartrain's hook) and
        ``ddp_step_s`` (DDP alone).
    """
    member = worker.member
    os.environ["GLOO_SOCKET_IFNAME"] = _INTERFACE
    dist.init_process_group(
        "gloo",
        store=PrefixStore("ddp", worker.store),
        rank=member.rank,
        world_size=member.world_size,
    )
    collective = worker.open_exchange("overlap", None)
    plain, ours, stock = _model(), DistributedDataParallel(_model()), _model()
    hook = ddp_hook(ours)
    stock_ddp = DistributedDataParallel(stock)
    batch = torch.randn(
        _SAMPLES, _WIDTH, generator=torch.Generator().manual_seed(member.rank)
    )
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
    hook.close()
    dist.destroy_process_group()
    return Report(
        figures={name: statistics.median(values) for name, values in seconds.items()},
        timings=(
            Timing(
                scheme=OURS,
                seconds=statistics.median(seconds["step_s"]),
                checksum=checksum(flat),
                relative_error=error,
            ),
        ),
    )


def _model() -> nn.Sequential:
    torch.manual_seed(_SEED)
    layers = [m for _ in range(_DEPTH) for m in (nn.Linear(_WIDTH, _WIDTH), nn.ReLU())]
    return nn.Sequential(*layers)


def _backward(model: nn.Module, batch: torch.Tensor) -> None:
    model.zero_grad()
    model(batch).square().mean().backward()
