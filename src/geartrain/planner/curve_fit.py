"""From measured times to a compute curve, and from a curve to predicted times.

Only additions, multiplications, divisions and square roots are used, which IEEE 754
fixes to the last bit: all ranks reach the same plan from the same profile.
"""

from __future__ import annotations

import bisect
import dataclasses
import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from geartrain.errors import ConfigError
from geartrain.planner.model_profile import ComputeCurve, MemoryCurve

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]


def fit_curve(  # noqa: PLR0913 - the curve's own fields, two by keyword
    device_id: str,
    sizes: Sequence[int],
    seconds: Sequence[float],
    max_micro_batch_size: int,
    *,
    spread_fraction: float = 0.0,
    memory: MemoryCurve | None = None,
) -> ComputeCurve:
    """Fit time = alpha + beta * micro-batch size, neither below 0.

    Args:
        device_id: The device that was measured.
        sizes: Micro-batch sizes in any order, shape (num_points,).
        seconds: Forward + backward time of each, shape (num_points,).
        max_micro_batch_size: Largest size that fits in its memory.
        spread_fraction: Largest (max - min) / median over the repeats of a point.
        memory: Its memory curve, where known.

    Returns:
        The curve, points in rising order of size.

    Raises:
        ConfigError: If the points are not valid, see ``ComputeCurve``.

    Source: least squares weighted by 1 / time, so that a relative error counts the
    same at every size; the non-negative solution (Lawson and Hanson) of two unknowns.

    >>> curve = fit_curve("cpu:0", [1, 2, 4], [0.3, 0.5, 0.9], 8)
    >>> round(curve.alpha_s, 6), round(curve.beta_s, 6)
    (0.1, 0.2)
    """
    if len(sizes) != len(seconds) or not sizes:
        msg = (
            f"{device_id}: {len(sizes)} micro-batch sizes and {len(seconds)} times; "
            "expected as many of each, at least one"
        )
        raise ConfigError(msg)
    points = sorted(zip(sizes, seconds, strict=True))
    curve = ComputeCurve(
        device_id=device_id,
        micro_batch_sizes=tuple(size for size, _ in points),
        seconds=tuple(time_s for _, time_s in points),
        max_micro_batch_size=max_micro_batch_size,
        spread_fraction=spread_fraction,
        memory=memory,
    )
    alpha_s, beta_s = _fit_line(curve.micro_batch_sizes, curve.seconds)
    return dataclasses.replace(curve, alpha_s=alpha_s, beta_s=beta_s)


def _fit_line(sizes: Sequence[int], seconds: Sequence[float]) -> tuple[float, float]:
    weights = [1.0 / time_s**2 for time_s in seconds]
    total = math.fsum(weights)
    mean_size = math.fsum(w * b for w, b in zip(weights, sizes, strict=True)) / total
    mean_s = math.fsum(w * t for w, t in zip(weights, seconds, strict=True)) / total
    points = list(zip(weights, sizes, seconds, strict=True))
    variance = math.fsum(w * (b - mean_size) ** 2 for w, b, _ in points)
    covariance = math.fsum(w * (b - mean_size) * (t - mean_s) for w, b, t in points)
    beta_s = covariance / variance if variance > 0 else 0.0
    alpha_s = mean_s - beta_s * mean_size
    if len(points) == 1 or alpha_s < 0:  # one point says nothing of a fixed part
        through_origin = math.fsum(w * b * t for w, b, t in points)
        return 0.0, through_origin / math.fsum(w * b * b for w, b, _ in points)
    return (mean_s, 0.0) if beta_s < 0 else (alpha_s, beta_s)


