"""Who does what: from measured facts to a plan. Never reaches torch."""

from geartrain.planner.model_profile import (
    ComputeCurve,
    ExchangeProfile,
    MemoryCurve,
    ModelProfile,
    Workload,
)
from geartrain.planner.plan import Plan, Replica, Stage

__all__ = [
    "ComputeCurve",
    "ExchangeProfile",
    "MemoryCurve",
    "ModelProfile",
    "Plan",
    "Replica",
    "Stage",
    "Workload",
]
