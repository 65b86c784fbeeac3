"""What ``setup`` can be given: each trains as it does on one device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import geartrain as gt
from geartrain.errors import ConfigError
from local_ranks import run_ranks
from small_models import Gpt, Mlp, Samples, masked_cross_entropy, plan_of, tokens, vectors
from training_jobs import (
    BATCH,
    Job,
    Result,
    flat_parameters,
    largest_difference,
    make_adamw,
    make_sgd,
    relative_error,
    run_steps,
    train_on_ranks,
    train_plainly,
)

UNEVEN = plan_of([9, 0, 3], [4, 2, 2])


def make_adafactor(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adafactor(model.parameters(), lr=1e-2)


def make_adam_of_two_groups(model: nn.Module) -> torch.optim.Optimizer:
    first, *others = model.parameters()
    groups: list[dict[str, Any]] = [{"params": [first], "lr": 1e-3}, {"params": others}]
    return torch.optim.Adam(groups, lr=1e-2)


def make_cosine(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10)


def make_plateau(optimizer: torch.optim.Optimizer) -> Any:
    # So impatient that it acts within a few steps.
    return torch.optim.lr_scheduler.ReduceLROnPlateau(
        optimizer, patience=0, threshold=0.5, factor=0.7
    )


class PartlyFrozen(Mlp):
    def __init__(self) -> None:
        super().__init__()
        for parameter in self.layers[0].parameters():
            parameter.requires_grad = False


class Experts(nn.Module):
    """Uses one expert or the other by the sign of the first input: not all ranks alike."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(6, 3) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        chosen = (x[:, 0] > 0).long()  # the third one is never chosen
        output = x.new_zeros(len(x), 3)
        for index, expert in enumerate(self.experts):
            rows = (chosen == index).nonzero().flatten()
            if len(rows):
                output = output.index_add(0, rows, expert(x[rows]))
        return output


JOBS = {
    "momentum": Job(),
    "adamw_leaves_unused_parameters_alone": Job(make_optimizer=make_adamw),
    "adafactor": Job(make_optimizer=make_adafactor),
    "parameter_groups": Job(make_optimizer=make_adam_of_two_groups),
    "clipping": Job(max_grad_norm=0.05),
    "clipping_and_momentum_of_tied_weights": Job(
        make_model=Gpt, make_data=tokens, loss_fn=masked_cross_entropy, max_grad_norm=0.5
    ),
    "cosine_schedule": Job(make_scheduler=make_cosine),
    "plateau_schedule": Job(make_scheduler=make_plateau),
    "frozen_layer": Job(make_model=PartlyFrozen, make_optimizer=make_adamw),
    "experts_used_on_some_ranks_only": Job(make_model=Experts, make_optimizer=make_adamw),
    "without_overlap": Job(make_optimizer=make_adamw, options={"overlap": False}),
    "float32": Job(dtype=torch.float32, make_optimizer=make_adamw),
}


@pytest.mark.parametrize("name", JOBS)
def test_training_equals_that_of_one_device(name: str) -> None:
    job = JOBS[name]
    tolerance = 1e-10 if job.dtype == torch.float64 else 1e-4
    expected = train_plainly(job)

    results = run_ranks(train_on_ranks, 3, job, {0: UNEVEN})

    for result in results:
        assert largest_difference(result.losses, expected.losses) <= tolerance
        assert relative_error(result.parameters, expected.parameters) <= tolerance
        assert result.lr == pytest.approx(expected.lr)
        assert torch.equal(result.parameters, results[0].parameters)


def test_the_plateau_schedule_acted_within_the_test_above() -> None:
    assert train_plainly(JOBS["plateau_schedule"]).lr < 0.1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bit_parameters_stay_the_same_on_all_ranks(dtype: torch.dtype) -> None:
    job = Job(dtype=dtype)
    expected = train_plainly(Job(dtype=torch.float32))

    results = run_ranks(train_on_ranks, 3, job, {0: UNEVEN})

    assert all(torch.equal(r.parameters, results[0].parameters) for r in results)
    assert results[0].losses == results[2].losses
    assert largest_difference(results[0].losses, expected.losses) <= 0.05


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_mixed_precision_follows_single_precision(precision: str) -> None:
    job = Job(dtype=torch.float32, options={"precision": precision})
    expected = train_plainly(Job(dtype=torch.float32))

    results = run_ranks(train_on_ranks, 3, job, {0: UNEVEN})

    assert all(torch.equal(r.parameters, results[0].parameters) for r in results)
    assert largest_difference(results[0].losses, expected.losses) <= 0.02


