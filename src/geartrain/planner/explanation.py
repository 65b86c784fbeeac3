"""Say why a plan is as it is: who does what, who limits, and where the loss is."""

from __future__ import annotations

import math
from dataclasses import dataclass

from geartrain.planner.curve_fit import (
    best_samples_per_s,
    largest_micro_batch_size,
    predict_s,
)
from geartrain.planner.exchange.explanation import (
    ExchangeExplanation,
    exchange_sentences,
    explain_exchange,
)
from geartrain.planner.exchange_cost import device_costs_s, exchange_request
from geartrain.planner.model_profile import ComputeCurve, ModelProfile
from geartrain.planner.plan import Plan, Replica
from geartrain.planner.prediction import (
    optimizer_times_s,
    predict,
    total_samples_per_s,
)
from geartrain.units import format_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class ExplanationRow:
    """One device's part of a step, as predicted."""

    device_id: str
    share: int
    micro_batches: str
    """Such as ``3 x 16 + 4``: three of 16 samples and a rest of 4."""
    compute_s: float
    """Forward, backward and optimizer."""
    exchange_s: float
    """What of it no backward pass hides."""
    idle_s: float
    """Wait for the slowest device."""
    samples_per_s: float
    """Its best speed, alone and without exchange."""
    note: str
    """Why it has this share."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossSplit:
    """Where the time above the bound goes; the parts add up to it."""

    left_out_s: float
    """Speed of devices that do not take part."""
    granularity_s: float
    """Micro-batches below a device's best speed: fixed times, memory, rests."""
    imbalance_s: float
    """Whole samples do not divide evenly: devices wait for the slowest."""
    optimizer_s: float
    exchange_s: float

    @property
    def total_s(self) -> float:
        """Predicted step time less the bound."""
        return math.fsum(self.by_name().values())

    def by_name(self) -> dict[str, float]:
        """The parts by what people call them."""
        return {
            "left-out devices": self.left_out_s,
            "micro-batches": self.granularity_s,
            "imbalance": self.imbalance_s,
            "optimizer": self.optimizer_s,
            "exchange": self.exchange_s,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """A plan in numbers and words."""

    model_name: str
    rows: tuple[ExplanationRow, ...]
    """Devices in rank order, left-out ones included."""
    global_batch_size: int
    tail_samples: int
    predicted_step_s: float
    bound_step_s: float
    efficiency: float
    """bound / predicted step time."""
    limiting_device_id: str
    loss: LossSplit
    exchange: ExchangeExplanation | None = None
    """How gradients travel; None where the links are not known."""
    whole_exchange_s: float = 0.0
    exposed_exchange_s: float = 0.0
    """What of it is waited for: backward hides the rest."""


def explain(plan: Plan, profile: ModelProfile) -> Explanation:
    """Explain a plan for the devices of a profile.

    Args:
        plan: Any plan that ``check_plan`` accepts; its predictions are made anew.
        profile: What was measured.
    """
    plan = predict(plan, profile)
    slowest = max(plan.replicas, key=lambda replica: replica.predicted_compute_s)
    step_s = plan.predicted_step_s
    return Explanation(
        model_name=profile.name,
        rows=tuple(_explain_device(plan, profile, curve) for curve in profile.curves),
        global_batch_size=plan.global_batch_size,
        tail_samples=plan.tail_samples,
        predicted_step_s=step_s,
        bound_step_s=plan.bound_step_s,
        efficiency=plan.bound_step_s / step_s,
        limiting_device_id=slowest.device_id,
        loss=_split_loss(plan, profile),
        exchange=_explain_exchange(plan, profile),
        whole_exchange_s=plan.predicted_whole_exchange_s,
        exposed_exchange_s=plan.predicted_exchange_s,
    )


def _explain_exchange(plan: Plan, profile: ModelProfile) -> ExchangeExplanation | None:
    if len(plan.replicas) < 2:  # noqa: PLR2004 - it takes two to exchange
        return None
    members = [replica.device_id for replica in plan.replicas]
    request = exchange_request(profile, members)
    return explain_exchange(request) if request is not None else None


def _split_loss(plan: Plan, profile: ModelProfile) -> LossSplit:
    limit = plan.global_batch_size
    curves = {curve.device_id: curve for curve in profile.curves}
    updates_s = optimizer_times_s(profile)
    members = [curves[replica.device_id] for replica in plan.replicas]
    total = total_samples_per_s(members, limit)
    # Weighted by speed, for a second of a fast device is worth more samples.
    weights = [best_samples_per_s(curve, limit) / total for curve in members]
    times_s = [replica.predicted_compute_s for replica in plan.replicas]
    mean_s = math.fsum(w * t for w, t in zip(weights, times_s, strict=True))
    update_s = math.fsum(
        weight * updates_s[curve.device_id]
        for weight, curve in zip(weights, members, strict=True)
    )
    planned_samples = limit - plan.tail_samples
    return LossSplit(
        left_out_s=limit / total - plan.bound_step_s,
        granularity_s=mean_s - update_s - planned_samples / total,
        imbalance_s=max(times_s) - mean_s,
        optimizer_s=update_s,
        exchange_s=plan.predicted_exchange_s,
    )


def _explain_device(
    plan: Plan, profile: ModelProfile, curve: ComputeCurve
) -> ExplanationRow:
    replica = plan.replica_of(curve.device_id)
    slowest_s = max(r.predicted_compute_s for r in plan.replicas)
    takes_part = replica is not None
    compute_s = replica.predicted_compute_s if replica else 0.0
    return ExplanationRow(
        device_id=curve.device_id,
        share=replica.share if replica else 0,
        micro_batches=_describe_cut(replica) if replica else "-",
        compute_s=compute_s,
        exchange_s=plan.predicted_exchange_s if takes_part else 0.0,
        idle_s=slowest_s - compute_s if takes_part else 0.0,
        samples_per_s=best_samples_per_s(curve, plan.global_batch_size),
        note=_note(plan, profile, curve),
    )


def _describe_cut(replica: Replica) -> str:
    size = replica.micro_batch_size
    rounds, rest = divmod(replica.share, size)
    if replica.num_micro_batches > rounds + (rest > 0):
        return f"{replica.num_micro_batches} x <= {size}"
    parts = [f"{rounds} x {size}"] if rounds else []
    return " + ".join([*parts, str(rest)] if rest else parts) or "-"


def _note(plan: Plan, profile: ModelProfile, curve: ComputeCurve) -> str:
    replica = plan.replica_of(curve.device_id)
    if replica is None:
        return _why_left_out(plan, profile, curve)
    limit = plan.global_batch_size
    members = [c for c in profile.curves if plan.replica_of(c.device_id)]
    part = best_samples_per_s(curve, limit) / total_samples_per_s(members, limit)
    if replica.share == 0:
        return (
            f"no sample: one would take {format_seconds(predict_s(curve, 1))} of a step "
            f"of {format_seconds(plan.predicted_step_s)}; takes part in the exchange"
        )
    note = f"{part:.0%} of the speed, {replica.share / limit:.0%} of the samples"
    largest = largest_micro_batch_size(curve)
    if replica.micro_batch_size == largest < replica.share:
        note += f"; memory holds no more than {largest} at a time"
    slowest_s = max(r.predicted_compute_s for r in plan.replicas)
    if replica.predicted_compute_s == slowest_s and len(plan.replicas) > 1:
        note += "; the others wait for it"
    return note


def _why_left_out(plan: Plan, profile: ModelProfile, curve: ComputeCurve) -> str:
    if largest_micro_batch_size(curve) == 0:
        return "left out: not one sample fits in its memory"
    sample_s = predict_s(curve, 1)
    step_s = plan.predicted_step_s
    if sample_s > step_s - plan.predicted_exchange_s:
        return (
            f"left out: one sample takes it {format_seconds(sample_s)}, longer than the "
            f"others' {format_seconds(step_s - plan.predicted_exchange_s)} of compute"
        )
    cost_s = device_costs_s(profile)[curve.device_id]
    whole_s = plan.predicted_whole_exchange_s
    if cost_s > whole_s:
        return (
            f"left out: with it an exchange takes {format_seconds(cost_s)} instead of "
            f"{format_seconds(whole_s)}, more than its samples save"
        )
    return "left out: the others are as fast without it"


def render_text(explanation: Explanation) -> str:
    """Write an explanation for people: a table, totals, and where the loss is."""
    head = ("device", "share", "micro-batches", "compute", "exchange", "idle", "samples/s")
    cells = [head, *(_cells(row) for row in explanation.rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(head))]
    lines = []
    for row, note in zip(
        cells, ("why", *(row.note for row in explanation.rows)), strict=True
    ):
        padded = [
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join([*padded, note]))
    lines += ["", *_sentences(explanation)]
    if explanation.exchange is not None:
        lines += ["", *exchange_sentences(explanation.exchange)]
    return "\n".join(lines)


def _cells(row: ExplanationRow) -> tuple[str, ...]:
    return (
        row.device_id,
        str(row.share),
        row.micro_batches,
        format_seconds(row.compute_s),
        format_seconds(row.exchange_s),
        format_seconds(row.idle_s),
        f"{row.samples_per_s:.1f}",
    )


def _sentences(explanation: Explanation) -> list[str]:
    step_s, bound_s = explanation.predicted_step_s, explanation.bound_step_s
    batch = explanation.global_batch_size
    lines = [
        (
            f"A step of {batch} samples is predicted to take {format_seconds(step_s)} "
            f"({batch / step_s:.1f} samples/s)."
        ),
        (
            f"All devices at their best speeds would need {format_seconds(bound_s)} "
            f"({batch / bound_s:.1f} samples/s): efficiency {explanation.efficiency:.1%}."
        ),
    ]
    whole_s, exposed_s = explanation.whole_exchange_s, explanation.exposed_exchange_s
    if exposed_s < whole_s:
        lines.append(
            f"An exchange takes {format_seconds(whole_s)}; {format_seconds(exposed_s)} of "
            "it is waited for, and backward passes hide the rest."
        )
    if explanation.tail_samples:
        lines.append(
            f"{explanation.tail_samples} samples are left to whoever is free at the end."
        )
    parts = {
        name: loss_s / step_s
        for name, loss_s in explanation.loss.by_name().items()
        if loss_s / step_s >= 0.0005  # noqa: PLR2004 - what would print as 0.0 %
    }
    if not parts:
        return [*lines, "Nothing to speak of is lost."]
    ranked = sorted(parts, key=lambda name: -parts[name])
    split = ", ".join(f"{name} {parts[name]:.1%}" for name in ranked)
    return [*lines, f"Lost: {split}.", _advice(ranked[0], explanation)]


def _advice(largest: str, explanation: Explanation) -> str:
    limiting = explanation.limiting_device_id
    return {
        "left-out devices": "Most is lost by devices left out; the table says why.",
        "micro-batches": (
            "Most is lost in micro-batches below the best speed: a larger global batch "
            "or more memory lets devices take larger ones."
        ),
        "imbalance": (
            f"Most is lost waiting for {limiting}, which has the longest compute: whole "
            "samples do not divide evenly, so a larger global batch helps."
        ),
        "optimizer": "Most is lost in the optimizer, which every device runs in full.",
        "exchange": (
            "Most is lost in the exchange of gradients: a larger global batch makes it "
            "rarer per sample."
        ),
    }[largest]
