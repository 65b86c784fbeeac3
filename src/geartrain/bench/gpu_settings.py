"""What the GPU benchmark's workers do and bring back. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from geartrain.bench.macro_settings import ModelSize
from geartrain.planner import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class ExactnessSettings:
    """One aggregated gradient over given shares, against one device."""

    plan: Plan
    dtype: Literal["float32", "float64"]
    seed: int = 0
    model: ModelSize = field(default_factory=ModelSize)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExactnessMeasurement:
    """How far the gradient lies from a plain float64 one on the CPU."""

    gradient_error: float
    """Relative L2 over all parameters."""
    loss_error: float
    """Relative."""
    schema_version: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class HarvestSettings:
    """A fleet against its fastest device on its own."""

    global_batch_size: int = 256
    warmup_steps: int = 12
    num_steps: int = 10
    num_rounds: int = 3
    seed: int = 0
    model: ModelSize = field(default_factory=ModelSize)


@dataclass(frozen=True, slots=True, kw_only=True)
class HarvestMeasurement:
    """Samples per second, round by round."""

    alone_samples_per_s: tuple[float, ...]
    """Rank 0's device with a plain loop, while the others wait."""
    fleet_samples_per_s: tuple[float, ...]
    plan: Plan
    """In force at the end."""
    schema_version: int = 1
