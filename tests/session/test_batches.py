"""Batches that the user transforms, and loaders that are read in turn."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import geartrain as gt
from local_ranks import run_ranks
from small_models import (
    ConvNet,
    Mlp,
    Samples,
    images,
    mean_cross_entropy,
    plan_of,
    vectors,
)
from training_jobs import BATCH, largest_difference, make_sgd


def whole_numbers(count: int) -> Samples:
    data = images(count, torch.float64)
    return Samples((data.inputs * 10).long(), data.targets)


def scaled(count: int) -> Samples:
    data = whole_numbers(count)
    return Samples(data.inputs.double() / 10, data.targets)


def train_batchnorm(rank: int, world_size: int, transforms: bool) -> list[float]:
    """Two micro-batches a rank, so that ghosts stand in for what is missing."""
    session = gt.Session(plan=plan_of([11, 1, 0], uniform_count=2))
    torch.manual_seed(2)
    model = ConvNet().double()
    session.setup(model, make_sgd(model), loss_fn=mean_cross_entropy, sync_batchnorm=True)
    data = whole_numbers(24) if transforms else scaled(24)
    losses = []
    for inputs, targets in session.setup_dataloader(data, global_batch_size=BATCH):
        batch = (inputs.double() / 10, targets) if transforms else (inputs, targets)
        losses.append(session.step(batch))
    session.close()
    return losses


def test_ghosts_are_made_of_the_batch_as_it_was_transformed() -> None:
    transformed = run_ranks(train_batchnorm, 3, True)
    given = run_ranks(train_batchnorm, 3, False)

    assert transformed[0] == given[0] == transformed[2]


def read_in_turn(rank: int, world_size: int) -> list[float]:
    session = gt.Session(deterministic=True)
    torch.manual_seed(2)
    model = Mlp().double()
    session.setup(model, make_sgd(model), loss_fn=mean_cross_entropy)
    data = vectors(36, torch.float64)
    large = session.setup_dataloader(data, global_batch_size=12, shuffle=False)
    small = session.setup_dataloader(data, global_batch_size=8, shuffle=False)
    losses = []
    for first, second in zip(large, small, strict=False):
        losses += [session.step(first), session.step(second)]
    session.close()
    return losses


def test_two_loaders_can_be_read_in_turn() -> None:
    torch.manual_seed(2)
    model = Mlp().double()
    optimizer = make_sgd(model)
    data = vectors(36, torch.float64)
    expected = []
    for step in range(3):
        for size in (12, 8):
            rows = slice(step * size, (step + 1) * size)
            optimizer.zero_grad()
            batch = (data.inputs[rows], data.targets[rows])
            loss = mean_cross_entropy(model(batch[0]), batch).mean()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            expected.append(loss.item())

    results = run_ranks(read_in_turn, 2)

    assert largest_difference(results[0], expected) <= 1e-10
    assert results[1] == results[0]


class Loss:
    """A loss that also wants to see what the model was given."""

    def __call__(self, output: Any, batch: Any) -> torch.Tensor:
        assert set(batch) == {"x", "target", "name"}
        return mean_cross_entropy(output, (None, batch["target"]))


class Named(torch.utils.data.Dataset[dict[str, Any]]):
    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> dict[str, Any]:
        data = vectors(24, torch.float64)
        return {
            "x": data.inputs[index],
            "target": data.targets[index],
            "name": f"sample {index}",
        }


def forward_x(model: torch.nn.Module, batch: Any) -> Any:
    assert len(batch["name"]) == len(batch["x"])
    return model(batch["x"])


def train_mappings(rank: int, world_size: int) -> tuple[list[float], list[str]]:
    session = gt.Session(plan=plan_of([8, 1, 3], [3, 1, 2]))
    torch.manual_seed(2)
    model = Mlp().double()
    session.setup(model, make_sgd(model), loss_fn=Loss(), forward_fn=forward_x)
    names: list[str] = []
    losses = []
    for batch in session.setup_dataloader(Named(), global_batch_size=BATCH):
        names += batch["name"]
        losses.append(session.step(batch))
    session.close()
    return losses, names


def test_mappings_with_text_are_cut_into_micro_batches() -> None:
    results = run_ranks(train_mappings, 3)

    names = [name for _, part in results for name in part]
    assert sorted(names) == sorted(f"sample {index}" for index in range(24))
    assert results[0][0] == pytest.approx(results[1][0], rel=0)
