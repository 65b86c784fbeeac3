"""From what was measured to the numbers of the claims. Pure, torch-free."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from geartrain.bench.macro_settings import (
    AlonePhase,
    FleetMeasurement,
    OneDeviceMeasurement,
    ReferenceLosses,
    Slowdown,
    Variant,
)
from geartrain.telemetry import RunEvent, StepRecord

Flat = dict[str, str | float | int | bool | None]
"""One level of names and values, as ``--json`` prints it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """A quantity over the rounds."""

    median: float
    spread_fraction: float
    """(largest - smallest round) / median."""


def summarise(values: Sequence[float]) -> Summary:
    """Median and spread.

    >>> summarise([1.0, 3.0, 2.0])
    Summary(median=2.0, spread_fraction=1.0)
    """
    median = statistics.median(values)
    return Summary(median=median, spread_fraction=(max(values) - min(values)) / median)


def throughput(measurement: FleetMeasurement, variant: Variant) -> Summary:
    """Samples per second of a variant over the rounds."""
    return summarise([p.samples_per_s for p in measurement.phases if p.variant == variant])


def alone_samples_per_s(
    measurement: FleetMeasurement, global_batch_size: int
) -> dict[str, float]:
    """Each device's own speed: its best micro-batch size's median over the rounds."""
    return {
        device_id: max(
            statistics.median(p.samples_per_s(global_batch_size) for p in phases)
            for phases in _by_size(measurement, device_id)
        )
        for device_id in measurement.device_ids
    }


def alone_spread_fraction(measurement: FleetMeasurement, global_batch_size: int) -> float:
    """Spread of the sum of speeds over the rounds."""
    rounds = sorted({phase.round_index for phase in measurement.alone})
    sums = []
    for index in rounds:
        best: dict[str, float] = {}
        for phase in measurement.alone:
            if phase.round_index == index:
                speed = phase.samples_per_s(global_batch_size)
                best[phase.device_id] = max(speed, best.get(phase.device_id, 0.0))
        sums.append(math.fsum(best.values()))
    return summarise(sums).spread_fraction


def _by_size(measurement: FleetMeasurement, device_id: str) -> Iterable[list[AlonePhase]]:
    own = [phase for phase in measurement.alone if phase.device_id == device_id]
    for size in sorted({phase.micro_batch_size for phase in own}):
        yield [phase for phase in own if phase.micro_batch_size == size]


def median_ratio(
    measurement: FleetMeasurement, variant: Variant, baseline: Variant
) -> Summary:
    """Throughput against a baseline, round by round, so that slow drifts cancel."""
    speeds = {(p.variant, p.round_index): p.samples_per_s for p in measurement.phases}
    rounds = sorted({p.round_index for p in measurement.phases})
    return summarise([speeds[variant, i] / speeds[baseline, i] for i in rounds])


def load_balance_error(steps: Sequence[StepRecord], first: int, stop: int) -> float:
    """Largest |busy_i / mean busy - 1|; busy_i sums compute_s of steps first..stop-1.

    Raises:
        ValueError: If no such step was recorded.
    """
    busy_s: dict[str, float] = {}
    for record in steps:
        if first <= record.step < stop:
            busy_s[record.device_id] = busy_s.get(record.device_id, 0) + record.compute_s
    mean_s = statistics.fmean(busy_s.values())
    return max(abs(value / mean_s - 1) for value in busy_s.values())


def loss_difference(losses: Sequence[float], reference: ReferenceLosses) -> float:
    """Largest relative difference from one device's losses, over the steps of both.

    >>> loss_difference([2.0, 1.0], ReferenceLosses(losses=(2.0, 0.8)))
    0.25
    """
    pairs = zip(losses, reference.losses, strict=True)
    return max(abs(own / other - 1) for own, other in pairs)


def overhead_fraction(measurement: OneDeviceMeasurement) -> float:
    """How much longer a session's step takes than a plain one: median over pairs."""
    pairs = zip(measurement.session_s, measurement.plain_s, strict=True)
    return statistics.median(own / plain for own, plain in pairs) - 1


def overhead_error(measurement: OneDeviceMeasurement) -> float:
    """Standard error of that median, from the pairs' quartiles (normal noise)."""
    pairs = zip(measurement.session_s, measurement.plain_s, strict=True)
    ratios = [own / plain for own, plain in pairs]
    low, _, high = statistics.quantiles(ratios, n=4)
    return 1.2533 * (high - low) / 1.349 / math.sqrt(len(ratios))


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowdownResult:
    """How a slow-down went; None where something never happened."""

    detect_steps: int | None
    """Slow steps until it was seen."""
    replan_steps: int | None
    """Further steps until another plan was made."""
    recovered_fraction: float | None
    """Throughput under the new plans / the new bound."""
    bound_samples_per_s: float


def judge_slowdown(
    slowdown: Slowdown,
    events: Sequence[RunEvent],
    alone: dict[str, float],
    global_batch_size: int,
) -> SlowdownResult:
    """Compare what happened with the change that was made.

    The new bound is the sum of the measured speeds with the slowed device's scaled by
    its core fractions.
    """
    factor = slowdown.fraction_after / slowdown.fraction_before
    bound = math.fsum(
        speed * (factor if device_id == slowdown.device_id else 1.0)
        for device_id, speed in alone.items()
    )
    changed = slowdown.changed_at_step
    seen = _first(events, "slowdown", changed + 1, slowdown.device_id)
    replanned = None if seen is None else _first(events, "replanned", seen)
    recovered = None
    if slowdown.replanned_at_step is not None:
        step_s = slowdown.step_s[slowdown.replanned_at_step - changed :]
        if step_s:
            recovered = len(step_s) * global_batch_size / math.fsum(step_s) / bound
    return SlowdownResult(
        detect_steps=None if seen is None else seen - changed,
        replan_steps=None if seen is None or replanned is None else replanned - seen,
        recovered_fraction=recovered,
        bound_samples_per_s=bound,
    )


def _first(
    events: Sequence[RunEvent], kind: str, from_step: int, device_id: str | None = None
) -> int | None:
    for event in events:
        is_device = device_id is None or event.device_id == device_id
        if event.kind == kind and event.step >= from_step and is_device:
            return event.step
    return None
