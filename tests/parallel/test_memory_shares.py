"""How a state and its gradients are divided among those that keep them in memory."""

from __future__ import annotations

import pytest
import torch

from geartrain.checkpoint.ranges import check_tiling
from geartrain.errors import CheckpointError
from geartrain.parallel.memory_shares import (
    GRADIENT_PREFIX,
    Division,
    gradient_parts,
    num_bytes_of,
    share_of,
)

OWNERS = [(0,), (0, 2), (1, 2, 5)]


def trained_model() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = torch.nn.Sequential(
        torch.nn.Linear(7, 5), torch.nn.BatchNorm1d(5), torch.nn.Linear(5, 3, bias=False)
    )
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(4, 7)).sum().backward()
    optimizer.step()
    return model, optimizer


@pytest.mark.parametrize("owners", OWNERS)
def test_shares_tile_the_state(owners: tuple[int, ...]) -> None:
    model, optimizer = trained_model()
    state = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "own": {"n": 1},
    }
    shares = [share_of(state, model, Division(owners=owners, rank=rank)) for rank in owners]

    sizes = {name: facts.num_elements for name, facts in shares[0].facts.items()}
    check_tiling((part for s in shares for part, _ in s.layout.places), sizes)
    largest, smallest = (
        f(s.layout.num_bytes for s in shares[1:] or shares) for f in (max, min)
    )
    assert largest < 2 * smallest + 256


def test_what_is_not_the_same_everywhere_is_the_first_owners() -> None:
    model, optimizer = trained_model()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    first, second = (
        share_of(state, model, Division(owners=(3, 4), rank=rank)) for rank in (3, 4)
    )

    running = "model/1.running_mean"
    assert running in first.changing
    assert any(part.name == running for part, _ in first.layout.places)
    assert not any(part.name in second.changing for part, _ in second.layout.places)
    assert "structure" in first.extras(Division(owners=(3, 4), rank=3), {})
    assert second.extras(Division(owners=(3, 4), rank=4), {}) == {}


@pytest.mark.parametrize("owners", OWNERS)
def test_parts_of_a_gradient_tile_it(owners: tuple[int, ...]) -> None:
    model, _ = trained_model()
    views = {name: torch.ones_like(p) for name, p in model.named_parameters()}
    parts = [
        part
        for rank in owners
        for part in gradient_parts(views, model, Division(owners=owners, rank=rank))
    ]

    sizes = {GRADIENT_PREFIX + name: view.numel() for name, view in views.items()}
    check_tiling((r for r, _ in parts if r.name.startswith(GRADIENT_PREFIX)), sizes)
    buffers = [r.name for r, _ in parts if not r.name.startswith(GRADIENT_PREFIX)]
    assert sorted(buffers) == sorted(f"buffer/{name}" for name, _ in model.named_buffers())
    assert num_bytes_of(parts) >= sum(v.numel() * v.element_size() for _, v in parts)


def test_tensor_that_is_not_contiguous_is_refused_by_name() -> None:
    model = torch.nn.Linear(4, 4)
    state = {"model": model.state_dict(), "odd": {"view": torch.ones(4, 4).t()[1:]}}

    with pytest.raises(CheckpointError, match="odd/view"):
        share_of(state, model, Division(owners=(0,), rank=0))
