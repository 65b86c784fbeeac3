"""The CPU of this node: one device with all the threads that torch uses."""

from __future__ import annotations

import dataclasses
import time
from typing import TYPE_CHECKING

from geartrain.devices.adapter import MemoryStats, Progress
from geartrain.devices.fingerprint import fingerprint
from geartrain.devices.host import cores_present, cpu_name, host_memory_bytes, node_id
from geartrain.devices.host_process import HostProcess
from geartrain.devices.probes.matmul import supported_dtypes
from geartrain.devices.probes.suite import measure_rates
from geartrain.devices.probes.timing import TimingBudget
from geartrain.devices.profile import DeviceProfile
from geartrain.errors import DeviceError

if TYPE_CHECKING:
    import torch as torch_types

_MAX_MATRIX_SIZE = 1024
_BUDGET = TimingBudget()


class CpuAdapter:
    """``cpu``, always there."""

    kind = "cpu"

    def __init__(self) -> None:
        self._process = HostProcess()

    def is_available(self) -> bool:
        """Whether there is a CPU."""
        return True

    def list_devices(self) -> tuple[DeviceProfile, ...]:
        """Describe the one CPU device."""
        vendor, name = cpu_name()
        memory_bytes = host_memory_bytes()
        cores = cores_present()
        return (
            DeviceProfile(
                device_id="cpu",
                node_id=node_id(),
                vendor=vendor,
                kind=self.kind,
                name=f"{name}, {cores:g} cores",
                memory_bytes=memory_bytes,
                collective_backends=self.collective_backends(),
                fingerprint=fingerprint(self.kind, name, cores, memory_bytes),
            ),
        )

    def probe(self, device_id: str, on_progress: Progress | None = None) -> DeviceProfile:
        """Measure the CPU with torch's present number of threads."""
        import torch  # noqa: PLC0415 - a plan is made where torch is absent

        rates = measure_rates(
            torch,
            self.torch_device(device_id),
            lambda: None,
            _BUDGET,
            in_host_memory=True,
            max_size=_MAX_MATRIX_SIZE,
            on_progress=on_progress,
        )
        return dataclasses.replace(
            self.list_devices()[0],
            flop_per_s=rates.flop_per_s,
            memory_bytes_per_s=rates.memory_bytes_per_s,
            measured_at_s=time.time(),
        )

    def torch_device(self, device_id: str) -> torch_types.device:
        """``cpu``.

        Raises:
            DeviceError: If another device is asked for.
        """
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
        return self._process.memory_stats(host_memory_bytes())

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
        if device_id != "cpu":
            msg = f"{device_id} is not a cpu device; present: cpu"
            raise DeviceError(msg)
