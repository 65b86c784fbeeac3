"""Correct a plan while it runs: a pure state machine over measured compute times.

Each rank runs it on the same observations and decides the same: frozen dataclasses
in and out, no clock, no randomness, no arithmetic that differs between machines.

Two things lead to a new plan. A *change* of a device's rate beyond a threshold is seen
within 5 steps of a 2x slow-down and answered at once, and again as the new rate becomes
known better. Otherwise every ``check_interval`` steps the long-window rates are tried:
where another plan would gain more than it costs, or balance the load better, and by
more than the noise of the rates, it is taken.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from geartrain.errors import ConfigError
from geartrain.planner.curve_fit import predict_s
from geartrain.planner.model_profile import ModelProfile, Workload
from geartrain.planner.plan import Plan
from geartrain.planner.prediction import optimizer_times_s, predict, scale_profile
from geartrain.planner.protocol import Planner
from geartrain.planner.rate_tracking import (
    MIN_REFERENCE,
    DeviceRate,
    add_ratio,
    find_change,
    refresh,
)
from geartrain.planner.solver import solve
from geartrain.telemetry.records import EventKind
from geartrain.units import format_seconds

REFINE_AFTER = (1, 3, 7)
"""Check intervals after an answered change at which the new rates, each time known
from about twice as many steps, are looked at with little regard for noise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CorrectionSettings:
    """When to re-plan."""

    threshold: float = 0.15
    """Change of a device's rate that counts as a slow-down or a speed-up."""
    warmup_steps: int = 3
    """First steps after a start, which allocate and warm caches, are not counted."""
    check_interval: int = 8
    """Steps between looks at the long-window rates; also the pause after a re-plan."""
    answer_gap: int = 2
    """Least steps between a re-plan and the answer to a change."""
    min_gain_fraction: float = 0.02
    """Predicted saving of step time that is worth the cost of a re-plan."""
    max_load_balance_error: float = 0.03
    """Predicted max |busy / mean - 1| above which balance alone is a reason."""
    change_sigmas: float = 6.0
    """Standard errors a change must exceed: one false alarm in millions of steps."""
    gain_sigmas: float = 5.0
    """Standard errors of the rates that a gain must exceed."""
    refine_sigmas: float = 1.0
    """The same in the looks after a change, where a better plan is likely."""

    def __post_init__(self) -> None:
        if self.threshold <= 0:
            msg = f"threshold={self.threshold} must be > 0, such as 0.15"
            raise ConfigError(msg)
        if self.check_interval < 1:
            msg = f"check_interval={self.check_interval} must be >= 1 steps"
            raise ConfigError(msg)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceObservation:
    """What a device did in one step, or a left-out one in a probe."""

    device_id: str
    compute_s: float
    """Measured; with the optimizer in a step, without it in a probe."""
    expected_s: float
    """``expected_compute_s`` of the same work; 0 where it did none (then ignored)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CorrectionEvent:
    """A fact for the run log: a ``RunEvent`` without step and time."""

    kind: EventKind
    """slowdown, replanned, or note for a speed-up."""
    message: str
    device_id: str = ""
    values: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What follows from one step's observations."""

    new_plan: Plan | None = None
    """To be carried out from the next step on."""
    events: tuple[CorrectionEvent, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class CorrectionState:
    """All that the correction knows; equal on all ranks after each step."""

    profile: ModelProfile
    """As measured before the run; factors of the rates correct it."""
    workload: Workload
    plan: Plan
    settings: CorrectionSettings
    rates: tuple[DeviceRate, ...]
    num_steps: int = 0
    replanned_at: int = -(10**9)
    """Step counts of this machine, not of the run, which may have been resumed."""
    changed_at: int = -(10**9)
    """When a change, or a profile that was wrong, was last answered."""
    change_unanswered: bool = False

    @property
    def factors(self) -> dict[str, float]:
        """How many times longer each device takes than its profile says."""
        return {rate.device_id: rate.factor for rate in self.rates}


def start_correction(
    profile: ModelProfile,
    workload: Workload,
    plan: Plan,
    settings: CorrectionSettings | None = None,
) -> CorrectionState:
    """The state before the first step."""
    return CorrectionState(
        profile=profile,
        workload=workload,
        plan=plan,
        settings=settings or CorrectionSettings(),
        rates=tuple(DeviceRate(device_id=curve.device_id) for curve in profile.curves),
    )


def expected_compute_s(
    profile: ModelProfile,
    device_id: str,
    micro_batch_sizes: Sequence[int],
    *,
    with_optimizer: bool = True,
) -> float:
    """What the profile says a device takes for the micro-batches it ran.

    Args:
        profile: The profile that the correction was started with.
        device_id: The device.
        micro_batch_sizes: Every micro-batch of the step, its part of the tail included.
        with_optimizer: Whether the measured time holds the optimizer step.

    Returns:
        Seconds; 0 without micro-batches, for then nothing is learnt about its rate.
    """
    curve = next(c for c in profile.curves if c.device_id == device_id)
    counts = Counter(micro_batch_sizes)
    compute_s = math.fsum(counts[size] * predict_s(curve, size) for size in sorted(counts))
    if compute_s > 0 and with_optimizer:
        compute_s += optimizer_times_s(profile)[device_id]
    return compute_s


def observe(
    state: CorrectionState,
    observations: Sequence[DeviceObservation],
    planner: Planner = solve,
) -> tuple[CorrectionState, Decision]:
    """Take in one step and decide.

    Args:
        state: What is known so far.
        observations: At most one a device; devices that did nothing may be absent.
        planner: Finds the new plan.

    Returns:
        The new state, whose plan is the new one where there is one, and the decision.
    """
    state = replace(state, num_steps=state.num_steps + 1)
    counted = state.num_steps - state.settings.warmup_steps
    if counted <= 0 or len(state.rates) == 1:
        return state, Decision()
    state = _add_observations(state, observations)
    state, events = _see_changes(state)
    if events:
        state = replace(state, change_unanswered=True)
    decision = Decision(events=events)
    since = state.num_steps - state.replanned_at
    if state.change_unanswered and since >= state.settings.answer_gap:
        state = replace(
            state,
            change_unanswered=False,
            changed_at=state.num_steps,
        )
        return _replan(state, decision, planner, num_sigmas=0.0)
    interval = state.settings.check_interval
    refining = state.num_steps - state.changed_at in {k * interval for k in REFINE_AFTER}
    if not refining and (counted % interval or since < interval):
        return state, decision
    state = replace(state, rates=tuple(refresh(rate) for rate in state.rates))
    if refining:
        sigmas = state.settings.refine_sigmas
        return _replan(state, decision, planner, num_sigmas=sigmas)
    sigmas = state.settings.gain_sigmas
    state, decision = _replan(state, decision, planner, num_sigmas=sigmas)
    if decision.new_plan is not None:  # the rates were wrong, so look again soon
        state = replace(state, changed_at=state.num_steps)
    return state, decision


def _add_observations(
    state: CorrectionState, observations: Sequence[DeviceObservation]
) -> CorrectionState:
    ratios = {
        seen.device_id: seen.compute_s / seen.expected_s
        for seen in observations
        if seen.expected_s > 0 and seen.compute_s > 0
    }
    rates = []
    for rate in state.rates:
        if rate.device_id in ratios:
            rate = add_ratio(rate, ratios[rate.device_id])  # noqa: PLW2901 - its next value
            if rate.num_behind_factor == 0 and len(rate.ratios) >= MIN_REFERENCE:
                rate = refresh(rate)  # noqa: PLW2901 - its next value
        rates.append(rate)
    return replace(state, rates=tuple(rates))


def _see_changes(
    state: CorrectionState,
) -> tuple[CorrectionState, tuple[CorrectionEvent, ...]]:
    settings = state.settings
    rates, events = [], []
    for rate in state.rates:
        changed = find_change(rate, settings.threshold, settings.change_sigmas)
        if changed is not None:
            events.append(_describe_change(rate, changed))
        rates.append(changed or rate)
    return replace(state, rates=tuple(rates)), tuple(events)


def _describe_change(before: DeviceRate, after: DeviceRate) -> CorrectionEvent:
    change = after.factor / before.factor
    slower = change > 1
    times = change if slower else 1 / change
    return CorrectionEvent(
        kind="slowdown" if slower else "note",
        device_id=before.device_id,
        message=(
            f"{before.device_id} computes {times:.2f}x "
            f"{'slower' if slower else 'faster'} than before"
        ),
        values={"change": change, "factor": after.factor},
    )


def _replan(
    state: CorrectionState, decision: Decision, planner: Planner, *, num_sigmas: float
) -> tuple[CorrectionState, Decision]:
    """Take a better plan where there is one."""
    profile = scale_profile(state.profile, state.factors)
    current = predict(state.plan, profile)
    best = planner(profile, state.workload)
    if not _is_worth_it(state, current, best, num_sigmas):
        return state, decision
    event = _describe_replan(current, best)
    state = replace(state, plan=best, replanned_at=state.num_steps)
    return state, Decision(new_plan=best, events=(*decision.events, event))


def _is_worth_it(
    state: CorrectionState, current: Plan, best: Plan, num_sigmas: float
) -> bool:
    if best.fingerprint == current.fingerprint:
        return False
    noise = num_sigmas * _uncertainty(state, current, best)
    settings = state.settings
    gain = 1 - best.predicted_step_s / current.predicted_step_s
    if gain > max(settings.min_gain_fraction, noise):
        return True
    error = load_balance_error(current)
    better_balanced = error - load_balance_error(best) > max(error / 3, noise)
    return gain >= 0 and error > settings.max_load_balance_error and better_balanced


def _uncertainty(state: CorrectionState, *plans: Plan) -> float:
    """Largest relative error of the rates that either plan rests on."""
    computing = {r.device_id for plan in plans for r in plan.replicas if r.share}
    return max(
        min(rate.uncertainty, rate.noise_fraction)  # the profile counts as one look
        for rate in state.rates
        if rate.device_id in computing
    )


def load_balance_error(plan: Plan) -> float:
    """Predicted max |busy / mean busy - 1| over the devices that have samples."""
    times_s = [r.predicted_compute_s for r in plan.replicas if r.share]
    if not times_s:
        return 0.0
    mean_s = math.fsum(times_s) / len(times_s)
    return max(abs(time_s / mean_s - 1) for time_s in times_s)


def _describe_replan(current: Plan, best: Plan) -> CorrectionEvent:
    before = {r.device_id: r.share for r in current.replicas}
    after = {r.device_id: r.share for r in best.replicas}
    moved = [
        f"{device_id} {before.get(device_id, 0)} -> {after.get(device_id, 0)}"
        for device_id in sorted({*before, *after})
        if before.get(device_id, 0) != after.get(device_id, 0)
    ]
    shares = f"shares {', '.join(moved)}" if moved else "other micro-batches"
    return CorrectionEvent(
        kind="replanned",
        message=(
            f"{shares}; a step should take {format_seconds(best.predicted_step_s)} "
            f"instead of {format_seconds(current.predicted_step_s)}"
        ),
        values={
            "predicted_step_s": best.predicted_step_s,
            "previous_step_s": current.predicted_step_s,
            "bound_step_s": best.bound_step_s,
            "gain_fraction": 1 - best.predicted_step_s / current.predicted_step_s,
        },
    )