def infinite_on_one_rank(output: torch.Tensor, batch: Any) -> torch.Tensor:
    """Sample values above 1e6 stand for an overflow."""
    loss = F.cross_entropy(output, batch[1], reduction="none")
    return loss * torch.where(batch[0][:, 0] > 1e6, torch.inf, 1.0)


def overflow_in_the_second_step(rank: int, world_size: int) -> dict[str, Any]:
    session = gt.Session(plan=plan_of([9, 3], [4, 2]))
    data = vectors(3 * BATCH, torch.float32)
    data.inputs[BATCH + 10, 0] = 2e6  # a sample of rank 1's share of the second step
    model = Mlp()
    session.setup(model, make_sgd(model), loss_fn=infinite_on_one_rank, precision="fp16")
    loader = session.setup_dataloader(data, global_batch_size=BATCH, shuffle=False)
    scaler = session._trained().engine.scaler
    assert scaler is not None
    scaler.update(2.0**10)  # low enough for the first step to pass
    scales, parameters = [], []
    for batch in loader:
        session.step(batch)
        scales.append(scaler.get_scale())
        parameters.append(flat_parameters(model))
    session.close()
    return {"scales": scales, "parameters": parameters}


def test_an_overflow_on_one_rank_skips_the_step_and_shrinks_the_scale_on_all() -> None:
    results = run_ranks(overflow_in_the_second_step, 2)

    for result in results:
        first, second, third = result["parameters"]
        assert torch.equal(first, second)
        assert not torch.equal(second, third)
        assert bool(third.isfinite().all())
        assert result["scales"] == [2.0**10, 2.0**9, 2.0**9]


class SparseEmbedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 3, sparse=True)

    def forward(self, indices: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.embed(indices).mean(1)
        return output


def classes(count: int, dtype: torch.dtype) -> Samples:
    data = tokens(count, dtype)
    return Samples(data.inputs, data.inputs.sum(1) % 3)


def test_sparse_gradients_are_summed_as_dense_ones() -> None:
    job = Job(make_model=SparseEmbedding, make_data=classes)
    expected = train_plainly(job)

    results = run_ranks(train_on_ranks, 2, job, {0: plan_of([9, 3], [4, 2])})

    assert largest_difference(results[1].losses, expected.losses) <= 1e-10


def train_alone(job: Job) -> Result:
    return run_ranks(train_on_ranks, 1, job, {0: plan_of([BATCH], [5])})[0]


@pytest.mark.parametrize("name", ["clipping", "plateau_schedule", "frozen_layer"])
def test_one_rank_trains_alike(name: str) -> None:
    expected = train_plainly(JOBS[name])

    result = train_alone(JOBS[name])

    assert largest_difference(result.losses, expected.losses) <= 1e-10


def make_lbfgs(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.LBFGS(model.parameters())


def make_optimizer_of_another_model(model: nn.Module) -> torch.optim.Optimizer:
    return make_sgd(Mlp())


@pytest.mark.parametrize(
    ("make_optimizer", "message"),
    [
        (make_lbfgs, "LBFGS evaluates the loss itself.*needs no closure"),
        (make_optimizer_of_another_model, "6 of the optimizer's 6 parameters.*put further"),
    ],
)
def test_an_optimizer_that_cannot_work_is_refused(
    make_optimizer: Any, message: str
) -> None:
    model = Mlp()

    with pytest.raises(ConfigError, match=message):
        gt.Session().setup(model, make_optimizer(model), loss_fn=infinite_on_one_rank)


def test_a_parameter_that_is_unfrozen_later_is_refused() -> None:
    session = gt.Session()
    model = PartlyFrozen()
    session.setup(model, make_sgd(model), loss_fn=infinite_on_one_rank)
    loader = session.setup_dataloader(vectors(24, torch.float32), global_batch_size=BATCH)
    run_steps(session, loader, 1)
    model.layers[0].weight.requires_grad = True

    with pytest.raises(ConfigError, match=r"layers.0.weight was frozen at setup"):
        run_steps(session, loader, 1)
