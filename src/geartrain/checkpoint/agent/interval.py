"""How often to take a snapshot into memory: pure, from seconds that were measured."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from geartrain.errors import ConfigError

_KEPT_COSTS = 5
_KEPT_STEPS = 64
_CALM_FRACTION = 0.75
"""A shorter interval is taken once it is this much shorter: no flutter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotCost:
    """What one snapshot took."""

    copy_s: float
    """The trainer stood still."""
    send_s: float
    """From sealed to stored at the last peer: cores and network are shared meanwhile."""

    def __post_init__(self) -> None:
        for name in ("copy_s", "send_s"):
            value = getattr(self, name)
            if not (value >= 0 and math.isfinite(value)):
                msg = f"{name}={value} must be finite and >= 0; measure it again"
                raise ConfigError(msg)


@dataclass(frozen=True, slots=True, kw_only=True)
class IntervalLimits:
    """What an interval may cost and how long it may be."""

    max_cost_fraction: float = 0.02
    """Of the training time, copy and send together."""
    max_steps: int = 1000
    """The log between two snapshots has to be replayed: no longer than this."""

    def __post_init__(self) -> None:
        if not 0 < self.max_cost_fraction < 1 or self.max_steps < 1:
            msg = (
                f"max_cost_fraction={self.max_cost_fraction}, max_steps={self.max_steps}: "
                "expected a fraction between 0 and 1 and at least 1 step"
            )
            raise ConfigError(msg)


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """How many steps from one snapshot to the next."""

    num_steps: int
    cost_fraction: float
    """Of the training time, as predicted."""
    is_within_limit: bool
    """Whether that is below the limit; if not, ``max_steps`` holds the interval short."""


def choose_interval(step_s: float, cost: SnapshotCost, limits: IntervalLimits) -> Interval:
    """The shortest interval whose cost is below the limit.

    Args:
        step_s: Measured time of a step without a snapshot.
        cost: Measured cost of a snapshot.
        limits: What is allowed.

    Raises:
        ConfigError: If the step time is not positive.

    Source: CheckFreq (FAST 2021): overhead per interval = cost / (k * step time).

    >>> choose_interval(0.1, SnapshotCost(copy_s=0.02, send_s=0.08), IntervalLimits())
    Interval(num_steps=51, cost_fraction=0.0196..., is_within_limit=True)
    """
    if not (step_s > 0 and math.isfinite(step_s)):
        msg = f"step_s={step_s} must be finite and > 0; measure a step first"
        raise ConfigError(msg)
    total_s = cost.copy_s + cost.send_s
    wanted = math.floor(total_s / (limits.max_cost_fraction * step_s)) + 1
    num_steps = min(limits.max_steps, wanted)
    return Interval(
        num_steps=num_steps,
        cost_fraction=total_s / (num_steps * step_s),
        is_within_limit=wanted <= limits.max_steps,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class IntervalTuner:
    """Follows what is measured; each ``with_`` returns the next state."""

    limits: IntervalLimits = IntervalLimits()
    step_times_s: tuple[float, ...] = ()
    costs: tuple[SnapshotCost, ...] = ()
    interval: Interval | None = None
    """None until a step and a snapshot were measured."""

    def with_step(self, step_s: float) -> IntervalTuner:
        """Take note of a step without a snapshot."""
        times = (*self.step_times_s, step_s)[-_KEPT_STEPS:]
        return replace(self, step_times_s=times)

    def with_cost(self, cost: SnapshotCost) -> IntervalTuner:
        """Take note of a snapshot, and decide anew."""
        costs = (*self.costs, cost)[-_KEPT_COSTS:]
        if not self.step_times_s:
            return replace(self, costs=costs)
        # The dearest of late, and the typical step: being wrong errs on the cheap side.
        dearest = max(costs, key=lambda one: one.copy_s + one.send_s)
        chosen = choose_interval(_median(self.step_times_s), dearest, self.limits)
        before = self.interval
        shrinks = before is not None and chosen.num_steps < before.num_steps
        if (
            before is not None
            and shrinks
            and chosen.num_steps > _CALM_FRACTION * before.num_steps
        ):
            fraction = chosen.cost_fraction * chosen.num_steps / before.num_steps
            chosen = replace(before, cost_fraction=fraction)
        return replace(self, costs=costs, interval=chosen)

    def is_due(self, steps_since_snapshot: int) -> bool:
        """Whether to take one now; the first is due at once, to be measured."""
        if self.interval is None:
            return not self.costs or steps_since_snapshot >= _KEPT_STEPS
        return steps_since_snapshot >= self.interval.num_steps


def _median(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 2]
