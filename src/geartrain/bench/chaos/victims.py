"""Whom a fault hits when its time has come. Pure.

A schedule can't know who is away just then. So a fault whose device is gone hits the next
one that is there, and none takes the last holders of the state away.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from geartrain.bench.chaos.kinds import FaultKind
from geartrain.errors import GeartrainError


class NotPossibleError(GeartrainError):
    """The fault finds nothing to act on just now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceView:
    """What is known of a device at one moment."""

    device_id: str
    is_running: bool = True
    """Its newest process is there."""
    holds: bool = True
    """That process takes part: it has the run's newest step, or the one before."""
    is_silenced: bool = False
    """It is frozen, stopped or cut off, so that the others may give it up."""
    lasting: frozenset[str] = frozenset()
    """Kinds of faults that have not ended on it."""


def choose_victim(
    kind: FaultKind,
    wanted: str,
    devices: Sequence[DeviceView],
    *,
    min_left: int,
    protected: Sequence[str] = (),
) -> str:
    """The device that is hit: the one wanted, else the next that can be.

    Args:
        kind: Of the fault.
        wanted: The device that the schedule names.
        devices: All of the fleet.
        min_left: So many must still take part and be heard of afterwards.
        protected: Devices that are never taken away.

    Raises:
        NotPossibleError: If nobody can be hit.
    """
    if not kind.hits_device:
        return wanted
    names = [device.device_id for device in devices]
    start = names.index(wanted)
    in_order = [*devices[start:], *devices[:start]]
    able = [device for device in in_order if _can_be_hit(kind, device, wanted)]
    if kind.loses_device:
        able = [device for device in able if device.device_id not in protected]
    if not able:
        msg = f"neither {wanted} nor another device takes part just now"
        raise NotPossibleError(msg)
    if not kind.silences:
        return able[0].device_id
    heard = [d.device_id for d in devices if d.holds and d.is_running and not d.is_silenced]
    for device in able:
        num_left = len([name for name in heard if name != device.device_id])
        if num_left >= min_left:
            return device.device_id
    msg = f"it would leave {len(heard) - 1} devices, at least {min_left} are to stay"
    raise NotPossibleError(msg)


def _can_be_hit(kind: FaultKind, device: DeviceView, wanted: str) -> bool:
    if not device.is_running or kind.name in device.lasting:
        return False
    if kind.silences and device.is_silenced:
        return False
    is_joiner_wanted = kind.moment == "heal" and device.device_id == wanted
    return device.holds or is_joiner_wanted
