"""What a run log says in a few numbers. Pure."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from geartrain.planner import Plan
from geartrain.telemetry import RecoveryReport, RunEvent, StepRecord

NUM_WARM_UP_STEPS = 2
"""Left out of rates: the first steps allocate memory and start the transports."""
BOUND_KEY = "bound_samples_per_s"
BOUND_STEP_KEY = "bound_step_s"
"""A re-plan says how long a step takes at the bound; the batch stays the same."""
TOTAL_STEPS_KEY = "total_steps"


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSummary:
    """Where one device's time went, warm-up left out."""

    device_id: str
    num_samples: int
    last_share: int
    """Samples it took in the last step."""
    busy_fraction: float
    exchange_fraction: float
    idle_fraction: float
    data_fraction: float
    busy_s: float
    peak_memory_bytes: int
    lost_at_step: int | None = None
    """The first step that the others made without it; None while it is there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """A run in numbers."""

    num_steps: int
    num_samples: int
    wall_s: float
    """From the beginning of the first step to the end of the last."""
    samples_per_s: float
    """Over the steps themselves, warm-up and what lies between steps left out."""
    bound_samples_per_s: float | None
    """Sum of the devices' own speeds, averaged over the steps; None where unknown."""
    efficiency: float | None
    """samples_per_s / bound_samples_per_s."""
    load_balance_error: float
    """max |busy_i / mean busy - 1| over the devices that took samples."""
    first_loss: float | None
    last_loss: float | None
    num_replans: int
    num_slowdowns: int
    total_steps: int | None
    """Steps that the run will take, where it said so."""
    devices: tuple[DeviceSummary, ...]
    recoveries: tuple[RecoveryReport, ...] = ()
    """Of each loss that the others went on after."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One optimizer step of the whole fleet."""

    step: int
    at_s: float
    step_s: float
    loss: float
    records: tuple[StepRecord, ...]
    """One a device, in the log's order."""

    @property
    def num_samples(self) -> int:
        """Samples of all devices."""
        return sum(record.num_samples for record in self.records)

    @property
    def samples_per_s(self) -> float:
        """Throughput of this step."""
        return self.num_samples / self.step_s if self.step_s > 0 else 0.0


def group_steps(records: Iterable[StepRecord]) -> tuple[Step, ...]:
    """Bring the records of a step together.

    Returns:
        Steps in rising order; a step lasts as long as its slowest device.
    """
    by_step: dict[int, list[StepRecord]] = {}
    for record in records:
        by_step.setdefault(record.step, []).append(record)
    return tuple(
        Step(
            step=step,
            at_s=max(record.at_s for record in group),
            step_s=max(record.step_s for record in group),
            loss=group[0].loss,
            records=tuple(group),
        )
        for step, group in sorted(by_step.items())
    )


def bound_of(event: RunEvent, plan: Plan | None) -> float | None:
    """The bound that an event announces, in samples per second, if it does."""
    if event.values.get(BOUND_KEY, 0.0) > 0:
        return event.values[BOUND_KEY]
    bound_step_s = event.values.get(BOUND_STEP_KEY, 0.0)
    if bound_step_s > 0 and plan is not None:
        return plan.global_batch_size / bound_step_s
    return None


def bounds_per_step(
    steps: Sequence[Step], events: Sequence[RunEvent], plan: Plan | None
) -> tuple[float | None, ...]:
    """The bound in force at each step, in samples per second.

    Events carry it from the step of the plan or re-plan on; a plan's own prediction
    fills in before the first one.
    """
    found = [(event.step, bound_of(event, plan)) for event in events]
    known = sorted((step, bound) for step, bound in found if bound is not None)
    starts = [step for step, _ in known]
    planned = None
    if plan is not None and plan.bound_step_s > 0:
        planned = plan.global_batch_size / plan.bound_step_s
    bounds: list[float | None] = []
    for step in steps:
        index = bisect_right(starts, step.step) - 1
        bounds.append(known[index][1] if index >= 0 else planned)
    return tuple(bounds)


