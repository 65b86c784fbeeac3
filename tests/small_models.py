"""Small models and data sets that the equivalence tests train."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from geartrain.planner import Plan, Replica, Stage


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))
        self.unused = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.layers(x)
        return output


class ConvNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.conv2 = nn.Conv2d(4, 4, 3, padding=1)
        self.norm2 = nn.BatchNorm2d(4)
        self.head = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.norm(self.conv(x)))
        x = F.relu(self.norm2(self.conv2(x)) + x)
        output: torch.Tensor = self.head(x.mean(dim=(2, 3)))
        return output


class Gpt(nn.Module):
    def __init__(self, p_dropout: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.position = nn.Parameter(torch.randn(5, 8) * 0.1)
        self.qkv = nn.Linear(8, 24)
        self.norm = nn.LayerNorm(8)
        self.drop = nn.Dropout(p_dropout)
        self.mlp = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(tokens) + self.position
        query, key, value = self.qkv(self.norm(hidden)).chunk(3, dim=-1)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.drop(mixed)
        hidden = hidden + self.mlp(hidden)
        return F.linear(hidden, self.embed.weight)


def mean_cross_entropy(output: torch.Tensor, batch: Any) -> torch.Tensor:
    """Unreduced, one value an element that is not masked."""
    target = batch[1]
    return F.cross_entropy(output.flatten(0, -2), target.flatten(), reduction="none")


def masked_cross_entropy(
    output: torch.Tensor, batch: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sum over unmasked tokens, and how many those are."""
    target = batch[1].flatten()
    total = F.cross_entropy(
        output.flatten(0, -2), target, reduction="sum", ignore_index=-100
    )
    return total, (target != -100).sum()


def two_terms(
    output: torch.Tensor, batch: Any
) -> dict[str, tuple[torch.Tensor, torch.Tensor | int]]:
    """A token term and a sample term: each has a count of its own."""
    penalty = output.square().mean(dim=tuple(range(1, output.dim()))).sum()
    return {
        "tokens": masked_cross_entropy(output, batch),
        "norm": (0.1 * penalty, output.shape[0]),
    }


def count_two_terms(batch: Any) -> dict[str, int]:
    return {"tokens": int((batch[1] != -100).sum()), "norm": batch[1].shape[0]}


class Samples(torch.utils.data.Dataset[tuple[torch.Tensor, torch.Tensor]]):
    def __init__(self, inputs: torch.Tensor, targets: torch.Tensor) -> None:
        self.inputs = inputs
        self.targets = targets

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.inputs[index], self.targets[index]


def vectors(count: int, dtype: torch.dtype) -> Samples:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(count, 6, generator=generator, dtype=torch.float64)
    targets = torch.randint(0, 3, (count,), generator=generator)
    return Samples(inputs.to(dtype), targets)


def images(count: int, dtype: torch.dtype) -> Samples:
    generator = torch.Generator().manual_seed(2)
    inputs = torch.randn(count, 1, 6, 6, generator=generator, dtype=torch.float64)
    targets = torch.randint(0, 3, (count,), generator=generator)
    return Samples(inputs.to(dtype), targets)


def tokens(count: int, dtype: torch.dtype) -> Samples:
    """Token sequences, an uneven part of whose targets is masked."""
    del dtype
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randint(0, 11, (count, 5), generator=generator)
    targets = torch.randint(0, 11, (count, 5), generator=generator)
    lengths = torch.randint(0, 6, (count, 1), generator=generator)
    targets[torch.arange(5)[None, :] >= lengths] = -100
    return Samples(inputs, targets)


@dataclass(frozen=True)
class Case:
    make_model: Callable[[], nn.Module]
    make_data: Callable[[int, torch.dtype], Samples]
    loss_fn: Callable[[Any, Any], Any]
    uniform: bool = False


CASES = {
    "mlp": Case(Mlp, vectors, mean_cross_entropy),
    "cnn_batchnorm": Case(ConvNet, images, mean_cross_entropy, uniform=True),
    "gpt": Case(Gpt, tokens, masked_cross_entropy),
    "gpt_two_terms": Case(Gpt, tokens, two_terms),
}


def build(case: Case, dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(5)
    return case.make_model().to(dtype)


def device_ids(world_size: int) -> list[str]:
    """Names that a session gives the CPU devices of one host."""
    return ["cpu"] if world_size == 1 else [f"cpu#{rank}" for rank in range(world_size)]


def plan_of(
    shares: list[int], sizes: list[int] | None = None, *, uniform_count: int | None = None
) -> Plan:
    """A hand-made plan: a share and a micro-batch size a rank."""
    sizes = sizes or [max(share, 1) for share in shares]
    replicas = []
    for device_id, share, size in zip(device_ids(len(shares)), shares, sizes, strict=True):
        if uniform_count is not None:
            replica_size, count = max(-(-share // uniform_count), 1), uniform_count
        else:
            replica_size, count = size, -(-share // size)
        replicas.append(
            Replica(
                device_id=device_id,
                share=share,
                micro_batch_size=replica_size,
                num_micro_batches=count,
            )
        )
    return Plan(
        global_batch_size=sum(shares),
        stages=(Stage(stage_index=0, replicas=tuple(replicas)),),
        uniform_micro_batches=uniform_count is not None,
    )
