"""What a loss function returned, as sums and counts.

A mean cannot be combined over uneven parts (a mean of means is wrong); sums and
counts can: gradient = sum of per-sample gradients over the global batch / its count.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from geartrain.errors import ConfigError

Count = float | int | torch.Tensor
LossOutput = (
    torch.Tensor | tuple[torch.Tensor, Count] | Mapping[str, tuple[torch.Tensor, Count]]
)
LossFunction = Callable[[Any, Any], LossOutput]  # Any: the user's output and batch
CountFunction = Callable[[Any], Count | Mapping[str, Count]]  # Any: the user's batch

SINGLE_TERM = "loss"

_HINT = (
    "return an unreduced tensor (reduction='none'), a pair (loss_sum, count), or a "
    "mapping of such pairs; a mean is accepted only together with setup(count_fn=...)"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LossTerm:
    """One term of the loss over one micro-batch."""

    loss_sum: torch.Tensor
    """0-dim, with its graph."""
    count: torch.Tensor
    """0-dim float64: samples or unmasked tokens that the sum is over."""


def read_loss(
    output: object, counts: Count | Mapping[str, Count] | None
) -> dict[str, LossTerm]:
    """Bring a loss function's output into sums and counts.

    Args:
        output: What the user's ``loss_fn`` returned: a ``LossOutput``.
        counts: What ``count_fn`` said about the micro-batch; None without one. A pair
            carries its own count, and the elements of a tensor count where this is None.

    Returns:
        Terms by name; a single unnamed one is called ``loss``.

    Raises:
        ConfigError: If no sum and count can be read from it.
    """
    if isinstance(output, torch.Tensor):
        return {SINGLE_TERM: _read_tensor(output, counts)}
    if isinstance(output, tuple):
        return {SINGLE_TERM: _read_pair(SINGLE_TERM, output)}
    if isinstance(output, Mapping) and len(output) > 0:
        return {str(name): _read_pair(str(name), pair) for name, pair in output.items()}
    msg = f"loss_fn returned {type(output).__name__}; {_HINT}"
    raise ConfigError(msg)


def read_own_loss(
    loss: torch.Tensor, count: float | torch.Tensor | None, reduction: str
) -> dict[str, LossTerm]:
    """Bring a loss that the script's own forward made into a sum and a count.

    Args:
        loss: A tensor with one value an element, or a scalar with its ``count``.
        count: Elements that the loss is over: samples, or unmasked tokens.
        reduction: ``mean`` or ``sum``: what a scalar is of them.

    Raises:
        ConfigError: If a scalar comes without a count, or the reduction is unknown.
    """
    if reduction not in ("mean", "sum"):
        msg = f"reduction={reduction!r} must be 'mean' or 'sum', as the loss was made"
        raise ConfigError(msg)
    output: object = loss
    if not isinstance(output, torch.Tensor):
        msg = f"backward() got {type(loss).__name__}; expected the loss as a tensor"
        raise ConfigError(msg)
    if loss.dim() == 0 and count is None:
        msg = (
            "backward() got a scalar, so its weight is unknown; give it unreduced "
            "losses (reduction='none'), or say backward(loss, count=n) for a mean over "
            "n samples or tokens"
        )
        raise ConfigError(msg)
    if loss.dim() == 0 and count is not None and reduction == "sum":
        output = (loss, count)
    return read_loss(output, count)


def read_counts(counts: Count | Mapping[str, Count]) -> dict[str, float]:
    """Bring what ``count_fn`` returned into numbers by term."""
    if isinstance(counts, Mapping):
        return {str(name): float(count) for name, count in counts.items()}
    return {SINGLE_TERM: float(counts)}


def _read_tensor(
    output: torch.Tensor, counts: Count | Mapping[str, Count] | None
) -> LossTerm:
    if isinstance(counts, Mapping):
        msg = (
            "loss_fn returned one tensor but count_fn named several counts, "
            f"{sorted(counts)}; return one count, or a mapping of pairs from loss_fn"
        )
        raise ConfigError(msg)
    output = _widen(output)
    if output.dim() > 0:
        count = _as_count(output.numel() if counts is None else counts)
        return LossTerm(loss_sum=output.sum(), count=count)
    if counts is None:
        msg = f"loss_fn returned a scalar, so its weight is unknown; {_HINT}"
        raise ConfigError(msg)
    count = _as_count(counts)
    weight = count.to(output.device, output.dtype)
    # A mean over nothing is nan; as part of a sum it is 0.
    loss_sum = torch.where(weight > 0, output * weight, torch.zeros_like(output))
    return LossTerm(loss_sum=loss_sum, count=count)


def _read_pair(name: str, pair: object) -> LossTerm:
    match pair:
        case (torch.Tensor() as loss_sum, float() | int() | torch.Tensor() as count):
            pass
        case _:
            msg = f"loss term {name!r} is {type(pair).__name__}; {_HINT}"
            raise ConfigError(msg)
    if loss_sum.dim() > 0:
        msg = (
            f"loss term {name!r} has a sum of shape {tuple(loss_sum.shape)}; expected a "
            "scalar sum in (loss_sum, count): call .sum() on it"
        )
        raise ConfigError(msg)
    return LossTerm(loss_sum=_widen(loss_sum), count=_as_count(count))


def _widen(values: torch.Tensor) -> torch.Tensor:
    """A sum over thousands of tokens overflows fp16 and rounds off in bf16."""
    is_narrow = values.dtype in (torch.float16, torch.bfloat16)
    return values.float() if is_narrow else values


def _as_count(count: Count) -> torch.Tensor:
    if isinstance(count, torch.Tensor):
        return count.detach().to(torch.float64)
    return torch.tensor(float(count), dtype=torch.float64)
