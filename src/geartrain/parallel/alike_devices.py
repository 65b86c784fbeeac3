"""Devices that are alike are measured as one: their curves' noise averages out.

Two equal devices whose times differ by 3 % of noise would get shares 3 % apart, and the
difference is too small for the correction to bother.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Sequence

from geartrain.devices import DeviceProfile
from geartrain.planner import ComputeCurve, fit_curve

MOST_DIFFERENCE_FRACTION = 0.1
"""Alike devices that differ by more are not alike: one is hot, shared or throttled."""


def pool_alike(
    curves: Sequence[ComputeCurve], devices: Sequence[DeviceProfile]
) -> tuple[ComputeCurve, ...]:
    """Give devices of one make the mean of their curves, where those agree.

    Only arithmetic that IEEE 754 fixes is used: all ranks reach the same curves.

    Args:
        curves: Measured, in rank order.
        devices: Their devices, in rank order.

    Returns:
        Curves in rank order; those without alike devices as they were.
    """
    groups: dict[tuple[object, ...], list[int]] = {}
    for rank, device in enumerate(devices):
        groups.setdefault(_make_of(device), []).append(rank)
    pooled = list(curves)
    for ranks in groups.values():
        for rank, curve in zip(ranks, _pool([curves[r] for r in ranks]), strict=True):
            pooled[rank] = curve
    return tuple(pooled)


def _make_of(device: DeviceProfile) -> tuple[object, ...]:
    return (
        device.kind,
        device.vendor,
        device.name,
        device.core_fraction,
        device.memory_limit_bytes,
    )


def _pool(curves: list[ComputeCurve]) -> list[ComputeCurve]:
    sizes = sorted(set.intersection(*(set(c.micro_batch_sizes) for c in curves)))
    if len(curves) == 1 or not sizes or not _agree(curves, sizes):
        return curves
    seconds = [
        math.fsum(_seconds_at(curve, size) for curve in curves) / len(curves)
        for size in sizes
    ]
    largest = min(curve.max_micro_batch_size for curve in curves)
    return [
        dataclasses.replace(
            fit_curve(curve.device_id, sizes, seconds, largest),
            spread_fraction=curve.spread_fraction,
            memory=curve.memory,
            backward_fraction=curve.backward_fraction,
        )
        for curve in curves
    ]


def _agree(curves: list[ComputeCurve], sizes: list[int]) -> bool:
    """Whether each device's time over all sizes is near the median device's."""
    totals = [
        math.fsum(_seconds_at(curve, size) / size for size in sizes) for curve in curves
    ]
    middle = statistics.median(totals)
    return all(abs(total / middle - 1) <= MOST_DIFFERENCE_FRACTION for total in totals)


def _seconds_at(curve: ComputeCurve, size: int) -> float:
    return curve.seconds[curve.micro_batch_sizes.index(size)]
