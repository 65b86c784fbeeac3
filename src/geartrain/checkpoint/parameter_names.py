"""Optimizer states by parameter name instead of position.

Torch numbers parameters in the order in which the optimizer got them. Another order, or
another division into groups, would give moments to the wrong weights without a word. By
name, they find theirs, and an error says so where they can't.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from geartrain.errors import CheckpointError

# State dicts of optimizers; each optimizer's own entries are passed on as they are.
OptimizerState = dict[str, Any]

_OWN_KEYS = ("params", "param_names")


def name_optimizer_state(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer
) -> OptimizerState:
    """Return an optimizer's state dict with names in place of numbers.

    Args:
        model: Whose parameters it optimizes. A tied one goes by its first name.
        optimizer: Any that keeps torch's form: ``state`` and ``param_groups``.

    Raises:
        CheckpointError: If it optimizes something that is no parameter of the model.
    """
    names = _names_by_index(model, optimizer)
    saved = optimizer.state_dict()
    return {
        **saved,
        "state": {names[index]: value for index, value in saved["state"].items()},
        "param_groups": [
            {**group, "params": [names[index] for index in group["params"]]}
            for group in saved["param_groups"]
        ],
    }


def number_optimizer_state(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, named: OptimizerState
) -> OptimizerState:
    """Return a state dict that the optimizer can load, whatever its order and groups.

    Args:
        model: Whose parameters it optimizes.
        optimizer: As it is now.
        named: What ``name_optimizer_state`` returned.

    Raises:
        CheckpointError: If a parameter has no saved state, one that was saved is gone, or
            those of one group had different settings.
    """
    names = _names_by_index(model, optimizer)
    saved_groups = {
        name: group for group in named["param_groups"] for name in group["params"]
    }
    _check_same_names(set(names.values()), set(saved_groups))
    numbers = {name: index for index, name in names.items()}
    return {
        **named,
        "state": {numbers[name]: value for name, value in named["state"].items()},
        "param_groups": [
            _group_settings(group, names, saved_groups)
            for group in optimizer.state_dict()["param_groups"]
        ],
    }


def _names_by_index(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer
) -> dict[int, str]:
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    # The numbers that state_dict gives: over all groups, in order.
    ordered = (p for group in optimizer.param_groups for p in group["params"])
    found: dict[int, str] = {}
    for index, parameter in enumerate(ordered):
        name = names.get(id(parameter))
        if name is None:
            msg = (
                f"parameter {index} of {type(optimizer).__name__}, of shape "
                f"{tuple(parameter.shape)}, is none of the model's; save the model that "
                "it optimizes"
            )
            raise CheckpointError(msg)
        found[index] = name
    return found


def _check_same_names(has: set[str], saved: set[str]) -> None:
    for these, what in (
        (has - saved, "was not optimized when it was saved"),
        (saved - has, "is optimized no more"),
    ):
        if these:
            msg = (
                f"parameter {min(these)!r} {what}, and {len(these) - 1} more like it; "
                "build model and optimizer as they were"
            )
            raise CheckpointError(msg)


def _group_settings(
    group: Mapping[str, Any], names: Mapping[int, str], saved: Mapping[str, OptimizerState]
) -> OptimizerState:
    own = {key: group[key] for key in _OWN_KEYS if key in group}
    settings: OptimizerState | None = None
    for index in group["params"]:
        found = {k: v for k, v in saved[names[index]].items() if k not in _OWN_KEYS}
        if settings is not None and not _is_same(settings, found):
            msg = (
                f"{names[index]!r} was saved with other settings than "
                f"{names[group['params'][0]]!r}, with which it shares a group now; group "
                "the parameters as they were"
            )
            raise CheckpointError(msg)
        settings = found
    return {**(settings or {k: v for k, v in group.items() if k not in own}), **own}


def _is_same(settings: OptimizerState, others: OptimizerState) -> bool:
    return settings.keys() == others.keys() and all(
        torch.equal(value, others[key])
        if isinstance(value, torch.Tensor) and isinstance(others[key], torch.Tensor)
        else value == others[key]
        for key, value in settings.items()
    )
