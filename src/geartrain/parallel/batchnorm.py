"""BatchNorm over uneven shares: the statistics that one device would have computed.

torch's SyncBatchNorm refuses CPU tensors. This one runs on every device, weighs by count,
and lets ranks without a sample take part.
"""

from __future__ import annotations

import logging
from typing import Final

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from geartrain.errors import ConfigError
from geartrain.parallel.normalise import normalise
from geartrain.parallel.sample_context import current_sample_context

logger = logging.getLogger(__name__)


class GroupHandle:
    """The ranks that share statistics; one object for all layers of a model.

    Copies of a model share it, and a pickled one holds no group.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group
        self.is_alone = False

    def __deepcopy__(self, memo: dict[int, object]) -> GroupHandle:
        return self

    def __reduce__(self) -> tuple[type[GroupHandle], tuple[None]]:
        return GroupHandle, (None,)

    def num_members(self) -> int:
        """Ranks that share statistics; 1 without torch.distributed."""
        if self.is_alone or not (dist.is_available() and dist.is_initialized()):
            return 1
        return dist.get_world_size(self.group)


class _SharedStatistics(_BatchNorm):
    """Forward pass with the statistics of all ranks; mixed into a torch BatchNorm."""

    group_handle: GroupHandle

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - torch's name
        """Normalise; torch's own computation where there is nobody to share with."""
        if not self.training or self.group_handle.num_members() == 1:
            return super().forward(input)
        self._check_input_dim(input)  # type: ignore[no-untyped-call]  # torch's
        context = current_sample_context()
        is_ghost = context is not None and context.is_ghost
        output, mean, var, count = normalise(
            input,
            self.weight,
            self.bias,
            eps=self.eps,
            group=self.group_handle.group,
            is_ghost=is_ghost,
        )
        self._track(mean, var, count)
        return output

    @torch.no_grad()
    def _track(self, mean: torch.Tensor, var: torch.Tensor, count: torch.Tensor) -> None:
        if not self.track_running_stats or self.running_mean is None:
            return
        assert self.running_var is not None
        fraction = self.momentum
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if fraction is None:  # the cumulative average
                fraction = 1.0 / float(self.num_batches_tracked)
        unbiased = var * (count / (count - 1))
        for running, seen in (
            (self.running_mean, mean),
            (self.running_var, unbiased),
        ):
            running.mul_(1 - (fraction or 0.0)).add_(
                seen.to(running.dtype), alpha=fraction or 0.0
            )


class SharedBatchNorm1d(_SharedStatistics, nn.BatchNorm1d):
    """``nn.BatchNorm1d`` over all ranks."""


class SharedBatchNorm2d(_SharedStatistics, nn.BatchNorm2d):
    """``nn.BatchNorm2d`` over all ranks."""


class SharedBatchNorm3d(_SharedStatistics, nn.BatchNorm3d):
    """``nn.BatchNorm3d`` over all ranks."""


class SharedSyncBatchNorm(_SharedStatistics, nn.SyncBatchNorm):
    """``nn.SyncBatchNorm`` over all ranks, on every device."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - torch's name
        """Normalise; never by torch's own, which refuses CPU tensors."""
        if self.training and self.group_handle.num_members() > 1:
            return super().forward(input)
        self._check_input_dim(input)
        return _BatchNorm.forward(self, input)


_SHARED: Final[dict[type[_BatchNorm], type[_SharedStatistics]]] = {
    nn.BatchNorm1d: SharedBatchNorm1d,
    nn.BatchNorm2d: SharedBatchNorm2d,
    nn.BatchNorm3d: SharedBatchNorm3d,
    nn.SyncBatchNorm: SharedSyncBatchNorm,
}


def convert_batchnorm(module: nn.Module, group: dist.ProcessGroup | None) -> nn.Module:
    """Let every BatchNorm of a model use the statistics of all ranks, in place.

    The modules stay the same objects, so parameters, buffers, hooks and flags do too. All
    ranks must then run the same number of forward and backward passes; a rank with nothing
    to do runs empty inputs or ghosts. The gradients of weight and bias stay local sums.

    Args:
        module: The model, or a single BatchNorm.
        group: The ranks, or None for the default group. Take a group of its own: the
            collectives of BatchNorm must not mix with those of a gradient exchange.

    Returns:
        The same module.

    Raises:
        ConfigError: For a lazy BatchNorm, or a class derived from BatchNorm.
    """
    handle = GroupHandle(group)
    found = [(n, m) for n, m in module.named_modules() if isinstance(m, _BatchNorm)]
    for name, norm in found:
        if not isinstance(norm, _SharedStatistics) and type(norm) not in _SHARED:
            raise ConfigError(_refusal(name, norm))
    for _, norm in found:
        if not isinstance(norm, _SharedStatistics):
            norm.__class__ = _SHARED[type(norm)]
        norm.group_handle = handle  # type: ignore[assignment]  # not a tensor or module
    logger.debug("%d BatchNorm layers share their statistics", len(found))
    return module


def set_group(
    module: nn.Module, group: dist.ProcessGroup | None, *, is_alone: bool = False
) -> None:
    """Change who shares statistics, for all converted layers of a model.

    Args:
        module: The model.
        group: The ranks, or None for the default group.
        is_alone: This rank shares with nobody, whatever the group.
    """
    for layer in module.modules():
        if isinstance(layer, _SharedStatistics):
            layer.group_handle.group = group
            layer.group_handle.is_alone = is_alone


def has_batchnorm(module: nn.Module) -> bool:
    """Whether a layer normalises by the statistics of its own rank alone."""
    return any(
        isinstance(layer, _BatchNorm) and not isinstance(layer, _SharedStatistics)
        for layer in module.modules()
    )


def _refusal(name: str, norm: _BatchNorm) -> str:
    kind = type(norm).__name__
    if isinstance(norm, nn.modules.lazy.LazyModuleMixin):
        return (
            f"{name or 'the model'} is a {kind} that has not seen its input yet; "
            "run the model once before session.setup(..., sync_batchnorm=True)"
        )
    return (
        f"{name or 'the model'} is a {kind}, but only torch's own BatchNorm classes can be "
        "synchronised; use one of those or set sync_batchnorm=False"
    )
