"""Normalisation by the statistics of all ranks, forward and backward.

Shapes: x (N, C, ...); a channel's mean, variance, weight, bias and sums (C,).
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.distributed as dist
from torch.nn import functional

from geartrain.errors import CommunicationError, ConfigError


class TooFewValuesError(ConfigError, ValueError):
    """A channel has a single value over all ranks; torch raises ValueError for it."""


def normalise(  # noqa: PLR0913 - the arguments of batch_norm and who shares
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    *,
    eps: float,
    group: dist.ProcessGroup | None,
    is_ghost: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Normalise each channel by its statistics over all ranks of the group.

    Every rank of the group must call it, and run its backward, equally often. A ghost, or
    an input without samples, counts for nothing and gets a gradient of zeros.

    Args:
        x: This rank's samples, shape (N, C, ...); N may be 0.
        weight: Scale of each channel, shape (C,); its gradient is this rank's sum.
        bias: Shift of each channel, shape (C,); its gradient is this rank's sum.
        eps: Added to the variance.
        group: The ranks; None for the default group.
        is_ghost: Whether the samples are another rank's and must not count.

    Returns:
        The output, the mean, the biased variance, and the number of values a channel.

    Raises:
        TooFewValuesError: On every rank, if a channel has fewer than two values.
        CommunicationError: If a peer was lost.

    Source: Ioffe and Szegedy 2015; the merge of variances is Chan et al. 1979.
    """
    results = _Normalise.apply(x, weight, bias, eps, group, is_ghost)  # type: ignore[no-untyped-call]  # torch's
    return cast("tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]", results)


