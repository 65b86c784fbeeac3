"""Shares follow the devices' measured speeds, and what they become."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch

import geartrain as gt
from geartrain.planner import Plan
from geartrain.telemetry import RunLogReader, read_document
from local_ranks import run_ranks
from small_models import mean_cross_entropy
from training_jobs import (
    Job,
    flat_parameters,
    largest_difference,
    make_sgd,
    train_plainly,
)
from worker_sessions import worker_session

SIZE = 24


class SlowForward:
    """Stands for a device's speed: so many seconds a sample, on top of the model's own."""

    def __init__(self, seconds_per_sample: float) -> None:
        self.seconds_per_sample = seconds_per_sample

    def __call__(self, model: torch.nn.Module, batch: Any) -> Any:
        time.sleep(self.seconds_per_sample * len(batch[0]))
        return model(batch[0])


def job_of(num_steps: int) -> Job:
    return Job(batch_size=SIZE, num_samples=3 * SIZE, num_steps=num_steps)


def shares_of(plan: Plan | None, world_size: int = 2) -> list[int]:
    assert plan is not None
    replicas = [
        plan.replica_of(i.format(rank))
        for rank in range(world_size)
        for i in ("cpu#{}", "emulated:{}")
        if plan.replica_of(i.format(rank)) or i.format(rank) in plan.left_out
    ]
    return [replica.share if replica else 0 for replica in replicas]


def train_with_speeds(
    session: gt.Session,
    rank: int,
    speeds: dict[int, list[float]],
    num_steps: int,
    *,
    own_forward: bool = False,
) -> dict[str, Any]:
    """``speeds[step]`` are the ranks' seconds a sample from that step on."""
    job = job_of(num_steps)
    model = job.model()
    forward = SlowForward(speeds[0][rank])
    session.setup(
        model,
        make_sgd(model),
        loss_fn=None if own_forward else mean_cross_entropy,
        forward_fn=forward,
    )
    loader = session.setup_dataloader(job.data(), global_batch_size=SIZE)
    losses: list[float] = []
    shares: list[list[int]] = []
    while len(losses) < num_steps:
        for batch in loader:
            now = max(step for step in speeds if step <= len(losses))
            forward.seconds_per_sample = speeds[now][rank]
            shares.append(shares_of(session.current_plan, session.world_size))
            if own_forward:
                for micro in session.micro_batches(batch):
                    session.backward(mean_cross_entropy(forward(model, micro), micro))
                losses.append(session.optimizer_step())
            else:
                losses.append(session.step(batch))
            if len(losses) == num_steps:
                break
    session.close()
    return {"losses": losses, "shares": shares, "parameters": flat_parameters(model)}


def train_measured(
    rank: int, world_size: int, speeds: dict[int, list[float]], num_steps: int, own: bool
) -> dict[str, Any]:
    return train_with_speeds(gt.Session(), rank, speeds, num_steps, own_forward=own)


def test_shares_follow_measured_speeds() -> None:
    speeds = {0: [4e-3, 8e-3]}  # far above what an exchange costs

    results = run_ranks(train_measured, 2, speeds, 3, False)

    for result in results:
        first, second = result["shares"][0]
        assert first + second == SIZE
        assert first > 1.3 * second > 0
        assert result["shares"] == results[0]["shares"]
    expected = train_plainly(job_of(3))
    assert largest_difference(results[0]["losses"], expected.losses) <= 1e-10


def test_an_own_forward_is_planned_by_its_first_steps() -> None:
    speeds = {0: [1e-3, 4e-3]}

    results = run_ranks(train_measured, 2, speeds, 6, True)

    shares = results[1]["shares"]
    assert shares[0] == [SIZE // 2, SIZE // 2]
    assert shares[-1][0] > 1.5 * shares[-1][1]
    expected = train_plainly(job_of(6))
    assert largest_difference(results[0]["losses"], expected.losses) <= 1e-10


def test_an_own_forward_may_leave_a_device_out() -> None:
    """What is left out is probed now and then, which an own forward does not allow."""
    speeds = {0: [2e-4, 0.1]}

    results = run_ranks(train_measured, 2, speeds, 45, True)

    assert results[0]["shares"][-1] == [SIZE, 0]
    expected = train_plainly(job_of(45))
    assert largest_difference(results[1]["losses"], expected.losses) <= 1e-10


def train_logged(
    rank: int, world_size: int, folder: Path, speeds: dict[int, list[float]], num_steps: int
) -> dict[str, Any]:
    session = worker_session(rank, world_size, folder)
    return train_with_speeds(session, rank, speeds, num_steps)


def test_a_slow_down_is_answered_by_another_plan(tmp_path: Path) -> None:
    speeds = {0: [3e-3, 3e-3], 20: [3e-3, 1.2e-2]}

    results = run_ranks(train_logged, 2, tmp_path, speeds, 40)

    before, after = results[0]["shares"][19], results[0]["shares"][-1]
    assert after[1] < 0.7 * before[1]
    assert results[0]["shares"] == results[1]["shares"]
    expected = train_plainly(job_of(40))
    for result in results:
        assert largest_difference(result["losses"], expected.losses) <= 1e-10
        assert torch.equal(result["parameters"], results[0]["parameters"])
    kinds = [event.kind for event in RunLogReader(tmp_path).new_events()]
    assert "slowdown" in kinds
    assert "replanned" in kinds
    written = read_document(tmp_path / "plan.json", Plan)
    assert [replica.share for replica in written.replicas] == after


@pytest.mark.slow
def test_a_left_out_device_that_recovers_is_brought_back() -> None:
    speeds = {0: [5e-4, 0.05], 4: [5e-4, 5e-4]}

    results = run_ranks(train_measured, 2, speeds, 300, False)

    shares = results[0]["shares"]
    assert shares[0] == [SIZE, 0]
    assert shares[-1][1] > 0
    expected = train_plainly(job_of(300))
    for result in results:
        assert largest_difference(result["losses"], expected.losses) <= 1e-9
        assert torch.equal(result["parameters"], results[0]["parameters"])


def train_deterministic(rank: int, world_size: int, slow_rank: int) -> dict[str, Any]:
    speeds = {0: [1e-3 * (1 + 3 * (r == slow_rank)) for r in range(world_size)]}
    session = gt.Session(deterministic=True)
    result = train_with_speeds(session, rank, speeds, 8)
    assert session.current_plan is not None
    return result | {"bound_step_s": session.current_plan.bound_step_s}


def test_deterministic_runs_agree_to_the_bit_whatever_the_speeds() -> None:
    first = run_ranks(train_deterministic, 2, 0)
    second = run_ranks(train_deterministic, 2, 1)

    assert first[0]["bound_step_s"] == 0.0, "nothing was measured to be held against"
    assert first[0]["losses"] == second[0]["losses"]
    assert first[0]["shares"] == second[0]["shares"]
    assert torch.equal(first[1]["parameters"], second[1]["parameters"])
