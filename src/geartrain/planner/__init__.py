"""Who does what: from measured facts to a plan. Never reaches torch."""

from geartrain.planner.correction import (
    CorrectionEvent,
    CorrectionSettings,
    CorrectionState,
    Decision,
    DeviceObservation,
    expected_compute_s,
    observe,
    start_correction,
)
from geartrain.planner.curve_fit import (
    best_samples_per_s,
    fit_curve,
    predict_s,
    samples_per_s,
)
from geartrain.planner.explanation import Explanation, explain, render_text
from geartrain.planner.model_profile import (
    ComputeCurve,
    ExchangeNetwork,
    ExchangeProfile,
    MemoryCurve,
    ModelProfile,
    Workload,
)
from geartrain.planner.pinned_plan import check_plan
from geartrain.planner.plan import Plan, Replica, Stage
from geartrain.planner.prediction import predict
from geartrain.planner.protocol import Planner
from geartrain.planner.solver import solve

__all__ = [
    "ComputeCurve",
    "CorrectionEvent",
    "CorrectionSettings",
    "CorrectionState",
    "Decision",
    "DeviceObservation",
    "ExchangeNetwork",
    "ExchangeProfile",
    "Explanation",
    "MemoryCurve",
    "ModelProfile",
    "Plan",
    "Planner",
    "Replica",
    "Stage",
    "Workload",
    "best_samples_per_s",
    "check_plan",
    "expected_compute_s",
    "explain",
    "fit_curve",
    "observe",
    "predict",
    "predict_s",
    "render_text",
    "samples_per_s",
    "solve",
    "start_correction",
]
