"""What may be asked of a running run, what it answers, and whether it may be done. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import msgspec

from geartrain.devices.fleet_spec import check_cores
from geartrain.devices.profile import DeviceProfile
from geartrain.errors import ConfigError

DeviceState = Literal["starting", "training", "draining", "waiting", "out"]
"""waiting: lost, and started again after a while. out: drained or given up."""

ErrorKind = Literal["ConfigError", "DeviceError", "CommunicationError"]

MAX_CHANGE = 10_000
"""More devices than any run was planned for."""

_PRESENT = ("starting", "training")


class ScaleRequest(msgspec.Struct, frozen=True, kw_only=True, tag="scale"):
    """Have the run train on other devices: on these, or on so many more or fewer."""

    devices: tuple[DeviceProfile, ...] = ()
    """All devices that are wanted, those that train already included."""
    change: int = 0
    """Where no devices are named: how many more, or minus how many fewer."""


class DrainRequest(msgspec.Struct, frozen=True, kw_only=True, tag="drain"):
    """Have a device, or all devices of a node, leave without a failed step."""

    target: str


class ListRequest(msgspec.Struct, frozen=True, kw_only=True, tag="list"):
    """Say which devices the run has, and what they do."""


Request = ScaleRequest | DrainRequest | ListRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceStatus:
    """One device of a run, now."""

    profile: DeviceProfile
    state: DeviceState
    rank: int | None = None
    process_id: int | None = None
    num_failures: int = 0
    reason: str = ""
    """Why it waits or is out."""

    @property
    def device_id(self) -> str:
        """Unique in the run."""
        return self.profile.device_id


@dataclass(frozen=True, slots=True, kw_only=True)
class RunView:
    """What the launcher says of its run; requests are checked against it."""

    run_id: str
    devices: tuple[DeviceStatus, ...]
    """In rank order, also those that are out."""
    min_devices: int = 1
    cores: float
    """That emulated devices may share."""
    oversubscribed: bool = False
    ending: str = ""
    """Why nothing can be changed any more; empty while the run goes on."""
    fixed: str = ""
    """Why no device can come that the run has not had from its start; empty: one can."""

    @property
    def present(self) -> tuple[DeviceStatus, ...]:
        """Devices that train, or are about to."""
        return tuple(device for device in self.devices if device.state in _PRESENT)


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetChange:
    """A request that was found possible, for the launcher to carry out and answer."""

    request_id: int
    add: tuple[DeviceProfile, ...] = ()
    """Devices to start; some may have been in the run before."""
    remove: tuple[str, ...] = ()
    """Devices that are to leave at the next step boundary, or not to be started again."""


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """What the run says to a request."""

    message: str = ""
    error: ErrorKind | None = None
    run: RunView | None = None
    added: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()


def plan_change(request: ScaleRequest | DrainRequest, view: RunView) -> FleetChange:
    """Find out what a request means for the run, or why it can't be.

    Args:
        request: What is asked for.
        view: The run, now.

    Returns:
        The change, not yet numbered; empty where the run is as asked already.

    Raises:
        ConfigError: If the run ends, a device is unknown or not there, too few would be
            left, or there are too few cores.
    """
    if view.ending:
        msg = f"run {view.run_id} {view.ending}; its devices can't be changed any more"
        raise ConfigError(msg)
    if isinstance(request, ScaleRequest) and abs(request.change) > MAX_CHANGE:
        msg = f"change={request.change:+} must lie in -{MAX_CHANGE}..+{MAX_CHANGE}"
        raise ConfigError(msg)
    if isinstance(request, DrainRequest):
        change = FleetChange(request_id=0, remove=_find_target(request.target, view))
    elif request.devices:
        change = _towards(request.devices, view)
    elif request.change > 0:
        change = FleetChange(request_id=0, add=_some_more(request.change, view))
    elif request.change < 0:
        change = FleetChange(request_id=0, remove=_some_fewer(-request.change, view))
    else:
        msg = "nothing was asked for; name devices, or a number such as +1 or -1"
        raise ConfigError(msg)
    _check_left(change, view)
    _check_new(change, view)
    return change


def _find_target(target: str, view: RunView) -> tuple[str, ...]:
    """The devices that a device's or a node's name stands for."""
    named = [d for d in view.devices if target in {d.device_id, d.profile.node_id}]
    if not named:
        devices = ", ".join(device.device_id for device in view.devices)
        nodes = ", ".join(dict.fromkeys(d.profile.node_id for d in view.devices))
        msg = (
            f"run {view.run_id} has no device or node {target!r}; its devices are "
            f"{devices}, its nodes {nodes}"
        )
        raise ConfigError(msg)
    leaving = tuple(d.device_id for d in named if d.state in {*_PRESENT, "waiting"})
    if not leaving and any(device.state == "draining" for device in named):
        return ()
    if not leaving:
        msg = f"{target} is not in the run: {named[0].reason or 'it is out'}"
        raise ConfigError(msg)
    return leaving


def _towards(wanted: Sequence[DeviceProfile], view: RunView) -> FleetChange:
    known = {device.device_id: device for device in view.devices}
    for profile in wanted:
        old = known.get(profile.device_id)
        if old is not None and old.profile.core_fraction != profile.core_fraction:
            msg = (
                f"{profile.device_id} has core fraction {old.profile.core_fraction}, not "
                f"{profile.core_fraction}; geartrain emulate set changes it while it runs"
            )
            raise ConfigError(msg)
    ids = {profile.device_id for profile in wanted}
    present = {device.device_id for device in view.present}
    add = tuple(
        known[p.device_id].profile if p.device_id in known else p
        for p in wanted
        if p.device_id not in present
    )
    remove = tuple(
        device.device_id
        for device in view.devices
        if device.device_id not in ids and device.state in {*_PRESENT, "waiting"}
    )
    return FleetChange(request_id=0, add=add, remove=remove)


def _some_more(number: int, view: RunView) -> tuple[DeviceProfile, ...]:
    """Devices that are away come back first, then new emulated ones are made."""
    away = [d.profile for d in view.devices if d.state in {"waiting", "out"}]
    add = away[:number]
    num_new = number - len(add)
    if not num_new:
        return tuple(add)
    emulated = [d.profile for d in view.devices if d.profile.kind == "emulated"]
    if not emulated:
        msg = (
            f"{number} more devices are wanted, but of those the run has had only "
            f"{len(away)} are away; name others, as in --devices cuda:0,cuda:1"
        )
        raise ConfigError(msg)
    taken = {device.device_id for device in view.devices}
    free = (f"emulated:{i}" for i in range(len(taken) + num_new))
    names = [name for name in free if name not in taken][:num_new]
    add += [replace(emulated[-1], device_id=name, fingerprint="") for name in names]
    return tuple(add)


def _some_fewer(number: int, view: RunView) -> tuple[str, ...]:
    """The last ones in rank order leave; the fastest device is the first."""
    present = [device.device_id for device in view.present]
    if not present:
        msg = f"no device of run {view.run_id} trains now; ask again when one does"
        raise ConfigError(msg)
    return tuple(present[max(len(present) - number, 0) :])


def _check_left(change: FleetChange, view: RunView) -> None:
    present = {device.device_id for device in view.present}
    leaving = present & set(change.remove)
    added = {profile.device_id for profile in change.add}
    num_left = len(present - leaving | added)
    if leaving and num_left < view.min_devices:
        msg = (
            f"without {', '.join(sorted(leaving))} {num_left} devices would be left, at "
            f"least {view.min_devices} must; add others first, or stop the run with Ctrl-C"
        )
        raise ConfigError(msg)


def _check_new(change: FleetChange, view: RunView) -> None:
    by_id = {device.device_id: device for device in view.devices}
    for profile in change.add:
        if profile.device_id in by_id and by_id[profile.device_id].state == "draining":
            msg = (
                f"{profile.device_id} is just leaving; ask for it again when "
                "geartrain nodes list shows it as out"
            )
            raise ConfigError(msg)
    new = [p.device_id for p in change.add if p.device_id not in by_id]
    if new and view.fixed:
        msg = f"{', '.join(new)} can't join: {view.fixed}"
        raise ConfigError(msg)
    are_emulated = {device.profile.kind == "emulated" for device in view.devices}
    strangers = [
        profile.device_id
        for profile in change.add
        if (profile.kind == "emulated") not in are_emulated
    ]
    if strangers:
        sort = "emulated" if True in are_emulated else "real"
        msg = (
            f"{', '.join(strangers)} can't join: the devices of run {view.run_id} are "
            f"{sort}, and the two don't mix"
        )
        raise ConfigError(msg)
    stay = [d.profile for d in view.present if d.device_id not in change.remove]
    fractions = [p.core_fraction for p in (*stay, *change.add) if p.core_fraction]
    if change.add and fractions:
        check_cores(fractions, view.cores, oversubscribe=view.oversubscribed)


def read_change(text: str) -> int | None:
    """Read ``+N`` or ``-N``; None where it is something else.

    >>> read_change("+2"), read_change("-1"), read_change("cuda:0")
    (2, -1, None)
    """
    sign, digits = text[:1], text[1:]
    if sign not in {"+", "-"} or not digits.isascii() or not digits.isdigit():
        return None
    return int(digits) * (1 if sign == "+" else -1)
