"""Fill in what a given assignment of work is predicted to take."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

from geartrain.planner.compute_time import last_micro_batch_s, share_s
from geartrain.planner.curve_fit import best_samples_per_s
from geartrain.planner.exchange_cost import exchange_overlap
from geartrain.planner.model_profile import ComputeCurve, ModelProfile
from geartrain.planner.overlap import Overlap
from geartrain.planner.plan import Plan, Replica


def predict(plan: Plan, profile: ModelProfile) -> Plan:
    """The same assignment, with this profile's predictions.

    Compute is forward, backward and the optimizer, as ``StepRecord.compute_s`` counts
    it. The exchange counts as far as no backward pass hides it. A tail shared by whoever
    is free adds its samples at all members' best speed, and hides nothing: who runs the
    last micro-batch is not known.

    Raises:
        KeyError: If the plan names a device the profile lacks; ``check_plan`` finds
            that first, in words.
    """
    curves = {curve.device_id: curve for curve in profile.curves}
    updates_s = optimizer_times_s(profile)
    replicas = tuple(
        _predict_replica(
            replica,
            curves[replica.device_id],
            updates_s[replica.device_id],
            uniform=plan.uniform_micro_batches,
        )
        for replica in plan.replicas
    )
    members = [replica.device_id for replica in replicas]
    overlap = planned_overlap(profile, members, plan.tail_samples)
    times_s = [replica.predicted_compute_s for replica in replicas]
    done_s = max(
        replica.predicted_compute_s
        + overlap.exposed_s(_last_backward_s(replica, curves[replica.device_id], plan))
        for replica in replicas
    )
    limit = plan.global_batch_size
    tail_s = plan.tail_samples / total_samples_per_s([curves[i] for i in members], limit)
    return dataclasses.replace(
        plan,
        stages=(dataclasses.replace(plan.stages[0], replicas=replicas),),
        predicted_step_s=done_s + tail_s,
        predicted_exchange_s=done_s - max(times_s),
        predicted_whole_exchange_s=overlap.whole_s,
        bound_step_s=limit / total_samples_per_s(profile.curves, limit),
        imbalance_fraction=_imbalance_fraction(times_s),
    )


def planned_overlap(
    profile: ModelProfile, member_ids: Sequence[str], tail_samples: int
) -> Overlap:
    """The exchange among these devices, in a plan with or without a tail."""
    overlap = exchange_overlap(profile, member_ids)
    if tail_samples:
        return Overlap(whole_s=overlap.whole_s, last_s=overlap.whole_s)
    return overlap


def _last_backward_s(replica: Replica, curve: ComputeCurve, plan: Plan) -> float:
    num_uniform = replica.num_micro_batches if plan.uniform_micro_batches else 0
    size = replica.micro_batch_size
    last_s = last_micro_batch_s(curve, replica.share, size, num_uniform)
    return curve.backward_fraction * last_s


def _predict_replica(
    replica: Replica, curve: ComputeCurve, update_s: float, *, uniform: bool
) -> Replica:
    num_uniform = replica.num_micro_batches if uniform else 0
    size = replica.micro_batch_size
    return dataclasses.replace(
        replica,
        predicted_compute_s=share_s(curve, replica.share, size, num_uniform) + update_s,
        predicted_memory_bytes=curve.memory.bytes_for(size) if curve.memory else 0,
    )


def _imbalance_fraction(times_s: Sequence[float]) -> float:
    slowest_s = max(times_s)
    mean_s = math.fsum(times_s) / len(times_s)
    return max(0.0, (slowest_s - mean_s) / slowest_s) if slowest_s > 0 else 0.0


def optimizer_times_s(profile: ModelProfile) -> dict[str, float]:
    """Time of an optimizer step by device id; 0 where it was not measured."""
    times_s = profile.optimizer_s or (0.0,) * len(profile.curves)
    ids = [curve.device_id for curve in profile.curves]
    return dict(zip(ids, times_s, strict=True))


def total_samples_per_s(curves: Sequence[ComputeCurve], limit: int) -> float:
    """Sum of the devices' best speeds, with micro-batches up to a limit."""
    return math.fsum(best_samples_per_s(curve, limit) for curve in curves)


def scale_profile(profile: ModelProfile, factors: Mapping[str, float]) -> ModelProfile:
    """The profile as if each device took ``factor`` times as long to compute."""
    curves = tuple(
        dataclasses.replace(
            curve,
            seconds=tuple(time_s * factors[curve.device_id] for time_s in curve.seconds),
            alpha_s=curve.alpha_s * factors[curve.device_id],
            beta_s=curve.beta_s * factors[curve.device_id],
        )
        for curve in profile.curves
    )
    updates_s = optimizer_times_s(profile)
    optimizer_s = tuple(updates_s[c.device_id] * factors[c.device_id] for c in curves)
    return dataclasses.replace(profile, curves=curves, optimizer_s=optimizer_s)
