"""All measurements of one device."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from geartrain.devices.adapter import Progress
from geartrain.devices.probes.bandwidth import measure_host_link, measure_memory
from geartrain.devices.probes.matmul import DTYPES, measure_matmul
from geartrain.devices.probes.timing import TimingBudget
from geartrain.devices.profile import MeasuredRate

logger = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredRates:
    """What the probes found; empty or None where nothing could be measured."""

    flop_per_s: dict[str, MeasuredRate]
    memory_bytes_per_s: MeasuredRate | None
    host_to_device_bytes_per_s: MeasuredRate | None
    device_to_host_bytes_per_s: MeasuredRate | None


def measure_rates(  # noqa: PLR0913 - a measurement's whole setting
    torch: Any,  # Any: the torch module, or the facade of a recorded device
    device: Any,  # Any: a torch.device
    synchronize: Callable[[], None],
    budget: TimingBudget,
    *,
    in_host_memory: bool,
    max_size: int,
    on_progress: Progress | None = None,
) -> MeasuredRates:
    """Measure a device: products in each dtype, memory, and the way to the host.

    Args:
        torch: The torch module.
        device: The device's torch name.
        synchronize: Waits for the device.
        budget: Time a case may take.
        in_host_memory: The device works in host memory, so there is no way to it.
        max_size: Largest matrix, rows and columns.
        on_progress: Told what is being measured.
    """
    tell = on_progress or (lambda _: None)
    flop_per_s = {}
    for name in DTYPES:
        tell(f"matmul {name}")
        rate = measure_matmul(torch, device, name, synchronize, budget, max_size)
        if rate is not None:
            flop_per_s[name] = rate
    tell("memory")
    memory = _attempt(
        lambda: measure_memory(
            torch, device, synchronize, budget, in_host_memory=in_host_memory
        ),
        "memory bandwidth",
    )
    to_device = to_host = None
    if not in_host_memory:
        tell("host link")
        link = _attempt(
            lambda: measure_host_link(torch, device, synchronize, budget), "host link"
        )
        to_device, to_host = link or (None, None)
    return MeasuredRates(
        flop_per_s=flop_per_s,
        memory_bytes_per_s=memory,
        host_to_device_bytes_per_s=to_device,
        device_to_host_bytes_per_s=to_host,
    )


def _attempt(measure: Callable[[], T], what: str) -> T | None:
    try:
        return measure()
    except Exception as error:  # noqa: BLE001 - each backend fails in its own way
        logger.warning("%s could not be measured: %s", what, error)
        return None
