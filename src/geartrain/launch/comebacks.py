"""Keeps account of which devices of a run are started again, and says so."""

from __future__ import annotations

import time

from geartrain.launch.respawn import (
    RespawnSettings,
    RespawnState,
    due_devices,
    left_out_devices,
    note_failure,
    note_leave,
    note_start,
    readmit,
)


class Comebacks:
    """The clock around ``respawn``.

    Args:
        settings: How patient the run is; None: nothing is started again by itself.
    """

    def __init__(self, settings: RespawnSettings | None) -> None:
        self._settings = settings or RespawnSettings(max_device_failures=0)
        self._is_silent = settings is None
        self._is_over = False
        self.state = RespawnState()

    def note_lost(self, device_id: str, reason: str) -> str | None:
        """Note that a device's worker was lost.

        Returns:
            What to tell the user.
        """
        now_s = time.monotonic()
        self.state = note_failure(self.state, self._settings, device_id, now_s, reason)
        record = self.state.records[device_id]
        if not self.are_possible:
            return None
        if record.due_at_s is None:
            return f"{device_id} is not started again: {record.left_out}"
        wait_s = record.due_at_s - now_s
        return f"{device_id} starts again in {wait_s:.3g} s (failure {record.num_failures})"

    def note_left(self, device_id: str, reason: str) -> None:
        """Note that a device left in order: it stays away until it is asked for."""
        self.state = note_leave(self.state, device_id, reason)

    def note_started(self, device_id: str) -> None:
        """Note that a device that was due is started."""
        self.state = note_start(self.state, device_id)

    def readmit(self, device_id: str) -> None:
        """Have a device started at once, as an operator asks for."""
        self.state = readmit(self.state, device_id, time.monotonic())

    def end(self) -> None:
        """Start nothing any more: the run is to end."""
        self._is_over = True

    @property
    def are_possible(self) -> bool:
        """Whether devices are started again by themselves."""
        return not self._is_silent and not self._is_over

    @property
    def due(self) -> tuple[str, ...]:
        """Devices to start now."""
        return () if self._is_over else due_devices(self.state, time.monotonic())

    @property
    def left_out(self) -> dict[str, str]:
        """Devices that are not started again, with the reasons."""
        return left_out_devices(self.state)

    def returns(self, device_id: str) -> bool:
        """Whether a device waits for its next start."""
        record = self.state.records.get(device_id)
        return not self._is_over and record is not None and record.due_at_s is not None
