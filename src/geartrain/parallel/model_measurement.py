"""Measure the user's own model on this rank's device: time and memory by size.

Repeats fill a window of many scheduler periods, since a device held to a part of a
core runs in bursts: a single short run is either all burst or all pause.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from geartrain.errors import DeviceError
from geartrain.planner import ComputeCurve, MemoryCurve
from geartrain.planner.curve_fit import fit_curve
from geartrain.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator

RunMicroBatch = Callable[[int], None]
"""Forward and backward of one micro-batch of that many samples, synchronised."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasurementSettings:
    """How long to measure."""

    min_points: int = 3
    window_s: float = 0.4
    """Repeats of one size fill at least this."""
    min_repeats: int = 3
    longest_run_s: float = 1.5
    """Beyond three points no size is tried whose single run would take longer."""
    saturation_gain: float = 0.03
    """Doubling the size must raise throughput by this much to go on."""
    hiding_s: float = 0.0
    """Sizes are tried until a micro-batch takes this long, for its backward then hides an
    exchange: that is worth more than throughput. The last one may take twice as long."""
    extrapolates: bool = False
    """Allow sizes beyond the measured ones, as far as memory does: with synchronized
    BatchNorm few large micro-batches are worth more than the last percent of speed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceMemory:
    """How this device's memory is read."""

    device_id: str
    limit_bytes: int
    fixed_bytes: int
    """Weights, gradients and optimizer state."""
    reset_peak: Callable[[], None] | None = None
    peak_bytes: Callable[[], int] | None = None
    """None where the device can't tell; then what autograd saves is counted."""


@dataclass(slots=True)
class _Points:
    sizes: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    spreads: list[float] = field(default_factory=list)
    peak_bytes: list[int] = field(default_factory=list)

    def is_saturated(self, gain: float) -> bool:
        """Whether two sizes in a row brought nothing: a single one may be noise."""
        rates = [size / s for size, s in zip(self.sizes, self.seconds, strict=True)]
        return len(rates) > 2 and max(rates[-2:]) < (1 + gain) * max(rates[:-2])  # noqa: PLR2004


def measure_curve(
    run: RunMicroBatch,
    memory: DeviceMemory,
    largest_size: int,
    settings: MeasurementSettings,
) -> ComputeCurve:
    """Measure forward + backward at rising micro-batch sizes.

    Args:
        run: Runs one micro-batch of a size.
        memory: Limit and counters of the device.
        largest_size: No size above this is of use.
        settings: How long to measure.

    Returns:
        The fitted curve, with the largest micro-batch that memory allows.

    Raises:
        DeviceError: If not even one sample fits in the device's memory.
    """
    points = _Points()
    too_large: int | None = None
    useful_size = largest_size
    for size in _doubling(largest_size):
        if _is_enough(points, size, settings):
            # Larger ones may be slower (they leave the caches), and nobody looked.
            useful_size = largest_size if settings.extrapolates else points.sizes[-1]
            if settings.hiding_s:  # a share in one piece rather than in two
                useful_size = min(largest_size, points.sizes[-1] * 3 // 2)
            break
        try:
            _measure_point(run, memory, size, points, settings)
        except torch.OutOfMemoryError as error:
            too_large = size
            if not points.sizes:
                raise _does_not_fit(memory, error) from error
        if too_large is not None:
            gc.collect()  # the failed run's tensors hang on the exception's frames
            break
    memory_curve = _fit_memory(points, memory)
    return fit_curve(
        memory.device_id,
        tuple(points.sizes),
        tuple(points.seconds),
        _largest_fitting(memory_curve, points, useful_size, too_large),
        spread_fraction=max(points.spreads),
        memory=memory_curve,
    )


def _doubling(largest_size: int) -> Iterator[int]:
    size = 1
    while size < largest_size:
        yield size
        size *= 2
    yield largest_size


def _is_enough(points: _Points, size: int, settings: MeasurementSettings) -> bool:
    if len(points.sizes) < settings.min_points:
        return False
    expected_s = points.seconds[-1] * size / points.sizes[-1]
    too_long = expected_s > max(settings.longest_run_s, 2 * settings.hiding_s)
    hides = points.seconds[-1] >= settings.hiding_s
    return too_long or (hides and points.is_saturated(settings.saturation_gain))


def _measure_point(
    run: RunMicroBatch,
    memory: DeviceMemory,
    size: int,
    points: _Points,
    settings: MeasurementSettings,
) -> None:
    peak_bytes = _run_counting(run, memory, size)  # also warms this size up
    times: list[float] = []
    while len(times) < settings.min_repeats or sum(times) < settings.window_s:
        started_at_s = time.perf_counter()
        run(size)
        times.append(time.perf_counter() - started_at_s)
        if len(times) > 1 and sum(times) > 2 * settings.longest_run_s:
            break
    blocks = _block_means(times, settings.min_repeats)
    points.sizes.append(size)
    points.seconds.append(sum(times) / len(times))
    points.spreads.append((max(blocks) - min(blocks)) / statistics.median(blocks))
    points.peak_bytes.append(peak_bytes)


def _block_means(times: list[float], num_blocks: int) -> list[float]:
    """Means of consecutive repeats: bursts of a throttled core average out."""
    length = max(1, len(times) // num_blocks)
    blocks = [times[i : i + length] for i in range(0, length * num_blocks, length)]
    return [sum(block) / len(block) for block in blocks if block]


def _run_counting(run: RunMicroBatch, memory: DeviceMemory, size: int) -> int:
    if memory.peak_bytes is not None and memory.reset_peak is not None:
        memory.reset_peak()
        run(size)
        return memory.peak_bytes()
    seen: dict[int, int] = {}

    def count(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        seen[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
        run(size)
    return memory.fixed_bytes + sum(seen.values())


def _fit_memory(points: _Points, memory: DeviceMemory) -> MemoryCurve:
    first, last = points.peak_bytes[0], points.peak_bytes[-1]
    span = points.sizes[-1] - points.sizes[0]
    slope = max(last - first, 0) / span if span else float(first)
    fixed = max(first - slope * points.sizes[0], 0.0)
    return MemoryCurve(
        fixed_bytes=round(fixed), bytes_per_sample=slope, limit_bytes=memory.limit_bytes
    )


def _largest_fitting(
    curve: MemoryCurve, points: _Points, largest_size: int, too_large: int | None
) -> int:
    """Trust the fit with 5 % to spare, but never contradict what was tried."""
    tried = points.sizes[-1]
    bound = largest_size if too_large is None else min(largest_size, too_large - 1)
    if curve.bytes_per_sample <= 0:
        return max(tried, bound)
    by_memory = int((0.95 * curve.limit_bytes - curve.fixed_bytes) / curve.bytes_per_sample)
    return max(tried, min(by_memory, bound))


def _does_not_fit(memory: DeviceMemory, error: torch.OutOfMemoryError) -> DeviceError:
    msg = (
        f"{memory.device_id} ran out of memory with a single sample "
        f"(limit {format_bytes(memory.limit_bytes)}): {error}; take the device out of "
        "--fleet, give it more memory, or make the model or its samples smaller"
    )
    return DeviceError(msg)
