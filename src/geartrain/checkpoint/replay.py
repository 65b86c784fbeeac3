"""Optimizer steps from logged gradients: the same bits as when they were first applied.

Neither forward nor backward runs. What the step's numbers depended on beside the gradient
is in the log as it was: the hyperparameters in force, the norm that clipping found (its
bits depend on the number of threads), the loss scale, buffers that the forward changed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import torch

from geartrain.checkpoint.gradient_log import LoggedStep
from geartrain.checkpoint.ranges import StateRange, check_tiling
from geartrain.errors import CheckpointError

Json = Any  # what JSON can hold


@dataclass(frozen=True, slots=True, kw_only=True)
class AppliedUpdate:
    """How a reduced gradient was applied: scaled, unscaled, clipped, stepped.

    Where the log holds the gradient as the optimizer saw it, only ``groups`` is needed.
    """

    groups: tuple[dict[str, Json], ...]
    """Hyperparameters of each parameter group, as ``read_hyperparameters`` gives them."""
    factor: float = 1.0
    """The gradients were multiplied by it."""
    loss_scale: float | None = None
    """They were divided by it; None without a loss scaler."""
    max_grad_norm: float | None = None
    grad_norm: float | None = None
    """What clipping found, before it clipped."""
    is_skipped: bool = False
    """A gradient was not finite: the optimizer did not step."""
    untouched: tuple[str, ...] = ()
    """Parameters whose gradient was None."""
    extras: dict[str, Json] = field(default_factory=dict)
    """What belongs to the state after the step: scheduler, scaler, position in the data."""

    def to_json(self) -> dict[str, Json]:
        """What a log's ``update`` holds."""
        encoded: dict[str, Json] = msgspec.to_builtins(self)
        return encoded

    @classmethod
    def from_json(cls, update: dict[str, Json]) -> AppliedUpdate:
        """Read it back.

        Raises:
            CheckpointError: If it is none.
        """
        try:
            return msgspec.convert(update, cls)
        except msgspec.ValidationError as error:
            msg = f"a logged step does not say how it was applied ({error}); skip the log"
            raise CheckpointError(msg) from error


