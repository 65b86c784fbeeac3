"""Devices that a plan leaves out, and their return."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import geartrain as gt
from geartrain.errors import CommunicationError, ConfigError
from geartrain.planner import Plan
from local_ranks import run_ranks
from small_models import ConvNet, Mlp, images, mean_cross_entropy, plan_of, vectors
from training_jobs import (
    BATCH,
    Job,
    largest_difference,
    make_adamw,
    make_sgd,
    partial_plan,
    relative_error,
    run_steps,
    train_on_ranks,
    train_plainly,
)


def make_exponential(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.9)


WITHOUT_2 = partial_plan({0: 8, 1: 4}, 3)
WITHOUT_1 = partial_plan({0: 5, 2: 7}, 3)
ONLY_0 = partial_plan({0: 12}, 3)
ALL = plan_of([3, 4, 5], [2, 2, 2])
JOB = Job(
    make_optimizer=make_adamw,
    make_scheduler=make_exponential,
    num_steps=14,
    max_grad_norm=0.2,
)


@pytest.mark.parametrize(
    "plans",
    [
        {0: WITHOUT_2, 5: ALL},
        {0: WITHOUT_2, 3: WITHOUT_1, 7: ONLY_0, 10: ALL},
        {0: ALL, 2: WITHOUT_1, 4: WITHOUT_2},
    ],
)
def test_a_device_that_returns_goes_on_with_the_common_state(
    plans: dict[int, Plan],
) -> None:
    expected = train_plainly(JOB)

    results = run_ranks(train_on_ranks, 3, JOB, plans)

    for result in results:
        assert largest_difference(result.losses, expected.losses) <= 1e-10
    last = plans[max(plans)]
    members = [r for r in range(3) if f"cpu#{r}" not in last.left_out]
    for rank in members:
        assert relative_error(results[rank].parameters, expected.parameters) <= 1e-10
        assert results[rank].lr == expected.lr
        assert torch.equal(results[rank].parameters, results[0].parameters)


BATCHNORM_JOB = Job(
    make_model=ConvNet, make_data=images, num_steps=8, options={"sync_batchnorm": True}
)


def train_batchnorm(rank: int, world_size: int, plans: dict[int, Plan]) -> Any:
    session = gt.Session(plan=plans[0])
    model = BATCHNORM_JOB.model()
    session.setup(model, make_sgd(model), loss_fn=mean_cross_entropy, sync_batchnorm=True)
    loader = session.setup_dataloader(BATCHNORM_JOB.data(), global_batch_size=BATCH)
    losses = run_steps(session, loader, BATCHNORM_JOB.num_steps, plans)
    session.close()
    return losses, dict(model.named_buffers())


def test_batchnorm_shares_statistics_among_the_plans_members() -> None:
    expected = train_plainly(BATCHNORM_JOB)
    plans = {
        0: partial_plan({0: 8, 1: 4}, 3, uniform=True),
        2: partial_plan({0: 12}, 3, uniform=True),
        4: plan_of([3, 4, 5], uniform_count=1),
        6: partial_plan({0: 5, 2: 7}, 3, uniform=True),
    }

    results = run_ranks(train_batchnorm, 3, plans)

    for losses, _ in results:
        assert largest_difference(losses, expected.losses) <= 1e-10
    for name, buffer in results[0][1].items():
        torch.testing.assert_close(results[2][1][name], buffer, rtol=1e-12, atol=0)


def train_two_batch_sizes(rank: int, world_size: int) -> list[float]:
    """The second loader's plan must not reset who shares statistics."""
    session = gt.Session(deterministic=True)
    model = BATCHNORM_JOB.model()
    session.setup(model, make_sgd(model), loss_fn=mean_cross_entropy, sync_batchnorm=True)
    losses = []
    for size in (12, 8):
        loader = session.setup_dataloader(BATCHNORM_JOB.data(), global_batch_size=size)
        losses += run_steps(session, loader, 2)
    session.close()
    return losses


def test_two_loaders_of_different_batch_sizes_share_the_model() -> None:
    results = run_ranks(train_two_batch_sizes, 2)

    assert results[0] == results[1]
    assert len(results[0]) == 4


def train_on(rank: int, world_size: int, plan: Plan, later: Plan | None) -> None:
    plans = {0: plan} if later is None else {0: plan, 1: later}
    train_on_ranks(rank, world_size, JOB, plans)


@pytest.mark.parametrize("later", [False, True])
@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (partial_plan({1: 6, 2: 6}, 3), "leaves out cpu#0, the device of rank 0"),
        (plan_of([6, 7, 0]), "global batch of 13 but the script asks for 12|has global_b"),
        (plan_of([6, 6]), "says nothing of cpu#2; add it to left_out"),
        (
            Plan(global_batch_size=12, stages=plan_of([4, 4]).stages, tail_samples=4),
            "says nothing of cpu#2",
        ),
    ],
)
def test_a_plan_that_cannot_be_carried_out_is_refused(
    plan: Plan, message: str, later: bool
) -> None:
    first, second = (ALL, plan) if later else (plan, None)

    with pytest.raises(ConfigError, match=message):
        run_ranks(train_on, 3, first, second)


