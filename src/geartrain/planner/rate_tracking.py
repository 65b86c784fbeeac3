"""How long each device really takes, against its profile, robust to noise.

A device's ratio is observed / predicted compute for the work it really did, so it
means the same whatever the plan. Medians resist single outliers. Arithmetic is kept
to what IEEE 754 fixes to the last bit (no logarithms), for every rank runs this on
the same numbers and must decide the same.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

CHANGE_WINDOWS = (5, 8, 16)
"""Last ratios whose median is looked at: 3 slow ones in 5 steps already turn it."""

CONSECUTIVE = 3
"""So many of the last ratios must all lie beyond half the change: rare outliers meet
three times in five steps now and then, but hardly three times in a row."""

MAX_HISTORY = 128
MIN_REFERENCE = 5
"""Ratios needed before a device has a rate of its own instead of its profile's."""

MIN_NOISE_SAMPLES = 16
"""Ratios needed to estimate noise; a median deviation of fewer is often too small."""

PRIOR_NOISE = 0.1
"""Until there are enough; a 2x slow-down is seen through it."""

MIN_NOISE = 0.01

MEDIAN_DEVIATION = 0.6745
"""Median absolute deviation of a normal distribution with standard deviation 1."""

MEDIAN_COST = 1.2533
"""Standard error of a median over that of a mean (normal noise, large samples)."""

MIDDLE_COST = 1.1
"""The same for the mean of the middle half, which resists outliers nearly as well."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceRate:
    """What is known of one device's ratio."""

    device_id: str
    ratios: tuple[float, ...] = ()
    """Since its last change, the latest last, at most ``MAX_HISTORY``."""
    factor: float = 1.0
    """The ratio it is believed to have."""
    num_behind_factor: int = 0
    """Ratios that the factor was taken from; 0 where it is the profile's word."""
    noise_fraction: float = PRIOR_NOISE
    """Standard deviation of a single ratio, relative."""

    @property
    def uncertainty(self) -> float:
        """Standard error of the factor, relative; infinite before it is measured."""
        if self.num_behind_factor == 0:
            return math.inf
        return MIDDLE_COST * self.noise_fraction / math.sqrt(self.num_behind_factor)


def add_ratio(rate: DeviceRate, ratio: float) -> DeviceRate:
    """Remember one more ratio."""
    return replace(rate, ratios=(*rate.ratios, ratio)[-MAX_HISTORY:])


def find_change(rate: DeviceRate, threshold: float, num_sigmas: float) -> DeviceRate | None:
    """The device with its new factor, if its rate changed by more than a threshold.

    Args:
        rate: The device.
        threshold: Relative change of interest; a fall is compared as its inverse,
            so that slowing and recovering count alike.
        num_sigmas: How many standard errors a change must also exceed.

    Returns:
        The device with only the ratios that turned the median: what came before
        says nothing any more. None without a change.
    """
    if rate.num_behind_factor == 0:
        return None
    for window in CHANGE_WINDOWS:
        if len(rate.ratios) < window:
            return None
        change = statistics.median(rate.ratios[-window:]) / rate.factor
        error = MEDIAN_COST * rate.noise_fraction / math.sqrt(window)
        margin = num_sigmas * math.sqrt(error * error + rate.uncertainty**2)
        is_large = max(change, 1 / change) > 1 + max(threshold, margin)
        if is_large and _is_lasting(rate, (1 + change) / 2):
            kept = rate.ratios[-(window // 2 + 1) :]
            factor = _middle_mean(kept)
            return replace(rate, ratios=kept, factor=factor, num_behind_factor=len(kept))
    return None


def _is_lasting(rate: DeviceRate, half_change: float) -> bool:
    recent = [ratio / rate.factor for ratio in rate.ratios[-CONSECUTIVE:]]
    return min(recent) > half_change if half_change > 1 else max(recent) < half_change


def refresh(rate: DeviceRate) -> DeviceRate:
    """Bring factor and noise up to date with all ratios since the last change."""
    num_ratios = len(rate.ratios)
    if num_ratios < MIN_REFERENCE or num_ratios < rate.num_behind_factor:
        return rate
    factor = _middle_mean(rate.ratios)
    noise = rate.noise_fraction
    if num_ratios >= MIN_NOISE_SAMPLES:
        # An estimate from few is often too small by its own error, 1 / sqrt(n).
        caution = 1 + 1 / math.sqrt(num_ratios)
        noise = max(MIN_NOISE, caution * _noise_of(rate.ratios, factor))
    return replace(rate, factor=factor, num_behind_factor=num_ratios, noise_fraction=noise)


def _middle_mean(ratios: Sequence[float]) -> float:
    """Mean without the lowest and the highest quarter; the median of a few."""
    cut = -(-len(ratios) // 4)
    middle = sorted(ratios)[cut : len(ratios) - cut] or (statistics.median(ratios),)
    return math.fsum(middle) / len(middle)


def _noise_of(ratios: Sequence[float], factor: float) -> float:
    deviations = [abs(ratio / factor - 1) for ratio in ratios]
    return statistics.median(deviations) / MEDIAN_DEVIATION
