"""Apple GPUs: torch's MPS backend, one device that shares the host's memory."""

from __future__ import annotations

import platform
from typing import TYPE_CHECKING

from geartrain.devices.accelerator import AcceleratorAdapter
from geartrain.devices.adapter import MemoryStats
from geartrain.devices.fingerprint import fingerprint
from geartrain.devices.host import node_id
from geartrain.devices.profile import DeviceProfile
from geartrain.errors import DeviceError

if TYPE_CHECKING:
    import torch as torch_types


class MpsAdapter(AcceleratorAdapter):
    """``mps``, the only device of its kind.

    MPS keeps no peak, so the peak here is the largest use that was asked about.
    """

    kind = "mps"
    vendor = "apple"
    namespace = "mps"
    backends = ("gloo",)

    _peak_bytes = 0

    def torch_device(self, device_id: str) -> torch_types.device:
        """``mps``, without an index."""
        self._index(device_id)
        device: torch_types.device = self._torch.device("mps")
        return device

    def memory_stats(self, device_id: str) -> MemoryStats:
        """Bytes of tensors; the peak of the moments this was called."""
        in_use_bytes = int(self._space.current_allocated_memory())
        self._peak_bytes = max(self._peak_bytes, in_use_bytes)
        return MemoryStats(
            in_use_bytes=in_use_bytes,
            peak_bytes=self._peak_bytes,
            limit_bytes=self._memory_bytes(self._index(device_id)),
            counts="tensors",
        )

    def reset_peak(self, device_id: str) -> None:
        """Forget the largest use seen."""
        self._index(device_id)
        self._peak_bytes = int(self._space.current_allocated_memory())

    def synchronize(self, device_id: str) -> None:
        """Wait for the device's queue."""
        self._index(device_id)
        self._space.synchronize()

    def manual_seed(self, device_id: str, seed: int) -> None:
        """Seed the device's generator."""
        self._index(device_id)
        self._space.manual_seed(seed)

    def rng_state(self, device_id: str) -> torch_types.Tensor:
        """State of the device's generator."""
        self._index(device_id)
        state: torch_types.Tensor = self._space.get_rng_state()
        return state

    def set_rng_state(self, device_id: str, state: torch_types.Tensor) -> None:
        """Restore the device's generator."""
        self._index(device_id)
        self._space.set_rng_state(state)

    def _num_devices(self) -> int:
        return 1

    def _index(self, device_id: str) -> int:
        if device_id != "mps" or not self.is_available():
            present = "mps" if self.is_available() else "none"
            msg = f"{device_id} is not an mps device here; present: {present}"
            raise DeviceError(msg)
        return 0

    def _describe(self, index: int) -> DeviceProfile:
        name = f"Apple GPU ({platform.processor() or platform.machine()})"
        memory_bytes = self._memory_bytes(index)
        return DeviceProfile(
            device_id="mps",
            node_id=node_id(),
            vendor=self.vendor,
            kind=self.kind,
            name=name,
            memory_bytes=memory_bytes,
            collective_backends=self.backends,
            fingerprint=fingerprint(self.kind, name, memory_bytes, platform.mac_ver()[0]),
        )

    def _memory_bytes(self, _index: int) -> int:
        return int(self._space.recommended_max_memory())