def shares_of_a_plan_with_a_tail(rank: int, world_size: int) -> Any:
    stages = plan_of([6, 2]).stages
    session = gt.Session(plan=Plan(global_batch_size=12, stages=stages, tail_samples=4))
    model = JOB.model()
    session.setup(model, make_sgd(model), loss_fn=mean_cross_entropy)
    loader = session.setup_dataloader(JOB.data(), global_batch_size=12)
    batch = next(iter(loader))
    session.step(batch)
    session.close()
    return len(batch[0])


def test_a_given_plan_hands_its_tail_out_in_advance() -> None:
    assert run_ranks(shares_of_a_plan_with_a_tail, 2) == [9, 3]


def apply_uneven_counts(rank: int, world_size: int) -> None:
    train_batchnorm(
        rank, world_size, {0: plan_of([3, 9], uniform_count=1), 1: plan_of([3, 9], [3, 3])}
    )


def test_a_later_plan_must_suit_synchronised_batchnorm() -> None:
    with pytest.raises(ConfigError, match="uniform_micro_batches=false"):
        run_ranks(apply_uneven_counts, 2)


def plan_before_the_step(rank: int, world_size: int) -> Any:
    """A plan given between a batch and its step waits for the next batch."""
    session = gt.Session(plan=plan_of([8, 4], [4, 4]))
    model = Job().model()
    session.setup(model, make_sgd(model), loss_fn=mean_cross_entropy)
    loader = session.setup_dataloader(Job().data(), global_batch_size=BATCH)
    batches = iter(loader)
    batch = next(batches)
    session.apply_plan(partial_plan({0: 12}, 2))
    losses = [session.step(batch), session.step(next(batches))]
    session.close()
    return losses, session.current_plan


def test_a_plan_holds_from_the_next_batch_on() -> None:
    expected = train_plainly(Job(num_steps=2))

    results = run_ranks(plan_before_the_step, 2)

    for losses, plan in results:
        assert largest_difference(losses, expected.losses) <= 1e-10
        assert plan.left_out == ("cpu#1",)


def with_own_plan(rank: int, world_size: int, moment: str) -> Any:
    same, other = plan_of([6, 6]), plan_of([9, 3])
    own = other if rank == 1 else same
    session = gt.Session(plan=own if moment == "start" else same)
    model = Mlp().double()
    session.setup(model, make_sgd(model), loss_fn=mean_cross_entropy)
    loader = session.setup_dataloader(vectors(36, torch.float64), global_batch_size=BATCH)
    before = [p.detach().clone() for p in model.parameters()]
    try:
        for batch in loader:
            if moment == "apply":
                session.apply_plan(own)
            if moment == "step":
                # As if its planner had decided otherwise, without a word to the others.
                session._trained().director.keeper.plan = own
            session.step(batch)
    except CommunicationError as error:
        unchanged = all(
            torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)
        )
        return str(error), unchanged
    return "", False


@pytest.mark.parametrize(
    ("moment", "message"),
    [
        ("start", "cpu#1 got another plan than cpu#0; nothing was computed"),
        ("apply", "cpu#1 got another plan than cpu#0; nothing was computed"),
        ("step", "the ranks carry out different plans (rank 0: "),
    ],
)
def test_ranks_with_different_plans_apply_nothing(moment: str, message: str) -> None:
    for error, unchanged in run_ranks(with_own_plan, 2, moment):
        assert message in error
        assert unchanged


def right_of(output: torch.Tensor, batch: Any) -> dict[str, Any]:
    return {"loss": (mean_cross_entropy(output, batch).sum(), len(output))}


def evaluate_with_one_left_out(rank: int, world_size: int) -> tuple[float, float]:
    session = gt.Session(plan=WITHOUT_2)
    model = Job().model()
    session.setup(model, make_sgd(model), loss_fn=mean_cross_entropy)
    data = Job().data()
    loader = session.setup_dataloader(data, global_batch_size=BATCH)
    run_steps(session, loader, 4)
    found = session.evaluate(loader, right_of)["loss"]
    with torch.no_grad():
        own = mean_cross_entropy(model(data.inputs), (None, data.targets)).mean()
    session.close()
    return found, float(own)


def test_evaluation_uses_no_weights_of_a_left_out_device() -> None:
    results = run_ranks(evaluate_with_one_left_out, 3)

    expected = results[0][1]
    assert results[2][1] != pytest.approx(expected)  # its weights are those of the start
    assert [found for found, _ in results] == pytest.approx([expected] * 3)
