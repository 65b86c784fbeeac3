"""What adapters of accelerators share: torch's device namespaces are alike.

``torch.cuda``, ``torch.xpu`` and ``torch.npu`` offer the same functions under the same
names; an adapter says which namespace is its own and what differs.
"""

from __future__ import annotations

import dataclasses
import time
from typing import TYPE_CHECKING, Any

from geartrain.devices.adapter import MemoryStats, Progress
from geartrain.devices.datasheet import find_datasheet
from geartrain.devices.fingerprint import fingerprint
from geartrain.devices.host import node_id
from geartrain.devices.probes.matmul import supported_dtypes
from geartrain.devices.probes.suite import measure_rates
from geartrain.devices.probes.timing import TimingBudget
from geartrain.devices.profile import DeviceProfile
from geartrain.errors import DeviceError

if TYPE_CHECKING:
    import torch as torch_types

_MAX_MATRIX_SIZE = 8192


class AcceleratorAdapter:
    """The part of an adapter that is the same for all torch device namespaces.

    Args:
        torch_module: The torch module; None imports it when first needed.
    """

    kind = ""
    vendor = ""
    namespace = ""
    """Name of torch's module for the device, and of its torch.device type."""
    backends: tuple[str, ...] = ("gloo",)
    budget = TimingBudget()

    def __init__(
        self,
        torch_module: Any | None = None,  # Any: a module, or a facade with its names
    ) -> None:
        self._torch_module = torch_module

    def is_available(self) -> bool:
        """Whether torch was built for this kind and finds a device."""
        try:
            return bool(self._is_this_vendor() and self._space.is_available())
        except (ImportError, AttributeError, RuntimeError, OSError):
            return False

    def list_devices(self) -> tuple[DeviceProfile, ...]:
        """Profiles of all devices, without rates."""
        if not self.is_available():
            return ()
        return tuple(self._describe(i) for i in range(self._num_devices()))

    def probe(self, device_id: str, on_progress: Progress | None = None) -> DeviceProfile:
        """Measure one device; the maker's numbers only where nothing runs.

        Raises:
            DeviceError: If it is absent, or nothing runs and its maker's numbers are
                unknown.
        """
        index = self._index(device_id)
        profile = self._describe(index)
        rates = measure_rates(
            self._torch,
            self.torch_device(device_id),
            lambda: self.synchronize(device_id),
            self.budget,
            in_host_memory=False,
            max_size=_MAX_MATRIX_SIZE,
            on_progress=on_progress,
        )
        if not rates.flop_per_s:
            return self._from_datasheet(profile)
        return dataclasses.replace(
            profile,
            flop_per_s=rates.flop_per_s,
            memory_bytes_per_s=rates.memory_bytes_per_s,
            host_to_device_bytes_per_s=rates.host_to_device_bytes_per_s,
            device_to_host_bytes_per_s=rates.device_to_host_bytes_per_s,
            measured_at_s=time.time(),
        )

    def torch_device(self, device_id: str) -> torch_types.device:
        """Return torch's name, such as ``cuda:0`` for ``rocm:0``.

        Raises:
            DeviceError: If the device is absent.
        """
        device: torch_types.device = self._torch.device(
            self.namespace, self._index(device_id)
        )
        return device

    def supported_dtypes(self, device_id: str) -> tuple[str, ...]:
        """Dtypes in which a small product runs."""
        return supported_dtypes(
            self._torch, self.torch_device(device_id), lambda: self.synchronize(device_id)
        )

    def memory_stats(self, device_id: str) -> MemoryStats:
        """Bytes that this process's tensors take on the device."""
        index = self._index(device_id)
        return MemoryStats(
            in_use_bytes=int(self._space.memory_allocated(index)),
            peak_bytes=int(self._space.max_memory_allocated(index)),
            limit_bytes=self._memory_bytes(index),
            counts="tensors",
        )

    def reset_peak(self, device_id: str) -> None:
        """Start the allocator's peak anew."""
        self._space.reset_peak_memory_stats(self._index(device_id))

    def synchronize(self, device_id: str) -> None:
        """Wait for all streams of the device."""
        self._space.synchronize(self._index(device_id))

    def manual_seed(self, device_id: str, seed: int) -> None:
        """Seed the generator of this device only."""
        with self._space.device(self._index(device_id)):
            self._space.manual_seed(seed)

    def rng_state(self, device_id: str) -> torch_types.Tensor:
        """State of the device's generator."""
        state: torch_types.Tensor = self._space.get_rng_state(self._index(device_id))
        return state

    def set_rng_state(self, device_id: str, state: torch_types.Tensor) -> None:
        """Restore the device's generator."""
        self._space.set_rng_state(state, self._index(device_id))

    def collective_backends(self) -> tuple[str, ...]:
        """The vendor's backend where torch has it; Gloo goes through host memory."""
        return self.backends

    def slices_supported(self, device_id: str) -> tuple[str, ...]:
        """None that a process could ask for by itself."""
        self._index(device_id)
        return ()

    @property
    def _torch(self) -> Any:  # Any: the module, or the facade given
        if self._torch_module is None:
            import torch  # noqa: PLC0415 - a plan is made where torch is absent

            self._torch_module = torch
        return self._torch_module

    @property
    def _space(self) -> Any:  # Any: torch.cuda and its likes share no type
        return getattr(self._torch, self.namespace)

    def _is_this_vendor(self) -> bool:
        return True

    def _num_devices(self) -> int:
        return int(self._space.device_count())

    def _index(self, device_id: str) -> int:
        kind, _, index = device_id.partition(":")
        count = self._num_devices() if self.is_available() else 0
        if kind != self.kind or not index.isdigit() or int(index) >= count:
            present = ", ".join(f"{self.kind}:{i}" for i in range(count)) or "none"
            msg = f"{device_id} is not a {self.kind} device here; present: {present}"
            raise DeviceError(msg)
        return int(index)

    def _describe(self, index: int) -> DeviceProfile:
        name = str(self._space.get_device_name(index))
        memory_bytes = self._memory_bytes(index)
        return DeviceProfile(
            device_id=f"{self.kind}:{index}",
            node_id=node_id(),
            vendor=self.vendor,
            kind=self.kind,
            name=name,
            memory_bytes=memory_bytes,
            collective_backends=self.collective_backends(),
            fingerprint=fingerprint(self.kind, name, memory_bytes, self._driver()),
        )

    def _memory_bytes(self, index: int) -> int:
        return int(self._space.get_device_properties(index).total_memory)

    def _driver(self) -> str:
        return ""

    def _from_datasheet(self, profile: DeviceProfile) -> DeviceProfile:
        sheet = find_datasheet(profile.name)
        if sheet is None:
            msg = (
                f"{profile.device_id} ({profile.name}) ran no matrix product in any "
                "dtype and its maker's numbers are unknown; check the driver"
            )
            raise DeviceError(msg)
        flop_per_s, memory_bytes_per_s = sheet.rates()
        return dataclasses.replace(
            profile,
            flop_per_s=flop_per_s,
            memory_bytes_per_s=memory_bytes_per_s,
            power_watts=sheet.power_watts,
            source="datasheet",
            fingerprint="",  # not a measurement: try again next time
        )
