"""The exact planner: least step time over shares, micro-batches and members.

A step lasts as long as the slowest member computes, plus the exchange among the
members. The exchange of a set costs what its most expensive member makes it cost, so
for each such cost the best set is among the devices that cost no more ("threshold
sets"): trying every threshold is exact, and there are at most as many as devices.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

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
from geartrain.planner.plan import Plan, Replica, Stage
from geartrain.planner.prediction import optimizer_times_s, predict
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
    num_uniform: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Problem:
    """A profile and a workload, with what follows from them looked up once."""

    curves: tuple[ComputeCurve, ...]
    """Devices that hold at least one sample, in rank order."""
    num_samples: int
    required: frozenset[str]
    update_s: dict[str, float]
    cost_s: dict[str, float]

    def floor_s(self, num_uniform: int = 0) -> float:
        """What required devices take also without samples: optimizer and ghosts."""
        return max(
            self.update_s[curve.device_id] + num_uniform * predict_s(curve, 1)
            for curve in self.curves
            if curve.device_id in self.required
        )


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
        tables = _tables(problem, _upper_bound_s(problem), problem.num_samples)
        choice = _best_threshold(problem, tables)
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
        cost_s=device_costs_s(profile),
    )


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
    for cost_s, members in _thresholds(problem):
        total = math.fsum(rate[curve.device_id] for curve in members)
        exact = [limit * rate[curve.device_id] / total for curve in members]
        shares = [math.floor(share) for share in exact]
        remainders = sorted(range(len(exact)), key=lambda i: shares[i] - exact[i])
        for i in remainders[: limit - sum(shares)]:
            shares[i] += 1
        times_s = [
            least_share_s(c, n, limit) + problem.update_s[c.device_id]
            for c, n in zip(members, shares, strict=True)
            if n
        ]
        best_s = min(best_s, max(*times_s, problem.floor_s()) + cost_s)
    return best_s


def _tables(problem: _Problem, within_s: float, num_samples: int) -> list[TimeTable]:
    """Time over share, as far as a plan within that time can need it."""
    tables = []
    for curve in problem.curves:
        most = within_s * best_samples_per_s(curve, problem.num_samples)
        max_share = min(num_samples, math.floor(most) + 1)
        times_s = compute_table_s(curve, max_share, problem.num_samples)
        update_s = problem.update_s[curve.device_id]
        tables.append(TimeTable(device_id=curve.device_id, times_s=times_s + update_s))
    return tables


def _thresholds(problem: _Problem) -> Iterator[tuple[float, tuple[ComputeCurve, ...]]]:
    """Each exchange cost, rising, and the devices that cost no more."""
    if len(problem.required) == 1:
        yield 0.0, problem.curves[:1]  # alone, rank 0's device exchanges nothing
    least_s = max(problem.cost_s[device_id] for device_id in problem.required)
    costs_s = {problem.cost_s[curve.device_id] for curve in problem.curves[1:]}
    for cost_s in sorted({cost_s for cost_s in costs_s if cost_s >= least_s}):
        yield (
            cost_s,
            tuple(c for c in problem.curves if problem.cost_s[c.device_id] <= cost_s),
        )


def _best_threshold(
    problem: _Problem, tables: Sequence[TimeTable], num_uniform: int = 0
) -> _Choice | None:
    by_id = {table.device_id: table for table in tables}
    times_s = occurring_times_s(tables)
    best: _Choice | None = None
    for cost_s, members in _thresholds(problem):
        ids = tuple(curve.device_id for curve in members)
        chosen = [by_id[device_id] for device_id in ids]
        time_s = least_time_s(chosen, problem.num_samples, times_s)
        if time_s is None:
            continue
        step_s = max(time_s, problem.floor_s(num_uniform)) + cost_s
        if best is None or step_s < best.step_s:
            best = _Choice(step_s=step_s, member_ids=ids, num_uniform=num_uniform)
    return best


def _choose_uniform(problem: _Problem) -> _Choice | None:
    """The fewest micro-batches for all that are about as fast as the best number."""
    least_s = min(predict_s(curve, 1) for curve in problem.curves)
    choices: list[_Choice] = []  # each better than the ones before, which have fewer
    count = 1
    while not choices or count * least_s < choices[-1].step_s:
        within_s = choices[-1].step_s if choices else math.inf
        tables = _uniform_tables(problem, count, within_s)
        choice = _best_threshold(problem, tables, num_uniform=count)
        if choice is not None and (not choices or choice.step_s < choices[-1].step_s):
            choices.append(choice)
        if count >= problem.num_samples:
            break
        step = 1 if count < DENSE_COUNTS else max(1, count // 64)
        count = min(problem.num_samples, count + step)
    most_s = (1 + UNIFORM_SLACK) * choices[-1].step_s if choices else 0.0
    return next((choice for choice in choices if choice.step_s <= most_s), None)


def _uniform_tables(problem: _Problem, count: int, within_s: float) -> list[TimeTable]:
    """Level b: ``count`` micro-batches of b samples each, as far as can be needed."""
    limit = problem.num_samples
    tables = []
    for curve in problem.curves:
        most = min(limit, within_s * best_samples_per_s(curve, limit)) / count
        largest = min(math.ceil(most) + 1, limit, largest_micro_batch_size(curve))
        sizes = np.arange(largest + 1)
        times_s = count * predict_many_s(curve, sizes)
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
        _replica(curves[device_id], shares[device_id], choice.num_uniform, workload)
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
        tables = _uniform_tables(problem, choice.num_uniform, choice.step_s)
    else:
        tables = _tables(problem, choice.step_s, num_samples)
    members = [table for table in tables if table.device_id in choice.member_ids]
    shares = allocate(members, num_samples)
    assert shares is not None, "the least time was found for these members"
    return shares


def _replica(
    curve: ComputeCurve, share: int, num_uniform: int, workload: Workload
) -> Replica:
    if num_uniform:
        size = max(1, -(-share // num_uniform))
        count = num_uniform
    elif share:
        size = choose_micro_batch_size(curve, share, workload.global_batch_size)
        count = -(-share // size)
    else:
        size, count = 1, 0
    return Replica(
        device_id=curve.device_id,
        share=share,
        micro_batch_size=size,
        num_micro_batches=count,
    )
