"""A run that was saved and loaded goes on as if it had not been disturbed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import geartrain as gt
from geartrain.errors import CheckpointError, ConfigError
from geartrain.planner import Plan
from local_ranks import run_ranks
from small_models import (
    Gpt,
    Mlp,
    masked_cross_entropy,
    mean_cross_entropy,
    plan_of,
    tokens,
    vectors,
)
from training_jobs import (
    BATCH,
    Job,
    Result,
    largest_difference,
    make_adamw,
    make_sgd,
    partial_plan,
    relative_error,
    result_of,
    train_plainly,
)

SAVED_AT = 5  # within the second epoch of three batches
TOTAL = 14


def make_cosine(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=20)


def make_gpt_with_dropout() -> nn.Module:
    return Gpt(p_dropout=0.2)


JOB = Job(make_optimizer=make_adamw, make_scheduler=make_cosine, num_steps=TOTAL)
DROPOUT_JOB = Job(
    make_model=make_gpt_with_dropout, make_data=tokens, loss_fn=masked_cross_entropy
)


def train(
    rank: int,
    world_size: int,
    job: Job,
    plan: Plan | None,
    path: Path,
    phase: str,
    options: dict[str, Any],
) -> Result:
    """Train to the end; ``save`` saves on the way, ``load`` starts from there."""
    session = gt.Session(plan=plan)
    model = job.model()
    optimizer = job.make_optimizer(model)
    scheduler = job.make_scheduler(optimizer) if job.make_scheduler else None
    session.setup(model, optimizer, loss_fn=job.loss_fn, lr_scheduler=scheduler, **options)
    # A loader for evaluation comes first, so that positions must not be mixed up.
    session.setup_dataloader(job.data(), global_batch_size=6, shuffle=False)
    loader = session.setup_dataloader(job.data(), global_batch_size=BATCH)
    if phase == "load":
        session.load(path)
        assert session.step_index == SAVED_AT
    losses = []
    while session.step_index < TOTAL:
        for batch in loader:
            losses.append(session.step(batch))
            if session.step_index == SAVED_AT and phase == "save":
                session.save(path)
            if session.step_index == TOTAL:
                break
    session.close()
    return result_of(losses, model, optimizer)


@pytest.mark.parametrize(
    "later_plan",
    [plan_of([9, 3], [4, 3]), plan_of([2, 0, 10], [1, 1, 3]), plan_of([12], [5])],
    ids=["same", "more_devices", "one_device"],
)
def test_a_loaded_run_continues_the_curve(later_plan: Plan, tmp_path: Path) -> None:
    path = tmp_path / "snapshot"
    expected = train_plainly(JOB)

    run_ranks(train, 2, JOB, plan_of([9, 3], [4, 3]), path, "save", {})
    num_ranks = len(later_plan.replicas)
    results = run_ranks(train, num_ranks, JOB, later_plan, path, "load", {})

    for result in results:
        assert largest_difference(result.losses, expected.losses[SAVED_AT:]) <= 1e-10
        assert relative_error(result.parameters, expected.parameters) <= 1e-10
        assert result.lr == expected.lr


@pytest.mark.parametrize("invariant", [False, True])
def test_a_loaded_run_with_dropout_agrees_to_the_bit(
    invariant: bool, tmp_path: Path
) -> None:
    path = tmp_path / "snapshot"
    plan = plan_of([7, 5], [3, 2])
    options = {"invariant_dropout": invariant}

    undisturbed = run_ranks(train, 2, DROPOUT_JOB, plan, path, "save", options)
    resumed = run_ranks(train, 2, DROPOUT_JOB, plan, path, "load", options)

    for before, after in zip(undisturbed, resumed, strict=True):
        assert before.losses[SAVED_AT:] == after.losses
        assert torch.equal(before.parameters, after.parameters)


def test_loss_scale_and_state_of_left_out_devices_are_loaded(tmp_path: Path) -> None:
    path = tmp_path / "snapshot"
    job = Job(dtype=torch.float32)
    options = {"precision": "fp16"}

    without = partial_plan({0: 8, 1: 4}, 3)
    undisturbed = run_ranks(train, 3, job, without, path, "save", options)
    resumed = run_ranks(train, 3, job, without, path, "load", options)

    assert undisturbed[0].losses[SAVED_AT:] == resumed[0].losses
    assert torch.equal(undisturbed[1].parameters, resumed[1].parameters)


def make_wider() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 3))


def test_a_snapshot_of_another_model_is_refused(tmp_path: Path) -> None:
    session = gt.Session()
    model = Mlp()
    session.setup(model, make_sgd(model), loss_fn=mean_cross_entropy)
    session.save(tmp_path / "snapshot")
    other_session, other = gt.Session(), make_wider()
    other_session.setup(other, make_sgd(other), loss_fn=mean_cross_entropy)

    with pytest.raises(CheckpointError, match="does not fit this model and optimizer"):
        other_session.load(tmp_path / "snapshot")


def test_a_missing_snapshot_is_refused(tmp_path: Path) -> None:
    session, model = gt.Session(), Mlp()
    session.setup(model, make_sgd(model), loss_fn=mean_cross_entropy)

    with pytest.raises(CheckpointError, match="nowhere"):
        session.load(tmp_path / "nowhere")


def test_a_position_in_another_order_of_samples_is_refused(tmp_path: Path) -> None:
    for size in (12, 8):
        session, model = gt.Session(), Mlp()
        session.setup(model, make_sgd(model), loss_fn=mean_cross_entropy)
        session.setup_dataloader(vectors(24, torch.float32), global_batch_size=size)
        if size == 12:
            session.save(tmp_path / "snapshot")

    with pytest.raises(ConfigError, match="global_batch_size=12 but this loader has"):
        session.load(tmp_path / "snapshot")


def test_a_loader_made_after_loading_continues_too(tmp_path: Path) -> None:
    remaining = []
    for phase in ("save", "load"):
        session, model = gt.Session(), Mlp()
        session.setup(model, make_sgd(model), loss_fn=mean_cross_entropy)
        if phase == "load":
            session.load(tmp_path / "snapshot")
        loader = session.setup_dataloader(
            vectors(36, torch.float32), global_batch_size=BATCH
        )
        inputs = []
        for batch in loader:
            inputs.append(batch[0])
            session.step(batch)
            if phase == "save" and session.step_index == 1:
                session.save(tmp_path / "snapshot")
        remaining.append(torch.cat(inputs[1:] if phase == "save" else inputs))

    assert torch.equal(remaining[0], remaining[1])


def train_dropout(rank: int, world_size: int, plans: dict[int, Plan]) -> Any:
    from training_jobs import train_by_session

    job = Job(
        make_model=make_gpt_with_dropout,
        make_data=tokens,
        loss_fn=masked_cross_entropy,
        num_steps=100,
        options={"invariant_dropout": True},
    )
    return train_by_session(job, gt.Session(seed=3, plan=plans[0]), plans)


def test_invariant_dropout_makes_the_curve_independent_of_the_plan() -> None:
    plans = {0: plan_of([7, 1, 4], [3, 1, 2]), 50: plan_of([0, 10, 2], [1, 4, 2])}

    alone = run_ranks(train_dropout, 1, {0: plan_of([12])})[0]
    results = run_ranks(train_dropout, 3, plans)

    assert alone.losses[0] != pytest.approx(alone.losses[3])  # epochs differ in masks
    for result in results:
        assert largest_difference(result.losses, alone.losses) <= 1e-10
