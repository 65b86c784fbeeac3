"""When to save what, and to which tier: decided from the last saves alone.

One member decides and tells the others, since clocks differ; a cadence in steps comes
out alike everywhere. Times are of one monotonic clock: a wall clock may be set back.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from geartrain.errors import ConfigError

Tier = Literal["local", "durable"]
SaveKind = Literal["full", "weights"]

_TIERS: tuple[Tier, ...] = ("local", "durable")


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveInterval:
    """How long until the next save; whichever of the two comes first."""

    every_s: float | None = None
    every_steps: int | None = None
    """At the multiples of this number, so also after a resumption."""

    def __post_init__(self) -> None:
        for name, value in (("every_s", self.every_s), ("every_steps", self.every_steps)):
            if value is not None and not value > 0:
                msg = f"{name}={value} must be > 0; leave it out to save by the other one"
                raise ConfigError(msg)
        if self.every_s is None and self.every_steps is None:
            msg = (
                "a SaveInterval needs every_s or every_steps; where nothing is to be "
                "saved, leave the interval out"
            )
            raise ConfigError(msg)


@dataclass(frozen=True, slots=True, kw_only=True)
class TierCadence:
    """What one tier is given; None: never."""

    full: SaveInterval | None
    """Weights, optimizer and all else that an exact resumption needs."""
    weights: SaveInterval | None = None
    """Weights alone. A full save at the same step takes its place."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cadence:
    """What each tier is given; five and thirty minutes by default."""

    local: TierCadence = field(
        default_factory=lambda: TierCadence(full=SaveInterval(every_s=300.0))
    )
    durable: TierCadence = field(
        default_factory=lambda: TierCadence(full=SaveInterval(every_s=1800.0))
    )

    @classmethod
    def by_steps(cls, *, weights: int, optimizer: int) -> Cadence:
        """Count steps instead, weights and optimizer apart, alike in both tiers.

        >>> Cadence.by_steps(weights=1000, optimizer=5000).durable.weights
        SaveInterval(every_s=None, every_steps=1000)

        Raises:
            ConfigError: If a number is not positive.
        """
        tier = TierCadence(
            full=SaveInterval(every_steps=optimizer),
            weights=SaveInterval(every_steps=weights),
        )
        return cls(local=tier, durable=tier)

    def tier(self, name: Tier) -> TierCadence:
        """Return what a tier is given."""
        return self.local if name == "local" else self.durable


@dataclass(frozen=True, slots=True, kw_only=True)
class Save:
    """One save that is due, or that was made."""

    tier: Tier
    kind: SaveKind
    step: int
    clock_s: float
    """When it was asked for, not when it was done: a slow store delays nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """A step boundary."""

    step: int
    clock_s: float


def due_saves(
    cadence: Cadence, made: Iterable[Save], *, begun: Moment, now: Moment
) -> tuple[Save, ...]:
    """Say what to save at a step boundary.

    Args:
        cadence: What is wanted.
        made: Earlier saves of this run, at least the newest of each tier and kind.
        begun: Where the run began, or was resumed; counts as a save of all.
        now: Where it is.

    Returns:
        At most one save a tier.

    >>> begun, now = Moment(step=0, clock_s=0.0), Moment(step=70, clock_s=301.0)
    >>> [(save.tier, save.kind) for save in due_saves(Cadence(), (), begun=begun, now=now)]
    [('local', 'full')]
    """
    earlier = tuple(made)
    due = []
    for tier in _TIERS:
        kind = _due_kind(cadence.tier(tier), tier, earlier, begun, now)
        if kind is not None:
            due.append(Save(tier=tier, kind=kind, step=now.step, clock_s=now.clock_s))
    return tuple(due)


def _due_kind(
    wanted: TierCadence, tier: Tier, made: tuple[Save, ...], begun: Moment, now: Moment
) -> SaveKind | None:
    in_tier = [save for save in made if save.tier == tier]
    full = [save for save in in_tier if save.kind == "full"]
    if wanted.full is not None and _is_due(wanted.full, _last(full, begun), now):
        return "full"
    # A full save holds the weights too.
    if wanted.weights is not None and _is_due(wanted.weights, _last(in_tier, begun), now):
        return "weights"
    return None


def _last(saves: list[Save], begun: Moment) -> Moment:
    moments = [Moment(step=save.step, clock_s=save.clock_s) for save in saves]
    # Of equal times the later entry: max takes the first that it meets.
    return max([*reversed(moments), begun], key=lambda moment: moment.clock_s)


def _is_due(interval: SaveInterval, last: Moment, now: Moment) -> bool:
    if now.step == last.step:
        return False  # nothing is new
    if interval.every_s is not None and now.clock_s - last.clock_s >= interval.every_s:
        return True
    steps = interval.every_steps
    if steps is None:
        return False
    if now.step < last.step:  # restored: steps that were saved come again
        return now.step % steps == 0
    return now.step // steps > last.step // steps
