"""How large gradient buckets should be, given what an exchange takes."""

from __future__ import annotations

from collections.abc import Callable

from geartrain.errors import ConfigError

_PARTS = 8
"""Exchanges of an eighth of backward each: the last one, which nothing hides, is short,
and there are few enough that each one's start-up cost is small."""
_LATENCIES = 8
"""A bucket moves at least as many bytes as pass in 8 latencies: at most 12 % go to
start-up."""
_TINY_BYTES = 4 * 2**10
_SMALLEST_BYTES = 256 * 2**10


def choose_bucket_bytes(
    backward_s: float, predict_s: Callable[[int], float], gradient_bytes: int
) -> int:
    """Size buckets so that their exchange hides behind backward.

    Args:
        backward_s: Of one micro-batch.
        predict_s: Predicted seconds of one all-reduce of that many bytes.
        gradient_bytes: All gradients of the model.

    Returns:
        Largest size of a bucket: about ``backward_s / 8`` of exchange, at least 8
        latencies' worth and 256 KiB, at most all gradients.

    Raises:
        ConfigError: If there is no gradient or ``backward_s`` is negative.

    >>> choose_bucket_bytes(0.8, lambda num_bytes: num_bytes / 100e6, 100_000_000)
    9961472
    """
    if gradient_bytes < 1 or not backward_s >= 0.0:
        msg = (
            f"gradient_bytes={gradient_bytes} must be > 0 and backward_s={backward_s} "
            ">= 0; measure backward again"
        )
        raise ConfigError(msg)
    latency_s = predict_s(_TINY_BYTES)
    whole_s = predict_s(gradient_bytes)
    target_s = max(backward_s / _PARTS, min(_LATENCIES * latency_s, whole_s))
    smallest = min(_SMALLEST_BYTES, gradient_bytes)
    size = _largest_within(target_s, predict_s, smallest, gradient_bytes)
    return size if size == gradient_bytes else max(smallest, size - size % smallest)


def _largest_within(
    target_s: float, predict_s: Callable[[int], float], low: int, high: int
) -> int:
    """The largest size whose exchange takes at most ``target_s``, else ``low``."""
    if predict_s(high) <= target_s:
        return high
    while high - low > 1:
        middle = (low + high) // 2
        if predict_s(middle) <= target_s:
            low = middle
        else:
            high = middle
    return low
