"""Opening the throttle that this machine allows."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from geartrain.devices.emulation.cgroup_throttle import CgroupThrottle
from geartrain.devices.emulation.cgroups import usable_cgroups
from geartrain.devices.emulation.control import default_state_dir
from geartrain.devices.emulation.duty_cycle import DutyCycleThrottle
from geartrain.devices.emulation.leftovers import sweep_cgroups, sweep_registrations
from geartrain.devices.emulation.network.leftovers import sweep_networks
from geartrain.devices.emulation.throttle import Throttle
from geartrain.devices.profile import DeviceProfile
from geartrain.errors import DeviceError

logger = logging.getLogger(__name__)


def open_throttle(devices: Sequence[DeviceProfile]) -> Throttle:
    """Open the throttle of a fleet's emulated devices, sweeping leftovers first.

    Args:
        devices: Any devices; those that are not emulated are passed over.

    Returns:
        Cgroups where this process may make them, else the duty cycle, whose use is
        logged because it enforces no memory limit.
    """
    emulated = [device for device in devices if device.kind == "emulated"]
    sweep_leftovers()
    cgroups = usable_cgroups() if emulated else None
    if cgroups is not None:
        try:
            return CgroupThrottle(cgroups, emulated)
        except DeviceError as error:
            logger.warning("no cgroups for emulated devices: %s", error)
    if any(device.memory_limit_bytes for device in emulated):
        logger.warning(
            "without cgroups the kernel backs no memory limit of an emulated device; "
            "tensors are still counted"
        )
    return DutyCycleThrottle(emulated)


def sweep_leftovers() -> int:
    """Remove what dead launchers left: cgroups, networks, processes in them, registrations.

    Returns:
        How many directories, namespaces and files were removed.
    """
    cgroups = usable_cgroups()
    removed = [] if cgroups is None else sweep_cgroups(cgroups.roots, cgroups.files)
    removed += sweep_registrations(default_state_dir())
    num_removed = len(removed) + len(sweep_networks())
    if num_removed:
        logger.info("removed %d leftovers of dead launchers", num_removed)
    return num_removed
