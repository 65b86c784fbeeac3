"""Emulated devices: this process, held by its launcher to a share of a core."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from geartrain.devices.adapter import MemoryStats, Progress
from geartrain.devices.host import cpu_name, host_memory_bytes, node_id
from geartrain.devices.host_process import HostProcess
from geartrain.devices.probes.matmul import supported_dtypes
from geartrain.devices.probes.suite import measure_rates
from geartrain.devices.probes.timing import THROTTLED_BUDGET
from geartrain.devices.profile import DeviceProfile
from geartrain.errors import DeviceError

if TYPE_CHECKING:
    import torch as torch_types

_MAX_MATRIX_SIZE = 512


class EmulatedAdapter:
    """``emulated:0`` and so on, as a fleet spec describes them.

    The adapter measures the process that it runs in; holding that process to the
    device's share is the launcher's part.

    Args:
        devices: The emulated devices of the fleet; without them any index is taken.
    """

    kind = "emulated"

    def __init__(self, devices: Sequence[DeviceProfile] = ()) -> None:
        self._devices = {device.device_id: device for device in devices}
        self._process = HostProcess()

    def is_available(self) -> bool:
        """Whether there is a CPU to emulate on."""
        return True

    def list_devices(self) -> tuple[DeviceProfile, ...]:
        """Return the devices given; a machine has no emulated devices of its own."""
        return tuple(self._devices.values())

    def probe(self, device_id: str, on_progress: Progress | None = None) -> DeviceProfile:
        """Measure this process, which the launcher holds to the device's share.

        Returns:
            The description given with the rates found; without one, what this process
            looks like from inside.
        """
        import torch  # noqa: PLC0415 - a plan is made where torch is absent

        self._check(device_id)
        rates = measure_rates(
            torch,
            torch.device("cpu"),
            lambda: None,
            THROTTLED_BUDGET,
            in_host_memory=True,
            max_size=_MAX_MATRIX_SIZE,
            on_progress=on_progress,
        )
        return dataclasses.replace(
            self._devices.get(device_id) or _undescribed(device_id),
            flop_per_s=rates.flop_per_s,
            memory_bytes_per_s=rates.memory_bytes_per_s,
            measured_at_s=time.time(),
        )

    def torch_device(self, device_id: str) -> torch_types.device:
        """``cpu``."""
        import torch  # noqa: PLC0415 - a plan is made where torch is absent

        self._check(device_id)
        return torch.device("cpu")

    def supported_dtypes(self, device_id: str) -> tuple[str, ...]:
        """Dtypes in which a small product runs."""
        import torch  # noqa: PLC0415 - a plan is made where torch is absent

        return supported_dtypes(torch, self.torch_device(device_id), lambda: None)

    def memory_stats(self, device_id: str) -> MemoryStats:
        """Tensor bytes where they are counted, else resident memory."""
        self._check(device_id)
        device = self._devices.get(device_id)
        limit_bytes = device.memory_bytes if device else host_memory_bytes()
        return self._process.memory_stats(limit_bytes)

    def reset_peak(self, device_id: str) -> None:
        """Start the peak anew."""
        self._check(device_id)
        self._process.reset_peak()

    def synchronize(self, device_id: str) -> None:
        """Do nothing: the CPU is done when a call returns."""
        self._check(device_id)

    def manual_seed(self, device_id: str, seed: int) -> None:
        """Seed torch's CPU generator."""
        self._check(device_id)
        self._process.manual_seed(seed)

    def rng_state(self, device_id: str) -> torch_types.Tensor:
        """State of torch's CPU generator."""
        self._check(device_id)
        return self._process.rng_state()

    def set_rng_state(self, device_id: str, state: torch_types.Tensor) -> None:
        """Restore torch's CPU generator."""
        self._check(device_id)
        self._process.set_rng_state(state)

    def collective_backends(self) -> tuple[str, ...]:
        """Gloo."""
        return ("gloo",)

    def slices_supported(self, device_id: str) -> tuple[str, ...]:
        """Cores and memory, by cgroup."""
        self._check(device_id)
        return ("cores", "memory")

    def _check(self, device_id: str) -> None:
        kind, _, index = device_id.partition(":")
        known = not self._devices or device_id in self._devices
        if kind != self.kind or not index.isdigit() or not known:
            present = ", ".join(self._devices) or "any emulated:INDEX"
            msg = f"{device_id} is not an emulated device here; present: {present}"
            raise DeviceError(msg)


def _undescribed(device_id: str) -> DeviceProfile:
    vendor, cpu = cpu_name()
    return DeviceProfile(
        device_id=device_id,
        node_id=node_id(),
        vendor=vendor,
        kind="emulated",
        name=cpu,
        memory_bytes=host_memory_bytes(),
        source="emulated",
    )
