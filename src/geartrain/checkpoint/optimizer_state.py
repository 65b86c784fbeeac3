"""Load an optimizer's state with the bits that were saved.

Torch's ``load_state_dict`` casts every tensor but ``step`` to the dtype of its parameter:
codes of 8 bits become float32, and float32 moments of bfloat16 weights lose half their
bits, without a word. Here they keep their dtype.

Source: torch.optim.Optimizer._process_value_according_to_param_policy.
"""

from __future__ import annotations

from typing import Any

import torch

# State dicts of optimizers, and what lies in them: each optimizer has entries of its own.
OptimizerState = dict[str, Any]
Value = Any


def load_optimizer_state(optimizer: torch.optim.Optimizer, saved: OptimizerState) -> None:
    """Load a state dict into an optimizer; bits and dtypes are those that were saved.

    Args:
        optimizer: As it was built when it was saved.
        saved: What its ``state_dict`` returned then.

    Raises:
        ValueError: If it has other groups, as torch says.
    """
    optimizer.load_state_dict(saved)
    places = [p for group in optimizer.param_groups for p in group["params"]]
    numbers = [number for group in saved["param_groups"] for number in group["params"]]
    for place, number in zip(places, numbers, strict=True):
        for key, value in saved["state"].get(number, {}).items():
            state = optimizer.state[place]
            # An optimizer that loads in a way of its own may have left it out.
            if key in state:
                state[key] = _keep_dtypes(state[key], value)


def _keep_dtypes(loaded: Value, saved: Value) -> Value:
    """Return what was loaded, but for tensors that were cast: those as they were saved."""
    if isinstance(loaded, torch.Tensor) and isinstance(saved, torch.Tensor):
        was_cast = loaded.dtype != saved.dtype and loaded.shape == saved.shape
        return saved.detach().clone().to(loaded.device) if was_cast else loaded
    if type(loaded) is dict and type(saved) is dict:
        return {
            key: _keep_dtypes(value, saved.get(key, value)) for key, value in loaded.items()
        }
    if type(loaded) is list and type(saved) is list and len(loaded) == len(saved):
        return [_keep_dtypes(*pair) for pair in zip(loaded, saved, strict=True)]
    return loaded
