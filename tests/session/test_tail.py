"""The tail of a step, which whoever is free takes."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch

from geartrain.errors import ConfigError
from local_ranks import run_ranks
from small_models import (
    Gpt,
    count_two_terms,
    mean_cross_entropy,
    tokens,
    two_terms,
)
from training_jobs import Job, largest_difference, make_sgd, train_plainly
from worker_sessions import worker_session

SIZE = 24


class Recorder:
    """A forward that notes which samples it saw, and is slow on one rank."""

    def __init__(self, seconds_per_sample: float) -> None:
        self.seconds_per_sample = seconds_per_sample
        self.seen: list[float] = []
        self.num_samples = 0

    def __call__(self, model: torch.nn.Module, batch: Any) -> Any:
        self.seen += batch[0][:, 0].tolist()
        time.sleep(self.seconds_per_sample * len(batch[0]))
        return model(batch[0])


def job_of(is_gpt: bool) -> Job:
    if is_gpt:
        return Job(
            make_model=Gpt,
            make_data=tokens,
            loss_fn=two_terms,
            batch_size=SIZE,
            num_samples=2 * SIZE + 7,
            num_steps=9,
            options={"count_fn": count_two_terms},
        )
    return Job(batch_size=SIZE, num_samples=2 * SIZE + 7, num_steps=9)


def train_with_tail(
    rank: int, world_size: int, folder: Path, is_gpt: bool, late_rank: int, rewinds: bool
) -> dict[str, Any]:
    """A rank becomes slower once it has been planned, so that others take its part."""
    job = job_of(is_gpt)
    session = worker_session(
        rank, world_size, folder, tail_fraction=0.5, replan_threshold=1e9
    )
    model = job.model()
    forward = Recorder(5e-4)
    session.setup(
        model, make_sgd(model), loss_fn=job.loss_fn, forward_fn=forward, **job.options
    )
    loader = session.setup_dataloader(job.data(), global_batch_size=SIZE)
    losses: list[float] = []
    seen: list[list[float]] = []
    while len(losses) < job.num_steps:
        for batch in loader:
            plan = session.current_plan
            forward.seen = []
            if rank == late_rank:
                forward.seconds_per_sample = 5e-3
            losses.append(session.step(batch))
            seen.append(forward.seen)
            if len(losses) == job.num_steps:
                break
            if rewinds and len(losses) == 2:
                session.save(folder / "snapshot")
            if rewinds and len(losses) == 4:
                session.all_reduce_metric(0, 1)  # rank 0 has written it
                session.load(folder / "snapshot")
                break
    assert plan is not None
    session.close()
    return {"losses": losses, "seen": seen, "tail": plan.tail_samples}


def test_every_sample_is_computed_once_by_whoever_is_free(tmp_path: Path) -> None:
    results = run_ranks(train_with_tail, 2, tmp_path, False, 1, False)

    expected = train_plainly(job_of(False))
    assert largest_difference(results[0]["losses"], expected.losses) <= 1e-10
    assert results[0]["tail"] == SIZE // 2
    inputs = job_of(False).data().inputs[:, 0].tolist()
    num_taken = [0, 0]
    for step in range(0, 9, 3):
        epoch = [
            [value for part in r["seen"][step : step + 3] for value in part]
            for r in results
        ]
        assert sorted(epoch[0] + epoch[1]) == sorted(inputs)
        num_taken = [n + len(e) for n, e in zip(num_taken, epoch, strict=True)]
    assert num_taken[0] > 1.5 * num_taken[1]  # planned alike, but one became slower


def test_counts_known_ahead_hold_with_a_tail(tmp_path: Path) -> None:
    results = run_ranks(train_with_tail, 2, tmp_path, True, 0, False)

    expected = train_plainly(job_of(True))
    assert largest_difference(results[1]["losses"], expected.losses) <= 1e-10


def test_a_session_that_loads_an_earlier_state_shares_its_tails_anew(
    tmp_path: Path,
) -> None:
    results = run_ranks(train_with_tail, 2, tmp_path, False, 1, True)

    expected = train_plainly(job_of(False)).losses
    losses = results[0]["losses"]
    assert largest_difference(losses[:4], expected[:4]) <= 1e-10
    assert largest_difference(losses[4:], expected[2:7]) <= 1e-10


def transform_the_batch(
    rank: int,
    world_size: int,
    folder: Path,
    deterministic: bool,
    tail_fraction: float,
    factor: int,
) -> int:
    job = job_of(False)
    session = worker_session(
        rank, world_size, folder, deterministic=deterministic, tail_fraction=tail_fraction
    )
    model = job.model()
    # Slow enough for both ranks to be worth their exchange.
    session.setup(
        model, make_sgd(model), loss_fn=mean_cross_entropy, forward_fn=Recorder(2e-3)
    )
    loader = session.setup_dataloader(job.data(), global_batch_size=SIZE)
    for inputs, targets in loader:
        batch = loader.last_batch if factor == 1 else (inputs * factor, targets)
        session.step(batch)
    assert session.current_plan is not None
    return session.current_plan.tail_samples


def test_a_batch_transformed_by_the_user_cannot_have_a_tail(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="transform in the dataset or collate_fn"):
        run_ranks(transform_the_batch, 2, tmp_path, False, 0.25, 2)


def test_deterministic_runs_share_no_tail(tmp_path: Path) -> None:
    assert run_ranks(transform_the_batch, 2, tmp_path, True, 0.25, 2) == [0, 0]


def test_no_tail_is_shared_unless_asked_for(tmp_path: Path) -> None:
    assert run_ranks(transform_the_batch, 2, tmp_path, False, 0.0, 2) == [0, 0]
    assert run_ranks(transform_the_batch, 2, tmp_path, False, 0.25, 1) == [6, 6]


def switch_tails(rank: int, world_size: int, folder: Path) -> dict[str, Any]:
    job = job_of(False)
    session = worker_session(rank, world_size, folder, tail_fraction=0.0)
    model = job.model()
    session.setup(model, make_sgd(model), loss_fn=mean_cross_entropy)
    loader = session.setup_dataloader(job.data(), global_batch_size=SIZE)
    with pytest.raises(ConfigError, match="before the first batch"):
        session.share_tail(0.25)
    losses: list[float] = []
    tails: list[int] = []
    while len(losses) < job.num_steps:
        for batch in loader:
            losses.append(session.step(batch))
            session.share_tail((0.25, 0.5, 0.0)[len(losses) % 3])
            assert session.current_plan is not None
            tails.append(session.current_plan.tail_samples)
            if len(losses) == job.num_steps:
                break
    with pytest.raises(ConfigError, match="must lie in"):
        session.share_tail(1.0)
    session.close()
    return {"losses": losses, "tails": tails}


def test_a_tail_may_be_switched_on_and_off_and_the_losses_are_the_same(
    tmp_path: Path,
) -> None:
    results = run_ranks(switch_tails, 2, tmp_path)

    expected = train_plainly(job_of(False)).losses
    assert largest_difference(results[0]["losses"], expected) <= 1e-10
    assert results[0]["tails"][:3] == [12, 0, 6]


def share_where_nothing_may_be_shared(rank: int, world_size: int, folder: Path) -> None:
    job = job_of(False)
    session = worker_session(rank, world_size, folder, deterministic=True)
    model = job.model()
    session.setup(model, make_sgd(model), loss_fn=mean_cross_entropy)
    session.step(next(iter(session.setup_dataloader(job.data(), global_batch_size=SIZE))))
    session.share_tail(0.5)


def test_a_deterministic_run_refuses_a_tail(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="12 samples can't be shared"):
        run_ranks(share_where_nothing_may_be_shared, 2, tmp_path)
