"""What a trainer is told: the user's parts, and how to train."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from geartrain.parallel.loss_terms import CountFunction, LossFunction
    from geartrain.parallel.model_calls import ForwardFunction
    from geartrain.planner import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class UserParts:
    """What the user handed to ``Session.setup``."""

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    lr_scheduler: Any = None  # torch's schedulers share no public base
    loss_fn: LossFunction | None = None
    forward_fn: ForwardFunction | None = None
    count_fn: CountFunction | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerSettings:
    """How to train."""

    seed: int = 0
    max_grad_norm: float | None = None
    sync_batchnorm: bool = False
    invariant_dropout: bool = False
    autocast_dtype: torch.dtype | None = None
    loss_scaling: bool = False
    micro_batch_size: int | None = None
    overlap: bool = True
    total_steps: int | None = None
    deterministic: bool = False
    pinned_plan: Plan | None = None
