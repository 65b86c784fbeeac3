"""Plain DDP with compression and a loss scaler: a step that is skipped costs nothing."""

from __future__ import annotations

import math
from unittest import mock

import torch
from torch import nn

from collectives.test_ddp_hook import flat, make_model, samples, two_hosts
from geartrain.collectives import DdpExchange, ddp_hook, job_network
from geartrain.topology.host_identity import make_host_identity
from local_ranks import run_ranks

BAD_STEP = 4


def owed(exchange: DdpExchange) -> list[torch.Tensor]:
    opened = exchange._exchange.hub.opened(exchange.collective)
    assert opened is not None
    return [kept.now.clone() for side in opened.feedback for _, kept in side._store]


def train(
    rank: int, world_size: int
) -> tuple[list[torch.Tensor], list[torch.Tensor], float, torch.Tensor]:
    """For run_ranks: what is owed before and after the step with a NaN on rank 1."""
    del world_size
    identity = make_host_identity(f"node{rank}", "boot", str(rank))
    mock.patch.object(job_network, "read_host_identity", return_value=identity).start()
    model = make_model()
    exchange = ddp_hook(model, compression="int8", topology=two_hosts())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    before: list[torch.Tensor] = []
    after: list[torch.Tensor] = []
    for step in range(BAD_STEP + 1):
        x, y = samples(step, slice(rank * 8, rank * 8 + 8))
        if step == BAD_STEP:
            before = owed(exchange)
            x[0, 0] = math.nan if rank == 1 else x[0, 0]
        torch.autograd.backward(scaler.scale(nn.functional.cross_entropy(model(x), y)))
        scale = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        factor = scaler.get_scale() / scale
        exchange.end_step(applied=factor >= 1, scale_factor=factor)
        optimizer.zero_grad()
    after = owed(exchange)
    exchange.close()
    return before, after, scaler.get_scale(), flat(model)


def test_a_nan_on_one_rank_leaves_what_all_of_them_owe() -> None:
    results = run_ranks(train, 2)
    for before, after, scale, parameters in results:
        assert scale == 512.0
        assert len(before) == len(after) > 0
        assert float(sum(part.abs().sum() for part in before)) > 0
        for old, new in zip(before, after, strict=True):
            assert torch.equal(new, old / 2)
        assert torch.equal(parameters, results[0][3])
        assert bool(torch.isfinite(parameters).all())
