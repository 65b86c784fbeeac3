"""A toy problem for the loop examples: tell two spirals apart."""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.utils.data import TensorDataset


def make_spirals(num_samples: int = 1000) -> TensorDataset:
    """Make points on two spirals, already in random order.

    Args:
        num_samples: How many points.

    Returns:
        Samples (point (2,), spiral 0 or 1); always the same ones.
    """
    generator = torch.Generator().manual_seed(0)
    spiral = torch.randint(0, 2, (num_samples,), generator=generator)
    radius = torch.rand(num_samples, generator=generator)
    angle = 2 * math.pi * radius + math.pi * spiral
    noise = 0.02 * torch.randn(num_samples, 2, generator=generator)
    points = torch.stack([radius * angle.cos(), radius * angle.sin()], dim=1) + noise
    return TensorDataset(points, spiral)


def make_model() -> nn.Module:
    """Make a perceptron with the same weights each time; logits (batch, 2)."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2)
    )
