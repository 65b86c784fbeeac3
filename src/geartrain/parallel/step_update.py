"""The update at a step's end: scale the summed gradients, clip them, step the optimizer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from geartrain.collectives.gradient_buckets import DEFAULT_BUCKET_BYTES
from geartrain.parallel.trailer import Trailer


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutcome:
    """What a step came to, the same on all ranks."""

    loss: float
    trailer: Trailer
    grad_norm: float | None
    """Norm before clipping; None where it is not clipped."""
    skipped: bool
    """The update was skipped: a gradient was not finite (fp16 loss scaling)."""
    term_losses: dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """How a step is made."""

    max_grad_norm: float | None = None
    """Clips the norm of the aggregated gradient, as one device would."""
    overlap: bool = True
    """Send gradients while the last micro-batch's backward still runs."""
    bucket_bytes: int = DEFAULT_BUCKET_BYTES
    loss_scaling: bool = False
    """fp16 only; one scale for all ranks, since all see the same gradient."""


def make_outcome(
    trailer: Trailer, grad_norm: float | None, *, skipped: bool
) -> StepOutcome:
    """Each term's mean over all ranks, and their sum.

    Args:
        trailer: What all ranks' sums and counts add up to.
        grad_norm: Before clipping; None where it is not clipped.
        skipped: Whether nothing was applied.
    """
    losses = {
        name: total / trailer.counts[name] if trailer.counts[name] else 0.0
        for name, total in trailer.loss_sums.items()
    }
    return StepOutcome(
        loss=sum(losses.values()),
        trailer=trailer,
        grad_norm=grad_norm,
        skipped=skipped,
        term_losses=losses,
    )


def make_scaler(parameters: Sequence[torch.nn.Parameter]) -> torch.amp.GradScaler:
    """A loss scaler for the device that the parameters are on."""
    device_type = parameters[0].device.type if parameters else "cpu"
    scaler = torch.amp.GradScaler(device_type)
    # It makes its scale at the first loss, which a rank without samples never has.
    scaler.scale(torch.zeros((), device=device_type))
    return scaler


def multiply_gradients(parameters: Sequence[torch.nn.Parameter], factor: float) -> None:
    """Multiply those gradients that there are, in place."""
    if factor != 1.0:
        grads = [p.grad for p in parameters if p.grad is not None]
        torch._foreach_mul_(grads, factor)


def clip(
    parameters: Sequence[torch.nn.Parameter], max_grad_norm: float | None
) -> float | None:
    """Clip the norm over all gradients; returns it as it was, None if there is no limit."""
    if max_grad_norm is None:
        return None
    return float(torch.nn.utils.clip_grad_norm_(parameters, max_grad_norm))


def step_scaled(optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler) -> float:
    """Step unless a gradient is not finite.

    Returns:
        New / old loss scale; below 1 where the step was skipped.
    """
    scale = scaler.get_scale()
    scaler.step(optimizer)
    scaler.update()
    return scaler.get_scale() / scale
