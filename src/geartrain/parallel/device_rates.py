"""How fast devices are, also those that are not there now and may come back."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from geartrain.planner import ComputeCurve, ModelProfile, Workload
from geartrain.planner.model_profile import (
    guess_curve,
    merge_profiles,
    only_devices,
    with_curves,
)

if TYPE_CHECKING:
    from geartrain.parallel.plan_keeper import PlanKeeper


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownRates:
    """What plans are made by when devices were lost; all lists in the same order."""

    sizes: tuple[int, ...]
    """Of the global batches that were planned for."""
    profiles: tuple[ModelProfile, ...]
    are_declared: tuple[bool, ...]
    current_size: int | None
    """Of the plan in force; None where none is."""
    workloads: tuple[Workload, ...] = ()
    are_corrected: tuple[bool, ...] = ()
    """Whether plans follow what devices turn out to do."""


@dataclass(slots=True)
class DeviceRates:
    """What one rank knows, by global batch size."""

    _known: dict[int, ModelProfile] = field(default_factory=dict)
    _learnt: dict[str, ComputeCurve] = field(default_factory=dict)
    """Of devices that came while the job ran."""

    def learn(self, curves: Sequence[ComputeCurve]) -> None:
        """Take in how fast devices are that came while the job ran."""
        self._learnt |= {curve.device_id: curve for curve in curves}

    def knows(self, device_id: str, keepers: Iterable[PlanKeeper]) -> bool:
        """Whether a device's speed is known.

        Args:
            device_id: Of the device.
            keepers: Of the plans in use.
        """
        profiles = (*self._known.values(), *(keeper.profile for keeper in keepers))
        return device_id in self._learnt or any(
            curve.device_id == device_id for profile in profiles for curve in profile.curves
        )

    def describe(
        self,
        keepers: Mapping[int, PlanKeeper],
        order: Sequence[str],
        current_size: int | None,
    ) -> KnownRates:
        """By what others are to plan.

        Args:
            keepers: Of the plans in use, by batch size.
            order: Of all devices, by id.
            current_size: Of the plan in force.
        """
        found = {size: keeper.known_rates() for size, keeper in keepers.items()}
        for size, (profile, _) in found.items():
            known = merge_profiles(self._known.get(size, profile), profile, order)
            self._known[size] = with_curves(known, tuple(self._learnt.values()), order)
        return KnownRates(
            sizes=tuple(found),
            profiles=tuple(self._known[size] for size in found),
            are_declared=tuple(is_declared for _, is_declared in found.values()),
            current_size=current_size,
            workloads=tuple(keeper.settings.workload for keeper in keepers.values()),
            are_corrected=tuple(keeper.settings.corrects for keeper in keepers.values()),
        )

    def of_members(
        self, size: int, known: ModelProfile, names: Sequence[str], order: Sequence[str]
    ) -> ModelProfile:
        """The profile of those that take part, and keep the rest of what is known.

        Args:
            size: Of the global batches.
            known: What the lead knows.
            names: Devices that take part.
            order: Of all devices, by id.
        """
        self._known[size] = known
        unknown = set(names) - {curve.device_id for curve in known.curves}
        guesses = [guess_curve(known, name) for name in sorted(unknown)]
        return only_devices(with_curves(known, guesses, order), names)
