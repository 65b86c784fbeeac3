"""Split a number of samples by weights, in whole samples."""

from __future__ import annotations

from collections.abc import Sequence

from geartrain.errors import ConfigError


def apportion(count: int, weights: Sequence[int]) -> tuple[int, ...]:
    """Split samples in proportion to whole-number weights.

    Works on integers only, so that every rank finds the same split. A weight of 0
    gets nothing; weights that add up to ``count`` are returned as they are.

    Args:
        count: Samples to split.
        weights: One weight a taker, >= 0, shape (num_takers,).

    Returns:
        Samples per taker, in the same order; they add up to ``count``.

    Raises:
        ConfigError: If a weight is negative, or all are 0 while samples are left.

    Source: largest-remainder apportionment (Hamilton's method).

    >>> apportion(5, [6, 3, 0, 1])
    (3, 2, 0, 0)
    """
    total = sum(weights)
    if count < 0 or any(weight < 0 for weight in weights) or (count and not total):
        msg = (
            f"cannot split {count} samples by {tuple(weights)}: both must be >= 0 and "
            "some share must be > 0; plan again"
        )
        raise ConfigError(msg)
    if not count:
        return (0,) * len(weights)
    pairs = [divmod(count * weight, total) for weight in weights]
    parts = [quotient for quotient, _ in pairs]
    by_remainder = sorted(range(len(parts)), key=lambda i: -pairs[i][1])
    for i in by_remainder[: count - sum(parts)]:
        parts[i] += 1
    return tuple(parts)
