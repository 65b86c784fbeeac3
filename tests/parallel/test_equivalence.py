"""The contract: uneven devices make the optimizer step that one device makes."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import Any

import pytest
import torch

import geartrain as gt
from geartrain.data.order import GlobalOrder
from local_ranks import run_ranks
from small_models import CASES, Case, build, count_two_terms, plan_of

BATCH = 24
TOLERANCE_GRADIENT = {torch.float64: 1e-12, torch.float32: 1e-5}
TOLERANCE_CURVE = {torch.float64: 1e-10, torch.float32: 1e-4}


def reference_loss(case: Case, model: torch.nn.Module, batch: Any) -> torch.Tensor:
    """The loss as a plain loop on one device computes it."""
    output = case.loss_fn(model(batch[0]), batch)
    if isinstance(output, torch.Tensor):
        return output.mean()
    terms = [output] if isinstance(output, tuple) else list(output.values())
    total: torch.Tensor = sum(loss_sum / max(int(count), 1) for loss_sum, count in terms)
    return total


def train_on_one_device(
    name: str, dtype: torch.dtype, num_steps: int
) -> tuple[list[float], torch.Tensor]:
    """A plain PyTorch loop: losses, and the last gradient of all parameters."""
    case = CASES[name]
    model = build(case, dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    data = case.make_data(BATCH * 2 + 7, dtype)
    order = GlobalOrder(
        num_samples=len(data),
        global_batch_size=BATCH,
        seed=0,
        shuffle=True,
        drop_last=False,
    )
    losses: list[float] = []
    epoch = 0
    while len(losses) < num_steps:
        permutation = order.permutation(epoch).tolist()
        for step in range(order.num_steps):
            if len(losses) == num_steps:
                break
            start, stop = order.batch_bounds(step)
            batch = torch.utils.data.default_collate(
                [data[i] for i in permutation[start:stop]]
            )
            optimizer.zero_grad()
            loss = reference_loss(case, model, batch)
            loss.backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            losses.append(float(loss))
        epoch += 1
    return losses, flat_gradient(model)


def flat_gradient(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat(
        [p.grad.flatten().double() for p in model.parameters() if p.grad is not None]
    )


def train_on_ranks(
    rank: int,
    world_size: int,
    name: str,
    dtype: torch.dtype,
    num_steps: int,
    plans: dict[int, gt.planner.Plan],
    options: dict[str, Any],
) -> tuple[list[float], torch.Tensor]:
    case = CASES[name]
    session = gt.Session(seed=0, plan=plans[0])
    model = build(case, dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    session.setup(
        model,
        optimizer,
        loss_fn=case.loss_fn,
        max_grad_norm=1.0,
        sync_batchnorm=case.uniform,
        **options,
    )
    loader = session.setup_dataloader(
        case.make_data(BATCH * 2 + 7, dtype), global_batch_size=BATCH
    )
    losses: list[float] = []
    while len(losses) < num_steps:
        for batch in loader:
            losses.append(session.step(batch))
            if len(losses) in plans:
                session.apply_plan(plans[len(losses)])
            if len(losses) == num_steps:
                break
    session.close()
    return losses, flat_gradient(model)


def largest_difference(a: list[float], b: list[float]) -> float:
    return max(abs(x - y) / max(abs(y), 1e-12) for x, y in zip(a, b, strict=True))


def random_plan(name: str, world_size: int, seed: int) -> gt.planner.Plan:
    """Random shares with at least one 0, random micro-batch sizes."""
    draw = random.Random(seed)
    cuts = sorted(draw.randint(0, BATCH) for _ in range(world_size - 2))
    bounds = [0, *cuts, BATCH]
    shares = [b - a for a, b in pairwise(bounds)] + [0]
    draw.shuffle(shares)
    if CASES[name].uniform:
        return plan_of(shares, uniform_count=1)
    return plan_of(shares, [draw.randint(1, 7) for _ in shares])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("world_size", [2, 3, 6])
@pytest.mark.parametrize("name", CASES)
def test_one_gradient_equals_that_of_one_device(
    name: str, world_size: int, dtype: torch.dtype
) -> None:
    plan = random_plan(name, world_size, seed=world_size)
    _, expected = train_on_one_device(name, dtype, 1)

    results = run_ranks(train_on_ranks, world_size, name, dtype, 1, {0: plan}, {})

    for _, gradient in results:
        error = (gradient - expected).norm() / expected.norm()
        assert float(error) <= TOLERANCE_GRADIENT[dtype]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", CASES)
def test_loss_curve_of_200_steps_with_a_replan_equals_one_device(
    name: str, dtype: torch.dtype
) -> None:
    first, second = random_plan(name, 3, seed=1), random_plan(name, 3, seed=2)
    expected, _ = train_on_one_device(name, dtype, 200)

    results = run_ranks(train_on_ranks, 3, name, dtype, 200, {0: first, 100: second}, {})

    for losses, _ in results:
        assert largest_difference(losses, expected) <= TOLERANCE_CURVE[dtype]


def test_counts_known_ahead_give_the_same_gradient() -> None:
    plan = random_plan("gpt_two_terms", 3, seed=3)
    _, expected = train_on_one_device("gpt_two_terms", torch.float64, 1)

    results = run_ranks(
        train_on_ranks,
        3,
        "gpt_two_terms",
        torch.float64,
        1,
        {0: plan},
        {"count_fn": count_two_terms},
    )

    error = (results[0][1] - expected).norm() / expected.norm()
    assert float(error) <= 1e-12


def test_all_ranks_hold_the_same_bits() -> None:
    plan = random_plan("gpt", 4, seed=4)

    results = run_ranks(train_on_ranks, 4, "gpt", torch.float32, 30, {0: plan}, {})

    for losses, gradient in results[1:]:
        assert losses == results[0][0]
        assert torch.equal(gradient, results[0][1])


def test_two_runs_with_a_pinned_plan_agree_to_the_bit() -> None:
    plan = random_plan("gpt", 3, seed=5)

    first = run_ranks(train_on_ranks, 3, "gpt", torch.float32, 30, {0: plan}, {})
    second = run_ranks(train_on_ranks, 3, "gpt", torch.float32, 30, {0: plan}, {})

    assert first[0][0] == second[0][0]
    assert torch.equal(first[0][1], second[0][1])


def test_one_rank_runs_the_same_code_without_a_group() -> None:
    expected, _ = train_on_one_device("gpt_two_terms", torch.float64, 20)
    plan = plan_of([BATCH], [5])

    results = run_ranks(
        train_on_ranks, 1, "gpt_two_terms", torch.float64, 20, {0: plan}, {}
    )

    assert largest_difference(results[0][0], expected) <= 1e-10
