"""What holds emulated devices to their share of a core."""

from __future__ import annotations

from typing import Protocol

from geartrain.devices.profile import DeviceProfile
from geartrain.errors import ConfigError

MIN_CORE_FRACTION = 0.02
"""1 ms of quota in a period of 50 ms, the least that cgroups can do."""

MAX_CORE_FRACTION = 1.0
"""An emulated device is one process with one thread."""

MEMORY_BACKSTOP_BYTES = 640 * 2**20
"""Room above a device's tensor limit for the interpreter and torch's libraries.

Importing torch and touching its kernels takes 250 to 500 MiB that tensors are not
charged for.
"""


class Throttle(Protocol):
    """Holds one process a device to the device's core fraction."""

    name: str
    """How it works: cgroup-v1, cgroup-v2 or duty-cycle."""

    def add(self, device: DeviceProfile) -> None:
        """Hold one more device, which has no process yet."""

    def attach(self, device_id: str, pid: int) -> None:
        """Put a process under the device's limits."""

    def set_core_fraction(self, device_id: str, core_fraction: float) -> None:
        """Change a device's share while it runs."""

    def core_fraction(self, device_id: str) -> float:
        """Return the share in force."""

    def out_of_memory_kills(self, device_id: str) -> int:
        """How often the kernel killed the device for its memory."""

    def close(self) -> None:
        """Remove everything it made; calling it again does nothing."""


def check_core_fraction(core_fraction: float, device_id: str = "device") -> None:
    """Refuse a share that one process cannot have.

    Raises:
        ConfigError: If it is not in 0.02..1.
    """
    if not MIN_CORE_FRACTION <= core_fraction <= MAX_CORE_FRACTION:
        msg = (
            f"{device_id}: core_fraction={core_fraction:g} must lie in "
            f"{MIN_CORE_FRACTION:g}..{MAX_CORE_FRACTION:g}; a device is one process "
            "with one thread, and less than 1 ms in 50 ms cannot be scheduled"
        )
        raise ConfigError(msg)


def unknown_device(device_id: str, known: list[str]) -> ConfigError:
    """Make the error for a device that a throttle does not hold."""
    listed = ", ".join(known) or "none"
    return ConfigError(f"{device_id!r} is not an emulated device here; known are {listed}")
