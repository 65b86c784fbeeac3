"""Ranks are lost in the middle of a training: the others redo the step and go on."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from local_ranks import run_ranks
from small_models import mean_cross_entropy
from training_jobs import (
    Job,
    Result,
    largest_difference,
    relative_error,
    train_by_session,
    train_plainly,
)
from worker_sessions import worker_session

Hook = Callable[[Any], Any]


def strike(number: int) -> None:
    os.kill(os.getpid(), number)


def doomed(victims: dict[int, tuple[int, float, int]], rank: int) -> Any:
    """A loss function in which victims are hit at a call, some seconds into it."""
    calls = 0

    def loss_fn(output: Any, batch: Any) -> torch.Tensor:
        nonlocal calls
        calls += 1
        when = victims.get(rank)
        if when is not None and calls == when[0]:
            delay_s, number = when[1], when[2]
            if delay_s < 0:
                strike(number)
            else:
                import threading

                threading.Timer(delay_s, strike, (number,)).start()
        return mean_cross_entropy(output, batch)

    return loss_fn


def train(
    rank: int, world_size: int, folder: Path, victims: Any, spec: dict[str, Any]
) -> tuple[Result, float]:
    job = Job(num_steps=12)
    session = worker_session(
        rank, world_size, folder, deterministic=True, on_loss="continue", **spec
    )
    job = Job(num_steps=12, loss_fn=doomed(victims, rank))
    started_at_s = time.monotonic()
    result = train_by_session(job, session)
    return result, time.monotonic() - started_at_s


def check(results: list[Any], survivors: list[int]) -> None:
    expected = train_plainly(Job(num_steps=12))
    for rank in survivors:
        result, _ = results[rank]
        assert largest_difference(result.losses, expected.losses) < 1e-6
        assert relative_error(result.parameters, expected.parameters) < 1e-6
        assert result.lr == expected.lr


@pytest.mark.parametrize("seed", range(3))
def test_training_goes_on_without_a_killed_rank_as_on_one_device(
    tmp_path: Path, seed: int
) -> None:
    delay_s = random.Random(seed).uniform(0, 0.02)

    results = run_ranks(
        train, 3, tmp_path, {1: (7, delay_s, signal.SIGKILL)}, {}, may_die=[1]
    )

    assert results[1] is None
    check(results, [0, 2])