def predict_s(curve: ComputeCurve, micro_batch_size: int) -> float:
    """Predicted forward + backward time of one micro-batch; 0 for an empty one.

    Raises:
        ConfigError: If the size is negative.

    >>> predict_s(fit_curve("cpu:0", [1, 2, 4], [0.3, 0.5, 0.9], 8), 3)
    0.7
    """
    if micro_batch_size < 0:
        msg = f"{curve.device_id}: micro_batch_size={micro_batch_size} must be >= 0"
        raise ConfigError(msg)
    if micro_batch_size == 0:
        return 0.0
    # The same arithmetic as predict_many_s, to the last bit: tests compare them.
    sizes, seconds = curve.micro_batch_sizes, _pool_violators(curve.seconds)
    segment = bisect.bisect_right(sizes, micro_batch_size) - 1
    anchor = max(segment, 0)
    if segment == len(sizes) - 1:
        slope = curve.beta_s if curve.beta_s > 0 else seconds[-1] / sizes[-1]
    elif segment < 0:
        slope = min(curve.beta_s, seconds[0] / sizes[0])
    else:
        rise_s = seconds[segment + 1] - seconds[segment]
        slope = rise_s / (sizes[segment + 1] - sizes[segment])
    return seconds[anchor] + slope * (micro_batch_size - sizes[anchor])


def predict_many_s(curve: ComputeCurve, micro_batch_sizes: IntArray) -> FloatArray:
    """Predicted times of several micro-batch sizes >= 0, shape (num_sizes,).

    Never falls as the size rises: measured times that do are averaged (pool adjacent
    violators). Between the points the curve is linear. Beyond the last one it goes on
    with the fit's slope; where the fit has none (times flat within the noise), in
    proportion, for a size nobody measured must not look free.
    """
    sizes = np.array(curve.micro_batch_sizes, dtype=np.int64)
    seconds = np.array(_pool_violators(curve.seconds))
    beyond_s = curve.beta_s if curve.beta_s > 0 else seconds[-1] / sizes[-1]
    below_s = min(curve.beta_s, seconds[0] / sizes[0])
    slopes = np.diff(seconds) / np.diff(sizes)
    segment = np.searchsorted(sizes, micro_batch_sizes, side="right") - 1
    slope = np.concatenate(([below_s], slopes, [beyond_s]))[segment + 1]
    anchor = np.maximum(segment, 0)
    times = seconds[anchor] + slope * (micro_batch_sizes - sizes[anchor])
    result: FloatArray = np.where(micro_batch_sizes > 0, times, 0.0)
    return result


def _pool_violators(seconds: Sequence[float]) -> list[float]:
    """Nearest rising sequence, by pool adjacent violators (Ayer et al., 1955)."""
    pools: list[tuple[float, int]] = []
    for time_s in seconds:
        pools.append((time_s, 1))
        while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
            (left_s, left), (right_s, right) = pools[-2:]
            merged_s = (left_s * left + right_s * right) / (left + right)
            pools[-2:] = [(merged_s, left + right)]
    return [time_s for time_s, count in pools for _ in range(count)]


def samples_per_s(curve: ComputeCurve, micro_batch_size: int) -> float:
    """Predicted throughput with micro-batches of this size (>= 1)."""
    return micro_batch_size / predict_s(curve, micro_batch_size)


def best_samples_per_s(curve: ComputeCurve, limit: int | None = None) -> float:
    """Highest predicted throughput over all micro-batch sizes that fit in memory.

    Args:
        curve: The device's curve.
        limit: Largest size to consider, such as the global batch size.

    On a linear piece the throughput b / (alpha + beta * b) is monotone in b, so its
    maximum lies at a measured size or at an end of the range.
    """
    largest = max(1, largest_micro_batch_size(curve))
    if limit is not None:
        largest = max(1, min(largest, limit))
    sizes = {1, largest, *(b for b in curve.micro_batch_sizes if b <= largest)}
    return max(samples_per_s(curve, size) for size in sorted(sizes))


def largest_micro_batch_size(curve: ComputeCurve) -> int:
    """Largest micro-batch that fits in memory, by both statements; 0 if none does."""
    largest = curve.max_micro_batch_size
    memory = curve.memory
    if memory is None:
        return largest
    if memory.bytes_for(largest) <= memory.limit_bytes:
        return largest
    if memory.bytes_per_sample <= 0:
        return 0
    free = (memory.limit_bytes - memory.fixed_bytes) / memory.bytes_per_sample
    return max(0, min(largest, math.floor(free)))