def known_total(events: Iterable[RunEvent]) -> int | None:
    """Steps that the run will take, as it said last; None where it can't know."""
    totals = [event.values.get(TOTAL_STEPS_KEY, 0.0) for event in events]
    return next((round(total) for total in reversed(totals) if total > 0), None)


def summarise(
    records: Iterable[StepRecord],
    events: Sequence[RunEvent],
    plan: Plan | None = None,
    *,
    num_warm_up_steps: int = NUM_WARM_UP_STEPS,
) -> RunSummary:
    """Sum a run up.

    Args:
        records: StepRecords, one a device a step, in any order.
        events: What happened meanwhile.
        plan: The run's plan; says the bound where no event does.
        num_warm_up_steps: Steps left out of rates and fractions, unless the run has
            no others.
    """
    steps = group_steps(records)
    measured = steps[num_warm_up_steps:] or steps
    measured_s = sum(step.step_s for step in measured)
    measured_samples = sum(step.num_samples for step in measured)
    rate = measured_samples / measured_s if measured_s > 0 else 0.0
    bound = _mean_bound(measured, bounds_per_step(measured, events, plan))
    devices = _mark_lost(_summarise_devices(measured), events)
    return RunSummary(
        num_steps=len(steps),
        num_samples=sum(step.num_samples for step in steps),
        wall_s=steps[-1].at_s - steps[0].at_s + steps[0].step_s if steps else 0.0,
        samples_per_s=rate,
        bound_samples_per_s=bound,
        efficiency=rate / bound if bound else None,
        load_balance_error=_load_balance_error(devices),
        first_loss=steps[0].loss if steps else None,
        last_loss=steps[-1].loss if steps else None,
        num_replans=sum(event.kind == "replanned" for event in events),
        num_slowdowns=sum(event.kind == "slowdown" for event in events),
        total_steps=known_total(events),
        devices=devices,
        recoveries=tuple(filter(None, map(RecoveryReport.of_event, events))),
    )


def _mark_lost(
    devices: Sequence[DeviceSummary], events: Iterable[RunEvent]
) -> tuple[DeviceSummary, ...]:
    lost = {event.device_id: event.step for event in events if event.kind == "lost"}
    return tuple(
        replace(device, lost_at_step=lost.get(device.device_id)) for device in devices
    )


def _mean_bound(steps: Sequence[Step], bounds: Sequence[float | None]) -> float | None:
    """Samples that the bounds allow in the steps' time, per second of that time."""
    pairs = [(s.step_s, b) for s, b in zip(steps, bounds, strict=True) if b is not None]
    total_s = sum(step_s for step_s, _ in pairs)
    if total_s <= 0:
        return None
    return sum(step_s * bound for step_s, bound in pairs) / total_s


def _summarise_devices(steps: Sequence[Step]) -> tuple[DeviceSummary, ...]:
    by_device: dict[str, list[StepRecord]] = {}
    for step in steps:
        for record in step.records:
            by_device.setdefault(record.device_id, []).append(record)
    return tuple(_summarise_device(steps, group) for group in by_device.values())


def _summarise_device(steps: Sequence[Step], group: list[StepRecord]) -> DeviceSummary:
    total_s = sum(record.step_s for record in group) or 1.0
    busy_s = sum(record.compute_s for record in group)
    is_current = group[-1].step == steps[-1].step
    return DeviceSummary(
        device_id=group[0].device_id,
        num_samples=sum(record.num_samples for record in group),
        last_share=group[-1].num_samples if is_current else 0,
        busy_fraction=busy_s / total_s,
        exchange_fraction=sum(record.comm_s for record in group) / total_s,
        idle_fraction=sum(record.idle_s for record in group) / total_s,
        data_fraction=sum(record.data_s for record in group) / total_s,
        busy_s=busy_s,
        peak_memory_bytes=max(record.peak_memory_bytes for record in group),
    )


def _load_balance_error(devices: Sequence[DeviceSummary]) -> float:
    busy = [device.busy_s for device in devices if device.num_samples]
    mean_s = sum(busy) / len(busy) if busy else 0.0
    if mean_s <= 0:
        return 0.0
    return max(abs(busy_s / mean_s - 1) for busy_s in busy)
