"""Which fault comes when, and to whom: a pure function of a seed."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

from geartrain.bench.chaos.kinds import KINDS, FaultKind
from geartrain.errors import ConfigError

_AT_ONCE = 2
"""Devices that may be lost right at the beginning."""
_AFTER_KILL_S = (0.0, 0.3)
"""A second kill meets the rebuild that the first one began."""
_MADE_BY_A_KILL = ("rebuild", "heal")
"""Moments that there are only where a device was lost before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One fault of a schedule."""

    at_s: float
    """From the moment at which chaos begins, the training well under way."""
    kind: str
    device_id: str
    """Whom it hits; for kinds that hit no device, who would be nearest."""
    duration_s: float = 0.0
    """0: it has no end."""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            msg = f"fault of the unknown kind {self.kind!r}; known are {', '.join(KINDS)}"
            raise ConfigError(msg)
        if not (math.isfinite(self.at_s) and self.at_s >= 0):
            msg = f"at_s={self.at_s} of a {self.kind} must be finite and >= 0"
            raise ConfigError(msg)

    @property
    def until_s(self) -> float:
        """When it ends by itself; at once where it has no duration."""
        return self.at_s + self.duration_s


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleSettings:
    """What a schedule is drawn from."""

    seed: int
    duration_s: float
    faults_per_s: float
    device_ids: tuple[str, ...]
    kinds: tuple[FaultKind, ...]
    min_left: int = 1
    """Devices that are never lost."""
    can_rejoin: bool = False
    """A lost device comes back, so that it may be lost again."""
    protected: tuple[str, ...] = ()
    """Devices that are never lost, since the engine could not go on."""

    def __post_init__(self) -> None:
        if not (self.duration_s > 0 and math.isfinite(self.duration_s)):
            msg = f"duration_s={self.duration_s} must be > 0 and finite; 60 is usual"
            raise ConfigError(msg)
        if not (self.faults_per_s > 0 and math.isfinite(self.faults_per_s)):
            msg = f"faults_per_s={self.faults_per_s} must be > 0 and finite; try 0.5"
            raise ConfigError(msg)
        if not 1 <= self.min_left <= len(self.device_ids):
            msg = (
                f"min_left={self.min_left} must lie in 1..{len(self.device_ids)}, the "
                "devices of the fleet"
            )
            raise ConfigError(msg)
        if not self.kinds:
            msg = "no kind of fault is left to choose from; name some with --kinds"
            raise ConfigError(msg)


def make_schedule(settings: ScheduleSettings) -> tuple[Fault, ...]:
    """Draw faults: the times as a Poisson process, kind and device evenly.

    The same settings always give the same schedule. Where lost devices do not come
    back, losses are spread over the whole time, no more are lost than may be, and
    nothing is done to one that is gone.

    Returns:
        Faults in order of time, all of which begin within the duration.
    """
    dice = random.Random(settings.seed)  # noqa: S311 - repeatable, not secret
    fleet = _Fleet(settings)
    faults: list[Fault] = []
    at_s = 0.0
    while True:
        at_s += dice.expovariate(settings.faults_per_s)
        if at_s >= settings.duration_s:
            return tuple(sorted(faults, key=lambda fault: fault.at_s))
        fleet.now_s = at_s
        kinds = [kind for kind in settings.kinds if fleet.allows(kind)]
        if kinds:
            kind = kinds[dice.randrange(len(kinds))]
            faults += _draw(dice, kind, at_s, fleet, settings)


def count_by_kind(faults: Sequence[Fault]) -> dict[str, int]:
    """How many faults of each kind, in the table's order."""
    return {
        name: number
        for name in KINDS
        if (number := sum(fault.kind == name for fault in faults))
    }


class _Fleet:
    """Who is there, as far as a schedule can know."""

    def __init__(self, settings: ScheduleSettings) -> None:
        self._settings = settings
        self._lost: set[str] = set()
        self._busy_until_s: dict[tuple[str, str], float] = {}
        self.now_s = 0.0

    def allows(self, kind: FaultKind) -> bool:
        """Whether a fault of this kind still finds its victims."""
        num_victims = 2 if kind.moment in _MADE_BY_A_KILL else 1
        if not kind.loses_device:
            return bool(self.victims(kind))
        left = len(self.present()) - num_victims
        if len(self.victims(kind)) < num_victims or left < self._settings.min_left:
            return False
        return len(self._lost) + num_victims <= self._most_lost()

    def _most_lost(self) -> float:
        """How many may be lost by now: losses that can't be repaired are spread out."""
        settings = self._settings
        if settings.can_rejoin:
            return math.inf
        spare = len(settings.device_ids) - settings.min_left
        return _AT_ONCE + spare * self.now_s / settings.duration_s

    def present(self) -> list[str]:
        """Devices that are not lost for good."""
        return [d for d in self._settings.device_ids if d not in self._lost]

    def victims(self, kind: FaultKind) -> list[str]:
        """Devices that a fault of this kind may hit; not one that it still lasts on."""
        if kind.loses_device:
            return [d for d in self.present() if d not in self._settings.protected]
        busy = self._busy_until_s
        return [d for d in self.present() if busy.get((d, kind.name), 0.0) <= self.now_s]

    def occupy(self, fault: Fault) -> None:
        """Remember how long a fault lasts on its device."""
        self._busy_until_s[fault.device_id, fault.kind] = fault.until_s

    def take(self, kind: FaultKind, dice: random.Random) -> str:
        """Choose a victim; it is gone where the kind loses it."""
        victims = self.victims(kind)
        device_id = victims[dice.randrange(len(victims))]
        if kind.loses_device and not self._settings.can_rejoin:
            self._lost.add(device_id)
        return device_id


def _draw(
    dice: random.Random,
    kind: FaultKind,
    at_s: float,
    fleet: _Fleet,
    settings: ScheduleSettings,
) -> list[Fault]:
    if kind.moment in _MADE_BY_A_KILL:
        first = Fault(at_s=at_s, kind="kill", device_id=fleet.take(kind, dice))
        after_s = dice.uniform(*_AFTER_KILL_S)  # a heal waits for its moment anyway
        second_at_s = min(at_s + after_s, settings.duration_s)
        second = fleet.take(kind, dice)
        return [first, Fault(at_s=second_at_s, kind=kind.name, device_id=second)]
    duration_s = 0.0
    if kind.most_s:
        # As many short ones as long ones, by their order of magnitude.
        low, high = math.log(kind.least_s), math.log(kind.most_s)
        duration_s = math.exp(dice.uniform(low, high))
        duration_s = min(duration_s, max(settings.duration_s - at_s, kind.least_s))
    device_id = fleet.take(kind, dice)
    fault = Fault(at_s=at_s, kind=kind.name, device_id=device_id, duration_s=duration_s)
    fleet.occupy(fault)
    return [fault]
