"""What a script sets otherwise than the run that it goes on with, by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from geartrain.checkpoint.drift import find_drift

if TYPE_CHECKING:
    from geartrain.parallel.saved_state import TrainState

_SCHEDULED = frozenset({"lr", "momentum", "betas", "max_momentum", "base_momentum"})
"""Settings that a schedule moves; ``initial_lr`` and the like show what it began with."""


def name_changed_settings(parts: Mapping[str, Any], state: TrainState) -> tuple[str, ...]:
    """Name what differs; to be asked before the state is taken on.

    Args:
        parts: State dicts by name, as they were saved.
        state: As the script has made it.

    Returns:
        Such as ``optimizer[0].weight_decay: 0.01 -> 0.1``, the saved one first.
    """
    is_scheduled = state.lr_scheduler is not None
    before = {"seed": parts["training"].get("seed", state.seed)}
    before |= _settings(parts["optimizer"], is_scheduled=is_scheduled)
    after = {"seed": state.seed}
    after |= _settings(state.optimizer.state_dict(), is_scheduled=is_scheduled)
    return tuple(str(drift) for drift in find_drift(before, after))


def _settings(
    optimizer: Mapping[str, Any],  # Any: a state dict
    *,
    is_scheduled: bool,
) -> dict[str, Any]:  # Any: JSON
    left_out = {"params", *(_SCHEDULED if is_scheduled else ())}
    return {
        "optimizer": [
            {name: _plain(value) for name, value in group.items() if name not in left_out}
            for group in optimizer.get("param_groups", ())
        ]
    }


def _plain(value: Any) -> Any:  # Any: whatever an optimizer is set to
    if isinstance(value, torch.Tensor):
        return _plain(value.tolist())
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value if isinstance(value, bool | int | float | str | None) else repr(value)
