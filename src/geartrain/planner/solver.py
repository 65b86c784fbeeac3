"""The exact planner: least step time over shares, micro-batches and members.

A step lasts as long as the slowest member computes, plus what of the exchange among the
members its last backward does not hide (see ``overlap``). The exchange of a set costs
what its most expensive member makes it cost, so for each such cost the best set is among
the devices that cost no more ("threshold sets"): trying every threshold is exact, and
there are at most as many as devices.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np

from geartrain.errors import ConfigError, InfeasiblePlanError
from geartrain.planner.allocation import (
    TimeTable,
    allocate,
    least_time_s,
    occurring_times_s,
)
from geartrain.planner.compute_time import (
    choose_micro_batch_size,
    compute_table_s,
    least_share_s,
)
from geartrain.planner.curve_fit import (
    best_samples_per_s,
    largest_micro_batch_size,
    predict_many_s,
    predict_s,
)
from geartrain.planner.exchange_cost import device_costs_s
from geartrain.planner.model_profile import ComputeCurve, ModelProfile, Workload
from geartrain.planner.overlap import NO_EXCHANGE, Overlap
from geartrain.planner.plan import Plan, Replica, Stage
from geartrain.planner.prediction import optimizer_times_s, planned_overlap, predict
from geartrain.units import format_bytes

DENSE_COUNTS = 256
"""Uniform micro-batches: so many counts are all tried, later ones in steps of 1/64."""

UNIFORM_SLACK = 0.05
"""What fewer uniform micro-batches may cost: the fewer, the closer are the statistics
of synchronized BatchNorm to those of one device that takes the batch at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Choice:
    """The best threshold found so far."""

    step_s: float
    member_ids: tuple[str, ...]
    overlap: Overlap
    num_uniform: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Threshold:
    """Devices that make an exchange cost no more than so much."""

    overlap: Overlap
    members: tuple[ComputeCurve, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Problem:
    """A profile and a workload, with what follows from them looked up once."""

    curves: tuple[ComputeCurve, ...]
    """Devices that hold at least one sample, in rank order."""
    num_samples: int
    required: frozenset[str]
    update_s: dict[str, float]
    thresholds: tuple[_Threshold, ...]

    def floor_s(self, overlap: Overlap, num_uniform: int = 0) -> float:
        """What required devices take also without samples: optimizer, ghosts, exchange."""
        floors_s = []
        for curve in self.curves:
            if curve.device_id in self.required:
                ghost_s = predict_s(curve, 1) if num_uniform else 0.0
                exposed_s = overlap.exposed_s(curve.backward_fraction * ghost_s)
                update_s = self.update_s[curve.device_id]
                floors_s.append(update_s + num_uniform * ghost_s + exposed_s)
        return max(floors_s)


def solve(profile: ModelProfile, workload: Workload) -> Plan:
    """Find the plan with the least predicted step time.

    A device that earns no sample, or would cost more than it gives, is left out;
    rank 0's device and the required ones stay, with a share of 0 at worst. With a
    tail, members are chosen for the whole batch, and share what is not tail.

    Args:
        profile: Measured curves in rank order, exchange and optimizer times.
        workload: The global batch and what is asked of the plan.

    Returns:
        The plan, with its predictions.

    Raises:
        ConfigError: If a required device is not in the profile.
        InfeasiblePlanError: If a device that must take part cannot hold one sample.
    """
    problem = _pose(profile, workload)
    if workload.uniform_micro_batches:
        choice = _choose_uniform(problem)
    else:
        within_s = _upper_bound_s(problem)
        choice = _best_threshold(
            problem,
            lambda overlap: _tables(problem, within_s, problem.num_samples, overlap),
        )
    assert choice is not None, "every share fits in micro-batches of one sample"
    return predict(_assign(problem, profile, workload, choice), profile)


def _pose(profile: ModelProfile, workload: Workload) -> _Problem:
    ids = [curve.device_id for curve in profile.curves]
    required = frozenset((*ids[:1], *workload.required_device_ids))
    if unknown := sorted(required - set(ids)):
        msg = (
            f"required device {', '.join(unknown)} is not in the profile of "
            f"{', '.join(ids)}; name one of these, or profile again"
        )
        raise ConfigError(msg)
    if not ids:
        msg = "the profile holds no device; profile the model on at least one"
        raise ConfigError(msg)
    usable = tuple(c for c in profile.curves if largest_micro_batch_size(c) > 0)
    missing = [c for c in profile.curves if c not in usable and c.device_id in required]
    if missing:
        raise InfeasiblePlanError(_too_small(missing[0]))
    return _Problem(
        curves=usable,
        num_samples=workload.global_batch_size,
        required=required,
        update_s=optimizer_times_s(profile),
        thresholds=tuple(_thresholds(profile, workload, usable, required)),
    )


def _thresholds(
    profile: ModelProfile,
    workload: Workload,
    usable: tuple[ComputeCurve, ...],
    required: frozenset[str],
) -> Iterator[_Threshold]:
    """Each exchange cost, rising, and the devices that cost no more."""
    if len(required) == 1:  # alone, rank 0's device exchanges nothing
        yield _Threshold(overlap=NO_EXCHANGE, members=usable[:1])
    cost_of = device_costs_s(profile)
    least_s = max(cost_of[device_id] for device_id in required)
    costs_s = {cost_of[curve.device_id] for curve in usable[1:]}
    for cost_s in sorted({cost_s for cost_s in costs_s if cost_s >= least_s}):
        members = tuple(c for c in usable if cost_of[c.device_id] <= cost_s)
        overlap = Overlap(whole_s=cost_s, last_s=cost_s)
        if profile.network is not None:
            ids = [curve.device_id for curve in members]
            overlap = planned_overlap(profile, ids, workload.tail_samples)
        yield _Threshold(overlap=overlap, members=members)


def _too_small(curve: ComputeCurve) -> str:
    assert curve.memory is not None, "without a memory curve one sample fits"
    return (
        f"{curve.device_id} must take part, and one sample needs "
        f"{format_bytes(curve.memory.bytes_for(1))} there but its limit is "
        f"{format_bytes(curve.memory.limit_bytes)}; use a smaller model or sample, or "
        "a fleet without that device"
    )


def _upper_bound_s(problem: _Problem) -> float:
    """Step time of a good plan: shares in proportion to speed, best threshold."""
    limit = problem.num_samples
    rate = {c.device_id: best_samples_per_s(c, limit) for c in problem.curves}
    best_s = math.inf
    for threshold in problem.thresholds:
        members, overlap = threshold.members, threshold.overlap
        total = math.fsum(rate[curve.device_id] for curve in members)
        exact = [limit * rate[curve.device_id] / total for curve in members]
        shares = [math.floor(share) for share in exact]
        remainders = sorted(range(len(exact)), key=lambda i: shares[i] - exact[i])
        for i in remainders[: limit - sum(shares)]:
            shares[i] += 1
        times_s = [
            least_share_s(c, n, limit, overlap) + problem.update_s[c.device_id]
            for c, n in zip(members, shares, strict=True)
            if n
        ]
        best_s = min(best_s, max(*times_s, problem.floor_s(overlap)))
    return best_s


def _tables(
    problem: _Problem, within_s: float, num_samples: int, overlap: Overlap
) -> list[TimeTable]:
    """Time over share, as far as a plan within that time can need it."""
    tables = []
    for curve in problem.curves:
        most = within_s * best_samples_per_s(curve, problem.num_samples)
        max_share = min(num_samples, math.floor(most) + 1)
        times_s = compute_table_s(curve, max_share, problem.num_samples, overlap)
        update_s = problem.update_s[curve.device_id]
        tables.append(TimeTable(device_id=curve.device_id, times_s=times_s + update_s))
    return tables


def _best_threshold(
    problem: _Problem,
    make_tables: Callable[[Overlap], list[TimeTable]],
    num_uniform: int = 0,
) -> _Choice | None:
    # An exchange that can't hide adds the same to all tables, which are then made once.
    plain = make_tables(NO_EXCHANGE)
    plain_times_s = occurring_times_s(plain)
    best: _Choice | None = None
    for threshold in problem.thresholds:
        overlap = threshold.overlap
        ids = tuple(curve.device_id for curve in threshold.members)
        tables, times_s, added_s = plain, plain_times_s, overlap.whole_s
        if overlap.can_hide:
            tables, added_s = make_tables(overlap), 0.0
            times_s = occurring_times_s(tables)
        chosen = [table for table in tables if table.device_id in ids]
        time_s = least_time_s(chosen, problem.num_samples, times_s)
        if time_s is None:
            continue
        step_s = max(time_s + added_s, problem.floor_s(overlap, num_uniform))
        if best is None or step_s < best.step_s:
            best = _Choice(
                step_s=step_s, member_ids=ids, overlap=overlap, num_uniform=num_uniform
            )
    return best


def _choose_uniform(problem: _Problem) -> _Choice | None:
    """The fewest micro-batches for all that are about as fast as the best number."""
    least_s = min(predict_s(curve, 1) for curve in problem.curves)
    choices: list[_Choice] = []  # each better than the ones before, which have fewer
    count = 1
    while not choices or count * least_s < choices[-1].step_s:
        within_s = choices[-1].step_s if choices else math.inf
        choice = _best_threshold(
            problem,
            partial(_uniform_tables, problem, count, within_s),
            num_uniform=count,
        )
        if choice is not None and (not choices or choice.step_s < choices[-1].step_s):
            choices.append(choice)
        if count >= problem.num_samples:
            break
        step = 1 if count < DENSE_COUNTS else max(1, count // 64)
        count = min(problem.num_samples, count + step)
    most_s = (1 + UNIFORM_SLACK) * choices[-1].step_s if choices else 0.0
    return next((choice for choice in choices if choice.step_s <= most_s), None)


def _uniform_tables(
    problem: _Problem, count: int, within_s: float, overlap: Overlap
) -> list[TimeTable]:
    """Level b: ``count`` micro-batches of b samples each, as far as can be needed."""
    limit = problem.num_samples
    tables = []
    for curve in problem.curves:
        most = min(limit, within_s * best_samples_per_s(curve, limit)) / count
        largest = min(math.ceil(most) + 1, limit, largest_micro_batch_size(curve))
        sizes = np.arange(largest + 1)
        one_s = predict_many_s(curve, sizes)
        exposed_s = overlap.exposed_many_s(curve.backward_fraction * one_s)
        times_s = count * one_s + exposed_s
        tables.append(
            TimeTable(
                device_id=curve.device_id,
                times_s=times_s + problem.update_s[curve.device_id],
                samples_per_level=count,
            )
        )
    return tables


def _assign(
    problem: _Problem, profile: ModelProfile, workload: Workload, choice: _Choice
) -> Plan:
    """Shares of the chosen devices; those that earn none and may go are left out."""
    whole = _shares(problem, choice, workload.global_batch_size)
    member_ids = [
        device_id
        for device_id in choice.member_ids
        if whole[device_id] or device_id in problem.required
    ]
    members = dataclasses.replace(choice, member_ids=tuple(member_ids))
    shares = _shares(problem, members, workload.global_batch_size - workload.tail_samples)
    curves = {curve.device_id: curve for curve in profile.curves}
    replicas = tuple(
        _replica(curves[device_id], shares[device_id], choice, workload)
        for device_id in member_ids
    )
    return Plan(
        global_batch_size=workload.global_batch_size,
        stages=(Stage(stage_index=0, replicas=replicas),),
        left_out=tuple(device_id for device_id in curves if device_id not in member_ids),
        tail_samples=workload.tail_samples,
        uniform_micro_batches=workload.uniform_micro_batches,
    )


def _shares(problem: _Problem, choice: _Choice, num_samples: int) -> dict[str, int]:
    if choice.num_uniform:
        tables = _uniform_tables(problem, choice.num_uniform, choice.step_s, choice.overlap)
    else:
        tables = _tables(problem, choice.step_s, num_samples, choice.overlap)
    members = [table for table in tables if table.device_id in choice.member_ids]
    shares = allocate(members, num_samples)
    assert shares is not None, "the least time was found for these members"
    return shares


def _replica(
    curve: ComputeCurve, share: int, choice: _Choice, workload: Workload
) -> Replica:
    if choice.num_uniform:
        count = choice.num_uniform
        size = max(1, -(-share // count))
    elif share:
        limit = workload.global_batch_size
        size = choose_micro_batch_size(curve, share, limit, choice.overlap)
        count = -(-share // size)
    else:
        size, count = 1, 0
    return Replica(
        device_id=curve.device_id,
        share=share,
        micro_batch_size=size,
        num_micro_batches=count,
    )
