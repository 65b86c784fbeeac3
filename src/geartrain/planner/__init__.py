"""Who does what: from measured facts to a plan. Never reaches torch."""

from geartrain.planner.curve_fit import (
    best_samples_per_s,
    fit_curve,
    predict_s,
    samples_per_s,
)
from geartrain.planner.model_profile import (
    ComputeCurve,
    ExchangeProfile,
    MemoryCurve,
    ModelProfile,
    Workload,
)
from geartrain.planner.plan import Plan, Replica, Stage
from geartrain.planner.prediction import predict
from geartrain.planner.protocol import Planner
from geartrain.planner.solver import solve

__all__ = [
    "ComputeCurve",
    "ExchangeProfile",
    "MemoryCurve",
    "ModelProfile",
    "Plan",
    "Planner",
    "Replica",
    "Stage",
    "Workload",
    "best_samples_per_s",
    "fit_curve",
    "predict",
    "predict_s",
    "samples_per_s",
    "solve",
]
