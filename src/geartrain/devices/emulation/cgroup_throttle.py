"""Throttling by the kernel: a cgroup a device, exact and cheap, needs root."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from geartrain.devices.emulation.cgroups import Cgroups
from geartrain.devices.emulation.owner import Owner, current_owner
from geartrain.devices.emulation.throttle import (
    MEMORY_BACKSTOP_BYTES,
    check_core_fraction,
    unknown_device,
)
from geartrain.devices.profile import DeviceProfile
from geartrain.errors import DeviceError

logger = logging.getLogger(__name__)


class CgroupThrottle:
    """One group a device, below one directory named after this process."""

    def __init__(
        self,
        cgroups: Cgroups,
        devices: Sequence[DeviceProfile],
        owner: Owner | None = None,
    ) -> None:
        self.name = cgroups.name
        self._cgroups = cgroups
        self._owner = owner or current_owner()
        self._groups: dict[str, str] = {}
        self._kills: dict[str, int] = {}
        try:
            cgroups.prepare(self._owner.name)
            for device in devices:
                self._make(device)
        except DeviceError:
            self.close()
            raise

    def add(self, device: DeviceProfile) -> None:
        """Make the group of one more device; one that is there stays as it is.

        Raises:
            DeviceError: If the kernel refuses.
        """
        if device.device_id not in self._groups:
            self._make(device)

    def attach(self, device_id: str, pid: int) -> None:
        """Move a process, all its threads and later children into the group.

        Raises:
            ConfigError: If the device is unknown.
            DeviceError: If the kernel did not move it.
        """
        group = self._group(device_id)
        for root in self._cgroups.roots:
            self._cgroups.files.write(root / group / "cgroup.procs", str(pid))
            if pid not in self._cgroups.files.pids(root / group):
                msg = f"process {pid} is not in {root / group} after moving; did it end?"
                raise DeviceError(msg)

    def set_core_fraction(self, device_id: str, core_fraction: float) -> None:
        """Change a device's share; it holds from the next period on.

        Raises:
            ConfigError: If the device is unknown or the share impossible.
            DeviceError: If the kernel refuses.
        """
        check_core_fraction(core_fraction, device_id)
        self._cgroups.limit_cores(self._group(device_id), core_fraction)

    def core_fraction(self, device_id: str) -> float:
        """Return the share that the kernel holds the device to."""
        return self._cgroups.core_fraction(self._group(device_id))

    def out_of_memory_kills(self, device_id: str) -> int:
        """How often the kernel killed the device; known after close, too."""
        if device_id in self._groups:
            self._kills[device_id] = self._cgroups.out_of_memory_kills(
                self._groups[device_id]
            )
        if device_id not in self._kills:
            raise unknown_device(device_id, sorted(self._kills))
        return self._kills[device_id]

    def close(self) -> None:
        """Remove the groups, once their processes have ended."""
        directories = []
        for device_id, group in list(self._groups.items()):
            try:
                self.out_of_memory_kills(device_id)
            except DeviceError:  # a group that was only half made
                logger.debug("no kill count of %s", device_id, exc_info=True)
            directories += [root / group for root in self._cgroups.roots]
        self._groups.clear()
        directories += [root / self._owner.name for root in self._cgroups.roots]
        for directory in directories:
            if not self._cgroups.files.remove(directory):
                logger.warning(
                    "cgroup %s is still in use; the next start of geartrain removes it",
                    directory,
                )

    def _make(self, device: DeviceProfile) -> None:
        group = f"{self._owner.name}/{device.device_id.replace(':', '-')}"
        self._groups[device.device_id] = group
        for root in self._cgroups.roots:
            self._cgroups.files.make(root / group)
        self.set_core_fraction(device.device_id, device.core_fraction or 1.0)
        if device.memory_limit_bytes is not None:
            limit_bytes = device.memory_limit_bytes + MEMORY_BACKSTOP_BYTES
            self._cgroups.limit_memory(group, limit_bytes)

    def _group(self, device_id: str) -> str:
        if device_id not in self._groups:
            raise unknown_device(device_id, sorted(self._groups))
        return self._groups[device_id]
