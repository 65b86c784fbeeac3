"""Decides which lost worker is started again, and when. Pure: facts in, decisions out.

A device's first failure costs a second, each further one twice the time before, up to a
minute; after a quiet time it counts as sound again. A device that goes on failing is left
out, and so is every device that fails once the run as a whole has failed too often.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from geartrain.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class RespawnSettings:
    """How patient a run is with devices that fail."""

    first_wait_s: float = 1.0
    """Between a device's first failure and its next start; doubled with each failure."""
    max_wait_s: float = 60.0
    quiet_s: float = 300.0
    """A device that has worked for so long has its earlier failures forgiven."""
    max_failures: int | None = None
    """Of all devices together, in the whole run; None sets no limit."""
    max_device_failures: int = 6
    """Of one device, without a quiet time between them."""

    def __post_init__(self) -> None:
        if not 0 < self.first_wait_s <= self.max_wait_s < math.inf:
            msg = (
                f"first_wait_s={self.first_wait_s:g} and max_wait_s={self.max_wait_s:g} "
                "must be > 0, finite, the first one not the larger; 1 and 60 are usual"
            )
            raise ConfigError(msg)
        if not self.quiet_s > 0:
            msg = f"quiet_s={self.quiet_s:g} must be > 0; 300 forgives after 5 minutes"
            raise ConfigError(msg)
        if self.max_failures is not None and self.max_failures < 0:
            msg = f"max_failures={self.max_failures} must be >= 0, or None for no limit"
            raise ConfigError(msg)
        if self.max_device_failures < 0:
            msg = (
                f"max_device_failures={self.max_device_failures} must be >= 0; 0 never "
                "starts a lost device again"
            )
            raise ConfigError(msg)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceRecord:
    """What is known of one device that has failed or left."""

    device_id: str
    num_failures: int = 0
    """Since it was last quiet for long enough."""
    failed_at_s: float | None = None
    due_at_s: float | None = None
    """When it is to be started again; None: it runs, or never."""
    reason: str = ""
    """How it failed last."""
    left_out: str = ""
    """Why it is not started again; empty where it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RespawnState:
    """All of a run's failures."""

    records: dict[str, DeviceRecord] = field(default_factory=dict)
    """By device; those that never failed have none."""
    num_failures: int = 0
    """Of all devices, never forgiven."""


def note_failure(
    state: RespawnState,
    settings: RespawnSettings,
    device_id: str,
    now_s: float,
    reason: str,
) -> RespawnState:
    """Note that a device's worker was lost, or did not start.

    Args:
        state: Before.
        settings: How patient the run is.
        device_id: Whose worker.
        now_s: By any clock that never goes back, the same one in all calls.
        reason: How, in words for people.

    Returns:
        The state after; the device is due after its wait, or left out for a reason.

    >>> once = note_failure(RespawnState(), RespawnSettings(), "cuda:0", 10.0, "killed")
    >>> once.records["cuda:0"].due_at_s
    11.0
    """
    record = state.records.get(device_id, DeviceRecord(device_id=device_id))
    num_failures = _unforgiven(record, settings, now_s) + 1
    num_in_all = state.num_failures + 1
    left_out = _reason_to_leave_out(settings, num_failures, num_in_all, reason)
    record = replace(
        record,
        num_failures=num_failures,
        failed_at_s=now_s,
        due_at_s=None if left_out else now_s + wait_s(settings, num_failures),
        reason=reason,
        left_out=left_out,
    )
    return RespawnState(
        records={**state.records, device_id: record}, num_failures=num_in_all
    )


def note_start(state: RespawnState, device_id: str) -> RespawnState:
    """Note that a device that was due is being started."""
    return _change(state, device_id, due_at_s=None)


def note_leave(state: RespawnState, device_id: str, reason: str) -> RespawnState:
    """Note that a device was asked to leave: it is no failure, and it stays away."""
    return _change(state, device_id, due_at_s=None, left_out=reason)


def readmit(state: RespawnState, device_id: str, now_s: float) -> RespawnState:
    """Start a device at once that was left out or waits, as an operator asks for.

    Its own failures are forgiven, those of the run are not.
    """
    return _change(state, device_id, num_failures=0, due_at_s=now_s, left_out="")


def due_devices(state: RespawnState, now_s: float) -> tuple[str, ...]:
    """Devices to start now, the longest due first."""
    due = [
        (record.due_at_s, device_id)
        for device_id, record in state.records.items()
        if record.due_at_s is not None and record.due_at_s <= now_s
    ]
    return tuple(device_id for _, device_id in sorted(due))


def next_due_at_s(state: RespawnState) -> float | None:
    """When the next device is due; None: none is."""
    return min(
        (r.due_at_s for r in state.records.values() if r.due_at_s is not None),
        default=None,
    )


def left_out_devices(state: RespawnState) -> dict[str, str]:
    """Devices that are not started again, with the reasons."""
    return {i: record.left_out for i, record in state.records.items() if record.left_out}


def wait_s(settings: RespawnSettings, num_failures: int) -> float:
    """How long a device waits after so many failures.

    >>> [wait_s(RespawnSettings(), n) for n in (1, 2, 3, 7, 5000)]
    [1.0, 2.0, 4.0, 60.0, 60.0]
    """
    doublings = min(num_failures - 1, 62)  # what is beyond is capped anyway
    return min(settings.first_wait_s * 2.0**doublings, settings.max_wait_s)


def _unforgiven(record: DeviceRecord, settings: RespawnSettings, now_s: float) -> int:
    """Failures that still count: none after a quiet time since the device came back."""
    if record.failed_at_s is None or not record.num_failures:
        return 0
    # It was away for its wait; only the time behind that could show it sound.
    back_at_s = record.failed_at_s + wait_s(settings, record.num_failures)
    return 0 if now_s >= back_at_s + settings.quiet_s else record.num_failures


def _reason_to_leave_out(
    settings: RespawnSettings, num_failures: int, num_in_all: int, reason: str
) -> str:
    if num_failures > settings.max_device_failures:
        return (
            f"failed {num_failures} times, at most {settings.max_device_failures} are "
            f"allowed without {settings.quiet_s:g} s of quiet; the last time: {reason}"
        )
    if settings.max_failures is not None and num_in_all > settings.max_failures:
        return (
            f"the run has had {num_in_all} failures, at most {settings.max_failures} "
            f"are allowed; the last one: {reason}"
        )
    return ""


def _change(state: RespawnState, device_id: str, **changes: object) -> RespawnState:
    record = state.records.get(device_id, DeviceRecord(device_id=device_id))
    changed = replace(record, **changes)  # type: ignore[arg-type]  # fields of a record
    return replace(state, records={**state.records, device_id: changed})
