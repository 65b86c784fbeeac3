"""Time of a share on one device, over all ways to cut it into micro-batches."""

from __future__ import annotations

import math

import numpy as np

from geartrain.planner.curve_fit import (
    FloatArray,
    IntArray,
    largest_micro_batch_size,
    predict_many_s,
    predict_s,
)
from geartrain.planner.model_profile import ComputeCurve
from geartrain.planner.overlap import NO_EXCHANGE, Overlap

DENSE_SIZES = 128
"""Every micro-batch size up to this one is tried."""

SIZES_PER_OCTAVE = 16
"""Above DENSE_SIZES: a step of 4 %, where a neighbour differs by less than the noise."""

EVEN_CUTS = 16
"""Above DENSE_SIZES also the largest size cut into 1..EVEN_CUTS equal parts."""

TIE_FRACTION = 1e-9
"""Times nearer than this are equal; the larger micro-batch wins."""


def candidate_sizes(curve: ComputeCurve, limit: int) -> tuple[int, ...]:
    """Micro-batch sizes worth trying, rising; empty where not one sample fits.

    All sizes up to ``DENSE_SIZES``, then a geometric grid, the measured sizes and
    even cuts of the largest one. Up to ``DENSE_SIZES`` the choice is therefore exact.
    The set does not depend on the share, so that time rises with the share.
    """
    largest = min(limit, largest_micro_batch_size(curve))
    sizes = set(range(1, min(DENSE_SIZES, largest) + 1))
    if largest > DENSE_SIZES:
        octaves = math.log2(largest / DENSE_SIZES)
        sizes |= {
            round(DENSE_SIZES * 2.0 ** (step / SIZES_PER_OCTAVE))
            for step in range(math.ceil(octaves * SIZES_PER_OCTAVE))
        }
        sizes |= {math.ceil(largest / parts) for parts in range(1, EVEN_CUTS + 1)}
        sizes |= set(curve.micro_batch_sizes)
    return tuple(sorted(size for size in sizes if size <= largest))


def compute_table_s(
    curve: ComputeCurve, max_share: int, limit: int, overlap: Overlap = NO_EXCHANGE
) -> FloatArray:
    """Least time of each share 0..max_share, shape (num_shares,), never falling.

    A share n in micro-batches of b takes (n div b) * t(b) + t(n mod b), and what of an
    exchange the last one's backward does not hide; the least over ``candidate_sizes`` is
    taken. The table ends early at 0 where no sample fits.
    """
    sizes = candidate_sizes(curve, limit)
    if not sizes:
        return np.full(1, overlap.whole_s)
    largest = sizes[-1]
    time_s = predict_many_s(curve, np.arange(largest + 1))
    # Of a micro-batch that is the last one, so that the exchange hides behind it.
    last_s = time_s + overlap.exposed_many_s(curve.backward_fraction * time_s)
    shares: IntArray = np.arange(max_share + 1)
    least = np.full(max_share + 1, np.inf)
    whole = min(max_share, largest)
    least[: whole + 1] = last_s[: whole + 1]
    for size in sizes:
        if size > max_share:
            break
        rounds = np.maximum(shares - 1, 0) // size  # before the last one
        np.minimum(least, rounds * time_s[size] + last_s[shares - rounds * size], out=least)
    # Rounding may turn equal times into falling ones in the last bit.
    table: FloatArray = np.maximum.accumulate(least)
    return table


def choose_micro_batch_size(
    curve: ComputeCurve, share: int, limit: int, overlap: Overlap = NO_EXCHANGE
) -> int:
    """Micro-batch size of the least time for a share >= 1; ties go to the larger."""
    sizes, times_s = _times_by_size(curve, share, limit, overlap)
    near = times_s <= times_s.min() * (1 + TIE_FRACTION)
    return int(sizes[near].max())


def least_share_s(
    curve: ComputeCurve, share: int, limit: int, overlap: Overlap = NO_EXCHANGE
) -> float:
    """Least time of a share >= 1 over the micro-batch sizes worth trying."""
    return float(_times_by_size(curve, share, limit, overlap)[1].min())


def _times_by_size(
    curve: ComputeCurve, share: int, limit: int, overlap: Overlap
) -> tuple[IntArray, FloatArray]:
    """Micro-batch sizes for a share and its time with each, both (num_sizes,)."""
    sizes = np.array(candidate_sizes(curve, limit), dtype=np.int64)
    if share <= sizes[-1]:
        sizes = np.append(sizes[sizes < share], share)
    rounds = (share - 1) // sizes  # before the last one
    last_s = predict_many_s(curve, share - rounds * sizes)
    exposed_s = overlap.exposed_many_s(curve.backward_fraction * last_s)
    return sizes, rounds * predict_many_s(curve, sizes) + (last_s + exposed_s)


def last_micro_batch_s(
    curve: ComputeCurve, share: int, micro_batch_size: int, num_uniform: int = 0
) -> float:
    """Predicted time of the micro-batch that ends a share; arguments as ``share_s``."""
    if num_uniform:
        return predict_s(curve, max(1, -(-share // num_uniform)))
    if share == 0:
        return 0.0
    return predict_s(curve, (share - 1) % micro_batch_size + 1)


def share_s(
    curve: ComputeCurve, share: int, micro_batch_size: int, num_uniform: int = 0
) -> float:
    """Predicted time of a share cut in one given way.

    Args:
        curve: The device's curve.
        share: Samples.
        micro_batch_size: Size of all micro-batches but the last, which has the rest.
        num_uniform: With uniform micro-batches, their number on every device; each
            then counts as ceil(share / number) samples, for all devices meet in each,
            and as 1 where there is none: a device without samples runs a ghost.
    """
    if num_uniform:
        return num_uniform * predict_s(curve, max(1, -(-share // num_uniform)))
    if share == 0:
        return 0.0
    rounds, rest = divmod(share, micro_batch_size)
    return rounds * predict_s(curve, micro_batch_size) + predict_s(curve, rest)
