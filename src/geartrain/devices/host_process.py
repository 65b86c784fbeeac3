"""A CPU process as a device: what the cpu and the emulated adapter share."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from geartrain.devices.adapter import MemoryStats

if TYPE_CHECKING:
    import torch as torch_types

_RESET_PEAK = "5"
"""Written to clear_refs, it sets the peak resident size to the present one."""


class HostProcess:
    """Memory and random generator of this process."""

    def memory_stats(self, limit_bytes: int) -> MemoryStats:
        """Tensor bytes where they are counted, else the process's resident memory.

        Args:
            limit_bytes: What the device has, where no limit is enforced.
        """
        counter = _tensor_counter()
        if counter is not None:
            return MemoryStats(
                in_use_bytes=counter.in_use_bytes,
                peak_bytes=counter.peak_bytes,
                limit_bytes=counter.limit_bytes or limit_bytes,
                counts="tensors",
            )
        resident = int(psutil.Process().memory_info().rss)
        return MemoryStats(
            in_use_bytes=resident,
            peak_bytes=max(resident, _peak_resident_bytes()),
            limit_bytes=limit_bytes,
            counts="resident",
        )

    def reset_peak(self) -> None:
        """Start the peak anew; without Linux' clear_refs the old peak stays."""
        counter = _tensor_counter()
        if counter is not None:
            counter.peak_bytes = counter.in_use_bytes
            return
        try:
            Path("/proc/self/clear_refs").write_text(_RESET_PEAK)
        except OSError:
            return

    def manual_seed(self, seed: int) -> None:
        """Seed torch's CPU generator, and no accelerator's."""
        import torch  # noqa: PLC0415 - a plan is made where torch is absent

        torch.default_generator.manual_seed(seed)

    def rng_state(self) -> torch_types.Tensor:
        """State of torch's CPU generator."""
        import torch  # noqa: PLC0415 - a plan is made where torch is absent

        return torch.get_rng_state()

    def set_rng_state(self, state: torch_types.Tensor) -> None:
        """Restore torch's CPU generator."""
        import torch  # noqa: PLC0415 - a plan is made where torch is absent

        torch.set_rng_state(state)


def _tensor_counter() -> Any | None:  # Any: naming the type would import torch
    from geartrain.devices.emulation.memory_limit import (  # noqa: PLC0415 - torch
        active_counter,
    )

    return active_counter()


def _peak_resident_bytes() -> int:
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return 0
    for line in status.splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0
