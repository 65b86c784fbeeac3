"""Checks that keep a wrong step from being applied, with errors that say what to do."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from geartrain.errors import CommunicationError, ConfigError

if TYPE_CHECKING:
    import torch

    from geartrain.parallel.trailer import RankFigures, Trailer

_COUNT_TOLERANCE = 1e-6
"""Relative; counts may be weights that are no whole numbers."""


def check_optimizer(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Check that a step of this optimizer trains the model, and alike on all ranks.

    Raises:
        ConfigError: If its step needs a closure, or it holds other parameters.
    """
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        msg = (
            f"{type(optimizer).__name__} evaluates the loss itself, by a closure, but one "
            "step here is one gradient; choose an optimizer whose step() needs no closure"
        )
        raise ConfigError(msg)
    own = {id(parameter) for parameter in model.parameters()}
    held = [p for group in optimizer.param_groups for p in group["params"]]
    foreign = [p for p in held if p.requires_grad and id(p) not in own]
    if foreign:
        shapes = ", ".join(str(tuple(p.shape)) for p in foreign[:3])
        msg = (
            f"{len(foreign)} of the optimizer's {len(held)} parameters (of shape {shapes}"
            f"{', ...' if len(foreign) > 3 else ''}) are not the model's, so their "  # noqa: PLR2004 - as many as are listed
            "gradients would not be exchanged; build the optimizer from the parameters of "
            "the model given to setup(), and put further ones into that model"
        )
        raise ConfigError(msg)


def check_still_frozen(frozen: Iterable[tuple[str, torch.nn.Parameter]]) -> None:
    """Check that no parameter takes a gradient that took none at set-up.

    Raises:
        ConfigError: If one does.
    """
    for name, parameter in frozen:
        if parameter.requires_grad:
            msg = (
                f"{name} was frozen at setup() and now takes a gradient, which would not "
                "be exchanged; let it take one at setup() and freeze it afterwards"
            )
            raise ConfigError(msg)


def check_same_plan(ranks: Sequence[RankFigures], members: Sequence[int]) -> None:
    """Check that all ranks computed by the same plan.

    Args:
        ranks: Figures of all ranks.
        members: Those that are left.

    Raises:
        CommunicationError: On all ranks, if not.
    """
    codes = {ranks[r].plan_code for r in members}
    if len(codes) > 1:
        by_rank = [f"rank {r}: {int(ranks[r].plan_code):08x}" for r in members]
        msg = (
            f"the ranks carry out different plans ({', '.join(by_rank)}); the step was "
            "not applied. Start all workers with the same script, plan and version"
        )
        raise CommunicationError(msg)


def check_sums(
    trailer: Trailer, num_samples: int, known_counts: Mapping[str, float] | None
) -> None:
    """Check that every sample was computed once, and that counts known ahead were right.

    Args:
        trailer: What all ranks exchanged.
        num_samples: Samples of the global batch.
        known_counts: What ``count_fn`` counted over all ranks; None without it.

    Raises:
        ConfigError: On all ranks, if not.
    """
    computed = sum(figures.num_samples for figures in trailer.ranks)
    if computed != num_samples:
        msg = (
            f"the ranks computed {computed:g} of the global batch's {num_samples} samples; "
            "the step was not applied. Call backward() once for each micro-batch"
        )
        raise ConfigError(msg)
    for name, known in (known_counts or {}).items():
        found = trailer.counts.get(name, 0.0)
        if abs(found - known) > _COUNT_TOLERANCE * max(known, 1.0):
            msg = (
                f"count_fn counted {known:g} for the term {name!r} but loss_fn "
                f"{found:g}; let both count the same elements"
            )
            raise ConfigError(msg)


def check_names(names: Iterable[str], expected: Sequence[str]) -> None:
    """Check that a micro-batch has the loss terms that those before it had.

    Args:
        names: Of its terms.
        expected: Of the terms before; none where it is the first.

    Raises:
        ConfigError: If they differ.
    """
    if expected and set(expected) != set(names):
        msg = (
            f"loss_fn returned the terms {sorted(names)} but before it were "
            f"{sorted(expected)}; return every term for each batch, with count 0 "
            "where it is absent"
        )
        raise ConfigError(msg)


def known_count(name: str, counts: Mapping[str, float]) -> float:
    """The count of a loss term, fleet-wide.

    Raises:
        ConfigError: If ``count_fn`` did not count it.
    """
    count = counts.get(name)
    if count is None:
        msg = (
            f"loss_fn returned the term {name!r} but count_fn counted "
            f"{sorted(counts)}; let both use the same names"
        )
        raise ConfigError(msg)
    return count


def check_differentiable(loss: torch.Tensor) -> None:
    """Check that a loss has a backward.

    Raises:
        ConfigError: If no trainable parameter is in it.
    """
    if not loss.requires_grad:
        msg = (
            "the loss does not depend on any trainable parameter; expected loss_fn "
            "to use the model's output, with gradients enabled"
        )
        raise ConfigError(msg)
