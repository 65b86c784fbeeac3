"""Are the links still what they were? Predictions against observations. Pure.

A single slow exchange means nothing: some host was busy. Three in a row that are more
than 15 % off mean that a link has changed, for the worse or for the better.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median

from geartrain.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTime:
    """One stage of one exchange, and the links that it depends on."""

    stage: str
    """Such as ``rack`` or ``slow_hop``."""
    tier_ids: tuple[str, ...]
    """Hosts or racks whose uplinks the stage fills: what to measure if it is off."""
    predicted_s: float
    observed_s: float

    def __post_init__(self) -> None:
        if self.predicted_s <= 0 or self.observed_s < 0:
            msg = (
                f"stage {self.stage}: predicted {self.predicted_s} s, observed "
                f"{self.observed_s} s; expected a prediction > 0 and a time >= 0"
            )
            raise ConfigError(msg)


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """One exchange. With no stages, the whole stands for all links in ``tier_ids``."""

    predicted_s: float
    observed_s: float
    stages: tuple[StageTime, ...] = ()
    tier_ids: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchSettings:
    """When a link counts as changed."""

    tolerance_fraction: float = 0.15
    in_a_row: int = 3
    settle_exchanges: int = 20
    """After a measurement that changed nothing, the same stage is left alone so long:
    the model is off there, not the link."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageState:
    """What is remembered of a stage."""

    ratios: tuple[float, ...] = ()
    """Observed / predicted, the last ones that were off in the same direction."""
    baseline: float = 1.0
    """Observed / predicted that is known not to be a link's change."""
    quiet_for: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkWatch:
    """All that the watch remembers, by stage."""

    settings: WatchSettings = field(default_factory=WatchSettings)
    stages: Mapping[str, StageState] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchDecision:
    """What to do after an exchange."""

    suspect_ids: tuple[str, ...] = ()
    """Tiers to measure again, the most suspect stage's first; empty: none."""
    slower_by: float = 1.0
    """Observed / predicted of that stage; below 1 where it has become faster."""
    reason: str = ""


def observe(state: LinkWatch, observation: Observation) -> tuple[LinkWatch, WatchDecision]:
    """Take in one exchange.

    Args:
        state: What is remembered.
        observation: The exchange's times, whole and by stage.

    Returns:
        The new state, and which links to measure again. Where stages are known, only
        those of the stages that are off; the whole exchange may look right while one
        stage hides behind another.
    """
    times = observation.stages or (
        StageTime(
            stage="exchange",
            tier_ids=observation.tier_ids,
            predicted_s=observation.predicted_s,
            observed_s=observation.observed_s,
        ),
    )
    stages = dict(state.stages)
    off: list[tuple[float, StageTime]] = []
    for time in times:
        old = stages.get(time.stage, StageState())
        new = _follow(old, time.observed_s / time.predicted_s, state.settings)
        if len(new.ratios) >= state.settings.in_a_row:
            off.append((median(new.ratios), time))
            new = StageState(
                baseline=median(new.ratios) * old.baseline,
                quiet_for=state.settings.settle_exchanges,
            )
        stages[time.stage] = new
    watch = LinkWatch(settings=state.settings, stages=stages)
    if not off:
        return watch, WatchDecision()
    off.sort(key=lambda item: -max(item[0], 1 / max(item[0], 1e-9)))
    worst, time = off[0]
    suspects = tuple(dict.fromkeys(i for _, t in off for i in t.tier_ids))
    way = "slower" if worst > 1 else "faster"
    return watch, WatchDecision(
        suspect_ids=suspects,
        slower_by=worst,
        reason=(
            f"{time.stage} took {worst:.2f} times what is usual, {way} by more than "
            f"{state.settings.tolerance_fraction:.0%} in {state.settings.in_a_row} "
            "exchanges running"
        ),
    )


def remeasured(state: LinkWatch, *, changed: bool) -> LinkWatch:
    """Tell the watch what came of a measurement.

    Args:
        state: What is remembered.
        changed: Whether the links read differently, so that predictions are new: then
            all stages start afresh. Otherwise what was observed becomes the usual, until
            it changes again.
    """
    return LinkWatch(settings=state.settings) if changed else state


def _follow(old: StageState, raw_ratio: float, settings: WatchSettings) -> StageState:
    if old.quiet_for > 0:
        return StageState(baseline=old.baseline, quiet_for=old.quiet_for - 1)
    ratio = raw_ratio / old.baseline
    slower, faster = 1 + settings.tolerance_fraction, 1 - settings.tolerance_fraction
    if faster <= ratio <= slower:
        return StageState(baseline=old.baseline)
    same_way = [r for r in old.ratios if (r > 1) == (ratio > 1)]
    kept = same_way if len(same_way) == len(old.ratios) else []
    return StageState(ratios=(*kept, ratio), baseline=old.baseline)
