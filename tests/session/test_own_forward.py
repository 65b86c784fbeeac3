"""Steps with the user's own forward: micro_batches, backward, optimizer_step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

import geartrain as gt
from geartrain.errors import ConfigError
from local_ranks import run_ranks
from small_models import Gpt, masked_cross_entropy, plan_of, tokens, vectors
from training_jobs import (
    BATCH,
    Job,
    Result,
    largest_difference,
    make_sgd,
    relative_error,
    result_of,
    train_plainly,
)

JOB = Job(make_model=Gpt, make_data=tokens, loss_fn=masked_cross_entropy)


def backward_of_sum(
    session: gt.Session, logits: torch.Tensor, target: torch.Tensor
) -> None:
    loss = F.cross_entropy(logits, target, reduction="sum", ignore_index=-100)
    session.backward(loss, count=(target != -100).sum(), reduction="sum")


def backward_of_mean(
    session: gt.Session, logits: torch.Tensor, target: torch.Tensor
) -> None:
    # nan where all of a micro-batch's targets are masked, which must not matter
    loss = F.cross_entropy(logits, target, ignore_index=-100)
    session.backward(loss, count=int((target != -100).sum()))


def backward_of_tokens(
    session: gt.Session, logits: torch.Tensor, target: torch.Tensor
) -> None:
    loss = F.cross_entropy(logits, target, reduction="none", ignore_index=-100)
    session.backward(loss, count=(target != -100).sum())


def backward_of_unmasked_tokens(
    session: gt.Session, logits: torch.Tensor, target: torch.Tensor
) -> None:
    loss = F.cross_entropy(logits, target, reduction="none", ignore_index=-100)
    session.backward(loss[target != -100])


def train_own_forward(rank: int, world_size: int, backward: Any, shares: Any) -> Result:
    session = gt.Session(plan=plan_of(*shares))
    model = JOB.model()
    optimizer = make_sgd(model)
    session.setup(model, optimizer)
    loader = session.setup_dataloader(JOB.data(), global_batch_size=BATCH)
    losses: list[float] = []
    while len(losses) < JOB.num_steps:
        for batch in loader:
            for micro in session.micro_batches(batch):
                backward(session, model(micro[0]).flatten(0, -2), micro[1].flatten())
            losses.append(session.optimizer_step())
            if len(losses) == JOB.num_steps:
                break
    session.close()
    return result_of(losses, model, optimizer)


@pytest.mark.parametrize(
    "backward",
    [backward_of_sum, backward_of_mean, backward_of_tokens, backward_of_unmasked_tokens],
)
def test_own_forward_trains_like_one_device(backward: Any) -> None:
    expected = train_plainly(JOB)

    results = run_ranks(train_own_forward, 3, backward, ([8, 0, 4], [3, 1, 1]))

    for result in results:
        assert largest_difference(result.losses, expected.losses) <= 1e-10
        assert relative_error(result.parameters, expected.parameters) <= 1e-10


def started() -> tuple[gt.Session, torch.nn.Module, Any]:
    """A session on one device, and its first batch."""
    session = gt.Session()
    model = Job(dtype=torch.float32).model()
    session.setup(model, make_sgd(model), micro_batch_size=4)
    loader = session.setup_dataloader(vectors(24, torch.float32), global_batch_size=BATCH)
    return session, model, next(iter(loader))


def losses_of(model: torch.nn.Module, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def test_optimizer_step_without_a_step_says_so() -> None:
    session, _, _ = started()

    with pytest.raises(ConfigError, match=r"no step is open.*micro_batches"):
        session.optimizer_step()


def test_optimizer_step_within_the_loop_says_so() -> None:
    session, model, batch = started()

    loop = session.micro_batches(batch)
    micro = next(loop)
    session.backward(losses_of(model, micro))

    with pytest.raises(ConfigError, match="before the last micro-batch"):
        session.optimizer_step()


def test_a_loop_left_early_cannot_become_a_step() -> None:
    session, model, batch = started()
    for micro in session.micro_batches(batch):
        session.backward(losses_of(model, micro))
        break

    with pytest.raises(ConfigError, match="no step is open"):
        session.optimizer_step()


def test_a_step_can_follow_a_loop_left_early() -> None:
    session, model, batch = started()
    for _ in session.micro_batches(batch):
        break
    for micro in session.micro_batches(batch):
        session.backward(losses_of(model, micro))

    assert session.optimizer_step() > 0
    assert session.step_index == 1


def test_a_micro_batch_without_backward_says_so() -> None:
    session, _, batch = started()

    with pytest.raises(ConfigError, match=r"got no backward\(\); call it once"):
        for _ in session.micro_batches(batch):
            pass


def test_backward_twice_says_so() -> None:
    session, model, batch = started()

    loop = session.micro_batches(batch)
    micro = next(loop)
    session.backward(losses_of(model, micro))

    with pytest.raises(ConfigError, match=r"backward\(\) needs an open micro-batch"):
        session.backward(losses_of(model, micro))


def test_backward_outside_a_step_says_so() -> None:
    session, model, batch = started()

    with pytest.raises(ConfigError, match=r"iterate session\.micro_batches"):
        session.backward(losses_of(model, batch))


def test_a_mean_without_its_count_says_so() -> None:
    session, model, batch = started()

    loop = session.micro_batches(batch)
    micro = next(loop)

    with pytest.raises(ConfigError, match="a scalar, so its weight is unknown"):
        session.backward(losses_of(model, micro).mean())


def test_an_unknown_reduction_says_so() -> None:
    session, model, batch = started()

    with pytest.raises(ConfigError, match="reduction='avg' must be 'mean' or 'sum'"):
        session.backward(
            losses_of(model, batch).mean(),
            count=4,
            reduction="avg",  # type: ignore[arg-type]  # what is tested
        )


def test_a_step_not_finished_before_the_next_says_so() -> None:
    session, model, batch = started()
    for micro in session.micro_batches(batch):
        session.backward(losses_of(model, micro))

    with pytest.raises(ConfigError, match="step before was not finished"):
        next(iter(session.micro_batches(batch)))


def test_step_without_a_loss_function_names_the_way() -> None:
    session, _, batch = started()

    with pytest.raises(ConfigError, match=r"setup\(loss_fn=...\); with an own forward"):
        session.step(batch)
