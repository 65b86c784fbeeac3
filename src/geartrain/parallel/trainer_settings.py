"""What a trainer is told: the user's parts, and how to train."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from geartrain.collectives.codecs.registry import make_codec
from geartrain.errors import ConfigError
from geartrain.parallel.low_communication import (
    EXACT_ALGORITHM,
    Algorithm,
    DiLoCo,
    LocalSGD,
)
from geartrain.planner.exchange import AUTO

if TYPE_CHECKING:
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

    def __post_init__(self) -> None:
        _check_kind("model", self.model, torch.nn.Module)
        _check_kind("optimizer", self.optimizer, torch.optim.Optimizer)
        for name in ("loss_fn", "forward_fn", "count_fn"):
            function = getattr(self, name)
            if function is not None and not callable(function):
                msg = f"{name}={function!r} must be a function; setup() calls it by itself"
                raise ConfigError(msg)
        if _is_torch_criterion(self.loss_fn):
            name = getattr(self.loss_fn, "__name__", type(self.loss_fn).__name__)
            msg = (
                f"loss_fn={name} takes (output, target), but a loss_fn gets (output, "
                "batch); wrap it, such as loss_fn=lambda output, batch: "
                "F.cross_entropy(output, batch[1], reduction='none')"
            )
            raise ConfigError(msg)


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
    compression: str | None = None
    """None: gradients are exchanged exactly. ``auto``, or a codec's name."""
    algorithm: Algorithm = EXACT_ALGORITHM
    """Other than ``exact`` the step is not the single-device one."""

    def __post_init__(self) -> None:
        if self.max_grad_norm is not None and not self.max_grad_norm > 0:
            msg = (
                f"max_grad_norm={self.max_grad_norm} must be > 0, such as 1.0; leave it "
                "out in order not to clip"
            )
            raise ConfigError(msg)
        _check_algorithm(self.algorithm, sync_batchnorm=self.sync_batchnorm)
        if self.compression not in (None, AUTO):
            make_codec(self.compression)  # an unknown name is refused before any work
        if self.micro_batch_size is not None and self.micro_batch_size < 1:
            msg = (
                f"micro_batch_size={self.micro_batch_size} must be >= 1 samples; leave it "
                "out to have it planned"
            )
            raise ConfigError(msg)


def _check_algorithm(algorithm: object, *, sync_batchnorm: bool) -> None:
    if algorithm != EXACT_ALGORITHM and not isinstance(algorithm, LocalSGD | DiLoCo):
        msg = (
            f"algorithm={algorithm!r} must be 'exact', LocalSGD(...) or DiLoCo(...), which "
            "geartrain offers"
        )
        raise ConfigError(msg)
    if algorithm != EXACT_ALGORITHM and sync_batchnorm:
        msg = (
            "sync_batchnorm=True exchanges statistics in every forward pass, which an "
            "algorithm for slow links is to avoid; use another norm, or algorithm='exact'"
        )
        raise ConfigError(msg)


def _check_kind(name: str, value: object, kind: type) -> None:
    if not isinstance(value, kind):
        msg = (
            f"setup() got {name}={type(value).__name__}, expected a {kind.__module__}."
            f"{kind.__name__}; call setup(model, optimizer, loss_fn=...)"
        )
        raise ConfigError(msg)


def _is_torch_criterion(function: object) -> bool:
    """Whether it is one of torch's losses, which know nothing of batches."""
    if isinstance(function, torch.nn.Module):
        return type(function).__module__ == "torch.nn.modules.loss"
    return getattr(function, "__module__", None) == "torch.nn.functional"
