"""What a device vendor's adapter must offer. Torch only for types."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from geartrain.devices.profile import DeviceProfile

if TYPE_CHECKING:
    import torch

Progress = Callable[[str], None]
"""Told what is being measured, for people to read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryStats:
    """A device's memory as this process sees it."""

    in_use_bytes: int
    peak_bytes: int
    """Most in use since the start or the last ``reset_peak``."""
    limit_bytes: int
    """What is enforced, else what the device has."""
    counts: str
    """What is counted: tensors, or the resident memory of the process."""


@runtime_checkable
class DeviceAdapter(Protocol):
    """One kind of device. Its constructor takes no required arguments.

    Nothing of the vendor may be imported before a method is called, and
    ``is_available`` must return False, not raise, on a machine without the vendor.
    """

    kind: str
    """The name under which it is registered, and the first part of device ids."""

    def is_available(self) -> bool:
        """Whether this machine has at least one such device and torch can use it."""

    def list_devices(self) -> tuple[DeviceProfile, ...]:
        """Profiles of all such devices, without rates, quickly."""

    def probe(self, device_id: str, on_progress: Progress | None = None) -> DeviceProfile:
        """Measure a device's rates, within a few seconds.

        Raises:
            DeviceError: If the device is absent.
        """

    def torch_device(self, device_id: str) -> torch.device:
        """Return torch's name of the device.

        Raises:
            DeviceError: If the device is absent.
        """

    def supported_dtypes(self, device_id: str) -> tuple[str, ...]:
        """Names of the dtypes that matrix multiplication works in, by trying."""

    def memory_stats(self, device_id: str) -> MemoryStats:
        """Memory in use and its peak."""

    def reset_peak(self, device_id: str) -> None:
        """Start the peak of ``memory_stats`` anew."""

    def synchronize(self, device_id: str) -> None:
        """Wait until the device has done all it was given."""

    def manual_seed(self, device_id: str, seed: int) -> None:
        """Seed the device's random generator."""

    def rng_state(self, device_id: str) -> torch.Tensor:
        """State of the device's random generator, a CPU tensor of integers."""

    def set_rng_state(self, device_id: str, state: torch.Tensor) -> None:
        """Restore what ``rng_state`` gave."""

    def collective_backends(self) -> tuple[str, ...]:
        """torch.distributed backends that move its tensors, the best first."""

    def slices_supported(self, device_id: str) -> tuple[str, ...]:
        """Ways in which a part of the device can be given to a process."""
