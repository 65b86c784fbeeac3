"""Holds a run's emulated devices to their speed; does nothing for real ones."""

from __future__ import annotations

from geartrain.devices.emulation.control import EmulationControl
from geartrain.devices.emulation.schedule import parse_schedule
from geartrain.devices.emulation.start import open_throttle
from geartrain.devices.emulation.throttle import Throttle
from geartrain.devices.profile import DeviceProfile
from geartrain.launch.settings import LaunchSettings


class EmulatedDevices:
    """The throttle of a run and what may change it while the run goes on."""

    def __init__(self, settings: LaunchSettings) -> None:
        self._throttle: Throttle | None = None
        self._control: EmulationControl | None = None
        devices = [d for d in settings.fleet.devices if d.kind == "emulated"]
        self._device_ids = {device.device_id for device in devices}
        if not devices:
            return
        schedule = parse_schedule(settings.schedule_path) if settings.schedule_path else ()
        self._throttle = open_throttle(devices)
        try:
            self._control = EmulationControl(
                settings.run_dir,
                self._throttle,
                [device.device_id for device in devices],
                schedule=schedule,
                oversubscribed=settings.fleet.oversubscribed,
            )
        except BaseException:
            self._throttle.close()
            raise

    def add(self, device: DeviceProfile) -> None:
        """Hold another device of the fleet to its speed, while the run goes on.

        Raises:
            DeviceError: If the kernel refuses.
        """
        if self._throttle is None or device.kind != "emulated":
            return
        assert self._control is not None, "it is there where the throttle is"
        self._throttle.add(device)
        self._control.add(device.device_id)
        self._device_ids.add(device.device_id)

    def attach(self, device_id: str, process_id: int) -> None:
        """Hold a worker to its device's speed from now on."""
        if self._throttle is not None and device_id in self._device_ids:
            self._throttle.attach(device_id, process_id)

    def restart_clock(self) -> None:
        """Count the schedule's seconds from now on: the script begins."""
        if self._control is not None:
            self._control.restart_clock()

    def poll(self) -> None:
        """Apply changes of core fractions that are due."""
        if self._control is not None:
            self._control.poll()

    def out_of_memory_kills(self, device_id: str) -> int:
        """How often the kernel killed a process of the device for its memory."""
        if self._throttle is None or device_id not in self._device_ids:
            return 0
        return self._throttle.out_of_memory_kills(device_id)

    def close(self) -> None:
        """Remove what was made; call when the workers have ended."""
        if self._control is not None:
            self._control.close()
        if self._throttle is not None:
            self._throttle.close()