def read_hyperparameters(optimizer: torch.optim.Optimizer) -> tuple[dict[str, Json], ...]:
    """What is in force in each parameter group, before a scheduler moves it on.

    Raises:
        CheckpointError: If a value is neither a number, a flag, a string nor a tuple of
            them.
    """
    return tuple(
        {key: _to_json(key, value) for key, value in group.items() if key != "params"}
        for group in optimizer.param_groups
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayTarget:
    """What is brought forward, at the state that the log goes on from.

    Args:
        parameters: By the names in the log, as the optimizer holds them.
        optimizer: Of the same kind and with the same flags as the one logged.
        buffers: Tensors that the log holds whole and that are copied over, by name.
        after_step: Called after each step, such as an average of the weights.
    """

    parameters: Mapping[str, torch.nn.Parameter]
    optimizer: torch.optim.Optimizer
    buffers: Mapping[str, torch.Tensor] = field(default_factory=dict)
    after_step: Callable[[LoggedStep], None] | None = None


def replay_steps(
    target: ReplayTarget, steps: Iterable[Sequence[LoggedStep]], lineage: str
) -> dict[str, Json] | None:
    """Apply steps in order.

    Args:
        target: At the state before the first of them.
        steps: For each step what the members logged of it; together all parameters.
        lineage: Of the state before the first.

    Returns:
        The extras of the last step; None where there was none.

    Raises:
        CheckpointError: If a step does not follow from the one before, or a part of a
            gradient is missing, naming it. The target is as before that step.
    """
    extras: dict[str, Json] | None = None
    for logged in steps:
        first = logged[0]
        for record in logged:
            same = (record.step, record.lineage) == (first.step, first.lineage)
            if not same or record.previous_lineage != lineage:
                msg = (
                    f"step {record.step} of the log does not follow from lineage "
                    f"{lineage[:12]}; restore the snapshot that it belongs to"
                )
                raise CheckpointError(msg)
        extras = _replay(target, logged)
        lineage = first.lineage
        if target.after_step is not None:
            target.after_step(first)
    return extras


def _replay(target: ReplayTarget, logged: Sequence[LoggedStep]) -> dict[str, Json]:
    update = AppliedUpdate.from_json(logged[0].update)
    untouched = set(update.untouched)
    wanted = {
        name: parameter
        for name, parameter in target.parameters.items()
        if name not in untouched and parameter.requires_grad
    }
    grads = _collect(wanted, target.buffers, logged)
    _set_hyperparameters(target.optimizer, update.groups)
    for name, parameter in target.parameters.items():
        parameter.grad = grads.get(name)
    apply_update(list(target.parameters.values()), target.optimizer, update)
    target.optimizer.zero_grad(set_to_none=True)
    return update.extras


def apply_update(
    parameters: Sequence[torch.nn.Parameter],
    optimizer: torch.optim.Optimizer,
    update: AppliedUpdate,
) -> None:
    """Scale, unscale, clip and step as it was done first; gradients are in place."""
    grads = [p.grad for p in parameters if p.grad is not None]
    if update.factor != 1.0 and grads:
        torch._foreach_mul_(grads, update.factor)
    if update.loss_scale is not None and grads:
        _unscale(grads, update.loss_scale)
    if update.is_skipped:
        return
    if update.max_grad_norm is not None and update.grad_norm is not None and grads:
        norm = torch.tensor(update.grad_norm, dtype=grads[0].dtype, device=grads[0].device)
        torch.nn.utils.clip_grads_with_norm_(parameters, update.max_grad_norm, norm)
    optimizer.step()


def _unscale(grads: list[torch.Tensor], loss_scale: float) -> None:
    device = grads[0].device
    # The scaler's own kernel and rounding: torch.amp.GradScaler.unscale_.
    inverse = torch.tensor(loss_scale, device=device).double().reciprocal().float()
    found = torch.zeros((), dtype=torch.float32, device=device)
    torch._amp_foreach_non_finite_check_and_unscale_(grads, found, inverse)


def _collect(
    wanted: Mapping[str, torch.nn.Parameter],
    buffers: Mapping[str, torch.Tensor],
    logged: Sequence[LoggedStep],
) -> dict[str, torch.Tensor]:
    """Put gradients together, and copy buffers over once all are known to be whole."""
    sizes = {name: parameter.numel() for name, parameter in wanted.items()}
    parts = [part for record in logged for part in record.parts]
    check_tiling((p.range for p in parts if p.range.name in sizes), sizes)
    grads = {name: torch.empty(p.shape, dtype=p.dtype) for name, p in wanted.items()}
    for part in parts:
        place: torch.Tensor | None = grads.get(part.range.name)
        if place is None:
            place = buffers.get(part.range.name)
        if place is not None:
            _fill(place, part.range, part.dtype, part.data)
    return {name: grad.to(wanted[name].device) for name, grad in grads.items()}


def _fill(place: torch.Tensor, part: StateRange, dtype: str, data: bytes) -> None:
    if dtype != str(place.dtype).removeprefix("torch."):
        msg = f"{part} was logged as {dtype}, but is {place.dtype} here; use the same model"
        raise CheckpointError(msg)
    if data:
        source = torch.frombuffer(bytearray(data), dtype=place.dtype)
        place.detach().view(-1)[part.start : part.stop].copy_(source)


def _set_hyperparameters(
    optimizer: torch.optim.Optimizer, groups: Sequence[dict[str, Json]]
) -> None:
    if len(groups) != len(optimizer.param_groups):
        msg = (
            f"the log has {len(groups)} parameter groups, the optimizer "
            f"{len(optimizer.param_groups)}; make the same optimizer"
        )
        raise CheckpointError(msg)
    for group, logged in zip(optimizer.param_groups, groups, strict=True):
        for key, value in logged.items():
            group[key] = _from_json(value)


def _to_json(key: str, value: object) -> Json:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        return {"items": [_to_json(key, item) for item in value]}
    if isinstance(value, torch.Tensor) and value.numel() == 1 and not value.dim():
        dtype = str(value.dtype).removeprefix("torch.")
        return {"tensor": value.item(), "dtype": dtype}
    msg = (
        f"the optimizer's {key} is a {type(value).__name__}, which a gradient log can't "
        "hold; train without a log, or give it as a number"
    )
    raise CheckpointError(msg)


def _from_json(value: Json) -> object:
    if not isinstance(value, dict):
        return value
    if "items" in value:
        return tuple(_from_json(item) for item in value["items"])
    return torch.tensor(value["tensor"], dtype=getattr(torch, value["dtype"]))
