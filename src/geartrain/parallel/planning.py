"""From the first batch to a plan: measure, share what was measured, solve."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from geartrain.errors import CommunicationError
from geartrain.parallel.fleet_measurement import (
    ModelFacts,
    declared_profile,
    gather_profile,
)
from geartrain.parallel.low_communication import EXACT_ALGORITHM
from geartrain.parallel.model_timing import (
    PlanningRequest,
    measure_model,
    time_micro_batch,
)
from geartrain.parallel.plan_keeper import (
    KeeperSettings,
    PlanKeeper,
)
from geartrain.planner import ComputeCurve, ModelProfile, Plan, Workload
from geartrain.planner.exchange import choose
from geartrain.planner.model_profile import DEFAULT_BACKWARD_FRACTION, ExchangeNetwork
from geartrain.planner.pinned_plan import without_tail
from geartrain.planner.solver import solve
from geartrain.telemetry import write_document
from geartrain.units import format_seconds

if TYPE_CHECKING:
    from geartrain.parallel.process_group import RankGroups

DECLARED_MICRO_BATCH_SIZE = 8
"""Where nothing may be measured and the user fixed no size."""

_HIDING_MARGIN = 1.25
"""Compute and exchange share processors, so an exchange may take longer than predicted."""
_LONGEST_HIDING_S = 2.0
"""Measuring longer micro-batches would take longer than they save."""


def make_keeper(request: PlanningRequest) -> PlanKeeper:
    """Make the plan for a loader's global batches; all ranks call it together.

    Raises:
        ConfigError: If a pinned plan does not fit.
        DeviceError: If the model does not fit on a device.
        SystemExit: In the launcher's mode ``plan``, once the plan is written.
    """
    profile = request.profile or _make_profile(request)
    pinned = request.settings.pinned_plan
    if pinned is not None:
        pinned = without_tail(pinned)
    keeper = PlanKeeper(
        profile=profile,
        plan=pinned or _make_plan(request, profile),
        device_ids=request.place.groups.device_ids,
        settings=_keeper_settings(request),
        recorder=request.recorder,
        probe=lambda size: time_micro_batch(request, size),
    )
    if pinned is not None:
        keeper.check_pinned(pinned)
    check_agreement(request.place.groups, keeper.plan)
    _plan_exchange(request, keeper)
    _write(request, profile, keeper.plan)
    if _is_planning_only(request):
        raise SystemExit(0)
    return keeper


def adopt_keeper(
    request: PlanningRequest, workload: Workload, *, corrects: bool
) -> PlanKeeper:
    """Keep plans that other ranks have made already; nobody is asked.

    Args:
        request: With the profile that the others plan by.
        workload: What they have planned for.
        corrects: Whether their plans follow what devices turn out to do.
    """
    profile = request.profile
    assert profile is not None
    settings = replace(_keeper_settings(request), workload=workload, corrects=corrects)
    return PlanKeeper(
        profile=profile,
        plan=solve(_capped(profile, request.settings.micro_batch_size), workload),
        device_ids=request.place.groups.device_ids,
        settings=settings,
        recorder=request.recorder,
        probe=lambda size: time_micro_batch(request, size),
    )


def measure_alone(request: PlanningRequest) -> tuple[ComputeCurve, ...]:
    """Measure the model on this rank's device only; empty where that can't be done."""
    if not request.is_measurable:
        return ()
    return (measure_model(request, 0.0),)


def _plan_exchange(request: PlanningRequest, keeper: PlanKeeper) -> None:
    """Put into the plan how its replicas would exchange, also where none will start."""
    hub = request.place.groups.hub
    if hub is not None and len(keeper.member_ranks) > 1:
        keeper.note_exchange(hub.book_of(keeper.member_ranks))


def check_agreement(groups: RankGroups, plan: Plan) -> None:
    """Check that all ranks are about to carry out the same plan; all must call it.

    Raises:
        CommunicationError: On all ranks, if not; it names those that differ from the lead.
    """
    found = groups.rendezvous.gather("plan", plan.fingerprint, str)
    names = groups.rendezvous.member_ids
    different = [names[r] for r, f in enumerate(found) if f != found[0]]
    if different:
        msg = (
            f"{', '.join(different)} got another plan than {names[0]}; "
            "nothing was computed. Give all workers the same plan, script and version"
        )
        raise CommunicationError(msg)


def _is_planning_only(request: PlanningRequest) -> bool:
    return request.spec is not None and request.spec.mode == "plan"


def _is_measured(request: PlanningRequest) -> bool:
    has_loss = request.calls.loss_fn is not None
    return request.is_measurable or (_is_planning_only(request) and has_loss)


def _make_profile(request: PlanningRequest) -> ModelProfile:
    facts = ModelFacts(
        name=type(request.calls.model).__name__,
        num_parameters=request.engine.num_parameters,
        gradient_bytes=request.engine.gradient_bytes,
    )
    if not _is_measured(request):
        size = request.settings.micro_batch_size or _declared_size(request)
        return declared_profile(request.place, facts, size)
    started_at_s = time.perf_counter()
    network = _network(request)
    hiding_s = _hiding_s(request) if network is not None else 0.0
    profile = gather_profile(request.place, facts, lambda: measure_model(request, hiding_s))
    profile = replace(profile, network=network)
    algorithm = request.settings.algorithm
    if not isinstance(algorithm, str):
        profile = _amortise(profile, algorithm.sync_every)
    took = format_seconds(time.perf_counter() - started_at_s)
    points = ", ".join(
        f"{curve.device_id}: {len(curve.seconds)} sizes up to {curve.micro_batch_sizes[-1]}"
        for curve in profile.curves
    )
    request.recorder.add_event(0, "profiled", f"measured the model in {took} ({points})")
    return profile


def _amortise(profile: ModelProfile, sync_every: int) -> ModelProfile:
    """Spread an exchange over the steps that it is made for: models are averaged then."""
    exchange = replace(
        profile.exchange,
        all_devices_s=profile.exchange.all_devices_s / sync_every,
        with_device_s=tuple(s / sync_every for s in profile.exchange.with_device_s),
    )
    return replace(profile, exchange=exchange)


def _network(request: PlanningRequest) -> ExchangeNetwork | None:
    """The links that gradients take in each step; None where that is within a host."""
    hub = request.place.groups.hub
    is_exact = request.settings.algorithm == EXACT_ALGORITHM
    if hub is None or hub.network.is_one_host or not is_exact:
        return None
    network = hub.describe()
    return network if request.settings.overlap else replace(network, num_buckets=1)


def _hiding_s(request: PlanningRequest) -> float:
    """How long a micro-batch takes whose backward hides an exchange among all ranks."""
    hub = request.place.groups.hub
    if hub is None or not request.settings.overlap:
        return 0.0
    everyone = hub.request(request.place.groups.members)
    exchange = choose(replace(everyone, num_bytes=request.engine.gradient_bytes))
    hiding_s = _HIDING_MARGIN * exchange.predicted_s / DEFAULT_BACKWARD_FRACTION
    return min(hiding_s, _LONGEST_HIDING_S)


def _declared_size(request: PlanningRequest) -> int:
    if request.place.world_size == 1 and not request.settings.deterministic:
        return request.loader.config.global_batch_size
    return min(DECLARED_MICRO_BATCH_SIZE, request.loader.config.global_batch_size)


def _make_plan(request: PlanningRequest, profile: ModelProfile) -> Plan:
    plan = solve(_capped(profile, request.settings.micro_batch_size), _workload(request))
    # Declared speeds are right among each other only: no rate can be held against them.
    return plan if _is_measured(request) else replace(plan, bound_step_s=0.0)


def _workload(request: PlanningRequest) -> Workload:
    size = request.loader.config.global_batch_size
    deterministic = request.settings.deterministic
    fraction = request.spec.tail_fraction if request.spec is not None else 0.0
    has_tail = not deterministic and not request.settings.sync_batchnorm
    return Workload(
        global_batch_size=size,
        uniform_micro_batches=request.settings.sync_batchnorm,
        tail_samples=round(size * fraction) if has_tail else 0,
        required_device_ids=_devices_left(request) if deterministic else (),
    )


def _devices_left(request: PlanningRequest) -> tuple[str, ...]:
    return tuple(device.device_id for device in request.place.devices)


def _capped(profile: ModelProfile, micro_batch_size: int | None) -> ModelProfile:
    """Hold every device to micro-batches no larger than the user said."""
    if micro_batch_size is None:
        return profile
    curves = tuple(
        replace(
            curve, max_micro_batch_size=min(curve.max_micro_batch_size, micro_batch_size)
        )
        for curve in profile.curves
    )
    return replace(profile, curves=curves)


def _keeper_settings(request: PlanningRequest) -> KeeperSettings:
    threshold = request.spec.replan_threshold if request.spec is not None else 0.15
    is_fixed = request.settings.deterministic or request.settings.pinned_plan is not None
    return KeeperSettings(
        workload=_workload(request),
        replan_threshold=threshold,
        corrects=not is_fixed and request.place.world_size > 1,
        is_declared=not request.is_measurable and request.profile is None,
    )


def _write(request: PlanningRequest, profile: ModelProfile, plan: Plan) -> None:
    values = {
        "total_steps": float(request.settings.total_steps or 0),
        "predicted_step_s": plan.predicted_step_s,
    }
    if plan.bound_step_s and request.is_measurable:
        values["bound_samples_per_s"] = plan.global_batch_size / plan.bound_step_s
    count = len(plan.replicas)
    noun = "device" if count == 1 else "devices"
    text = f"{plan.global_batch_size} samples over {count} {noun}"
    request.recorder.add_event(0, "planned", text, values=values)
    if request.spec is not None and request.place.groups.is_lead:
        run_dir = Path(request.spec.run_dir)
        write_document(run_dir / "model.json", profile)
        write_document(run_dir / "plan.json", plan)
