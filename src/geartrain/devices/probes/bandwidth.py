"""Memory bandwidth, and the way between host and device."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from geartrain.devices.probes.timing import TimingBudget, measure_rate
from geartrain.devices.profile import MeasuredRate

logger = logging.getLogger(__name__)

_HOST_BYTES = 2**26
_DEVICE_BYTES = 2**28
"""Beyond the caches of hosts (64 MiB) and accelerators (256 MiB)."""


def measure_memory(
    torch: Any,  # Any: the torch module, or the facade of a recorded device
    device: Any,  # Any: a torch.device
    synchronize: Callable[[], None],
    budget: TimingBudget,
    *,
    in_host_memory: bool,
) -> MeasuredRate:
    """Measure the bytes per second that a large copy reads and writes together."""
    num_bytes = _HOST_BYTES if in_host_memory else _DEVICE_BYTES
    source = torch.ones(num_bytes // 4, device=device)
    target = torch.zeros(num_bytes // 4, device=device)
    return measure_rate(lambda: target.copy_(source), synchronize, 2.0 * num_bytes, budget)


def measure_host_link(
    torch: Any,  # Any: see measure_memory
    device: Any,  # Any: see measure_memory
    synchronize: Callable[[], None],
    budget: TimingBudget,
) -> tuple[MeasuredRate, MeasuredRate]:
    """Measure copies from host to device, and from device to host.

    The host's buffer is page-locked where the backend can do that, as a data loader
    that cares would have it.
    """
    on_host = _host_buffer(torch)
    on_device = torch.zeros(_HOST_BYTES // 4, device=device)
    to_device = measure_rate(
        lambda: on_device.copy_(on_host, non_blocking=True),
        synchronize,
        float(_HOST_BYTES),
        budget,
    )
    to_host = measure_rate(
        lambda: on_host.copy_(on_device, non_blocking=True),
        synchronize,
        float(_HOST_BYTES),
        budget,
    )
    return to_device, to_host


def _host_buffer(torch: Any) -> Any:
    buffer = torch.ones(_HOST_BYTES // 4)
    try:
        return buffer.pin_memory()
    except RuntimeError as error:  # NotImplementedError is one
        logger.warning(
            "host memory can't be page-locked (%s); the copy rates are those of ordinary "
            "memory, which are lower",
            error,
        )
        return buffer