class _Normalise(torch.autograd.Function):
    @staticmethod
    def forward(  # noqa: PLR0913, PLR0917 - autograd takes positional arguments
        ctx: Any,  # torch gives its context no public type
        x: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        eps: float,
        group: dist.ProcessGroup | None,
        is_ghost: bool,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        count = 0 if is_ghost or x.numel() == 0 else x.numel() // x.shape[1]
        mean, var = _local_statistics(x, count)
        mean, var, total = _merge(mean, var, count, group)
        if count <= 1 and float(total) <= 1:  # reads a device only where it may be needed
            msg = (
                f"BatchNorm has {int(total)} value(s) per channel over all ranks (input "
                f"{tuple(x.shape)} here) but needs more than 1 when training; raise "
                "global_batch_size, set drop_last=True or call model.eval()"
            )
            raise TooFewValuesError(msg)
        ctx.save_for_backward(x, weight, mean, var, total)
        ctx.eps, ctx.group, ctx.contributes = eps, group, count > 0
        output = _scale(x, mean, var, weight, bias, eps)
        ctx.mark_non_differentiable(mean, var, total)
        return output, mean, var, total

    @staticmethod
    def backward(
        ctx: Any,  # as in forward
        *grads: torch.Tensor,
    ) -> tuple[torch.Tensor | None, ...]:
        if torch.is_grad_enabled():
            msg = (
                "create_graph=True asks for second derivatives, which synchronised "
                "BatchNorm has not; set sync_batchnorm=False"
            )
            raise ConfigError(msg)
        x, weight, mean, var, total = ctx.saved_tensors
        grad = grads[0]
        grad_weight = grad_bias = torch.zeros_like(mean)
        if ctx.contributes:
            grad_weight, grad_bias = _local_sums(grad, x, mean, var, ctx.eps)
        grad_x = None
        if ctx.needs_input_grad[0]:
            sums = torch.stack((grad_weight, grad_bias))
            _all_reduce(sums, ctx.group)
            grad_x = torch.zeros_like(x)
            if ctx.contributes:
                scale = torch.rsqrt(var + ctx.eps)
                grad_x = _input_grad(grad, x, mean, scale, weight, sums / total)
        dtype = None if weight is None else weight.dtype
        return (
            grad_x,
            grad_weight.to(dtype) if ctx.needs_input_grad[1] else None,
            grad_bias.to(dtype) if ctx.needs_input_grad[2] else None,
            None,
            None,
            None,
        )


def _statistics_dtype(x: torch.Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _local_statistics(x: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and biased variance a channel; zeros where this rank contributes nothing."""
    dtype = _statistics_dtype(x)
    if count == 0:
        zeros = torch.zeros(x.shape[1], dtype=dtype, device=x.device)
        return zeros, zeros
    x = x.to(dtype)
    if x.device.type == "cpu":
        # BatchNorm's own kernel: 3 to 30 times as fast as var_mean, measured on 2 M values.
        mean, var = torch.batch_norm_update_stats(x, None, None, 0.0)
        return mean, var
    dims = [dim for dim in range(x.ndim) if dim != 1]
    var, mean = torch.var_mean(x, dim=dims, correction=0)
    return mean, var


def _merge(
    mean: torch.Tensor, var: torch.Tensor, count: int, group: dist.ProcessGroup | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Mean, biased variance and count over all ranks, the same bits on each."""
    ours = torch.cat((mean.new_tensor([count]), mean, var))
    gathered = _all_gather(ours, group)
    counts = gathered[:, :1]
    means, variances = gathered[:, 1:].chunk(2, dim=1)
    total = counts.sum()
    fractions = counts / total.clamp(min=1)
    merged_mean = (fractions * means).sum(0)
    # Deviations from the mean, not E[x^2] - mean^2, which cancels for a large mean.
    merged_var = (fractions * (variances + (means - merged_mean).square())).sum(0)
    return merged_mean, merged_var, total


def _scale(  # noqa: PLR0913, PLR0917 - the arguments of batch_norm
    x: torch.Tensor,
    mean: torch.Tensor,
    var: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
) -> torch.Tensor:
    weight = None if weight is None else weight.to(mean.dtype)
    bias = None if bias is None else bias.to(mean.dtype)
    return functional.batch_norm(x, mean, var, weight, bias, training=False, eps=eps)


def _local_sums(
    grad: torch.Tensor,
    x: torch.Tensor,
    mean: torch.Tensor,
    var: torch.Tensor,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sums of grad * normalised x and of grad, a channel: torch's kernel for eval mode."""
    dtype = mean.dtype
    wanted = [False, True, True]
    _, grad_weight, grad_bias = torch.ops.aten.native_batch_norm_backward(
        grad.to(dtype), x.to(dtype), torch.ones_like(mean), mean, var,
        None, None, False, eps, wanted,
    )  # fmt: skip
    return grad_weight, grad_bias


def _input_grad(  # noqa: PLR0913, PLR0917 - the symbols of the formula
    grad: torch.Tensor,
    x: torch.Tensor,
    mean: torch.Tensor,
    scale: torch.Tensor,
    weight: torch.Tensor | None,
    means: torch.Tensor,
) -> torch.Tensor:
    """Return weight * scale * (grad - mean(grad) - xhat * mean(grad * xhat))."""
    shape = (1, -1) + (1,) * (x.ndim - 2)
    factor = scale if weight is None else scale * weight.to(scale.dtype)
    slope = -factor * scale * means[0]
    grad_x = x - mean.view(shape)
    grad_x.mul_(slope.view(shape)).sub_((factor * means[1]).view(shape))
    grad_x.addcmul_(grad.to(grad_x.dtype), factor.view(shape))
    return grad_x.to(x.dtype)


def _staged(tensor: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """Gloo does not gather device memory: go through the host there."""
    if dist.get_backend(group) == dist.Backend.GLOO:
        return tensor.cpu()
    return tensor


def _all_gather(tensor: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """Stack the tensors of all ranks, shape (W, ...)."""
    ours = _staged(tensor, group)
    gathered = [torch.empty_like(ours) for _ in range(dist.get_world_size(group))]
    try:
        dist.all_gather(gathered, ours, group=group)
    except RuntimeError as error:
        raise CommunicationError(_lost_peer(error)) from error
    return torch.stack(gathered).to(tensor.device)


def _all_reduce(tensor: torch.Tensor, group: dist.ProcessGroup | None) -> None:
    """Replace the tensor by its sum over all ranks."""
    staged = _staged(tensor, group)
    try:
        dist.all_reduce(staged, group=group)
    except RuntimeError as error:
        raise CommunicationError(_lost_peer(error)) from error
    if staged is not tensor:
        tensor.copy_(staged)


def _lost_peer(error: RuntimeError) -> str:
    return (
        f"the statistics of BatchNorm could not be exchanged ({error}); expected every "
        "rank in this forward and backward pass; see the other ranks' logs"
    )
