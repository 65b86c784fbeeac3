"""geartrain: train one PyTorch model on devices that are not alike.

Names are imported on first use, so that planning never imports torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from geartrain.errors import (
        CheckpointError,
        CommunicationError,
        ConfigError,
        DeviceError,
        GeartrainError,
        InfeasiblePlanError,
        TrainingStopped,
    )
    from geartrain.parallel.low_communication import DiLoCo, LocalSGD
    from geartrain.session import Session

__version__ = "0.1.0"

__all__ = [
    "CheckpointError",
    "CommunicationError",
    "ConfigError",
    "DeviceError",
    "DiLoCo",
    "GeartrainError",
    "InfeasiblePlanError",
    "LocalSGD",
    "Session",
    "TrainingStopped",
    "__version__",
]


_HOMES = {
    "DiLoCo": "geartrain.parallel.low_communication",
    "LocalSGD": "geartrain.parallel.low_communication",
    "Session": "geartrain.session",
}


def __getattr__(name: str) -> object:
    if name not in __all__:
        msg = f"module 'geartrain' has no attribute {name!r}"
        raise AttributeError(msg)
    home = _HOMES.get(name, "geartrain.errors")
    return getattr(importlib.import_module(home), name)
