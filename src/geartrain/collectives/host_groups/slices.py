"""Cutting chunks into pieces and pieces into slices. Never reaches torch."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from geartrain.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

SLICE_ELEMENTS = 32
"""Slices begin at multiples of this: 128 bytes of float32, two cache lines, so that two
processes never write the same line."""


def cut_pieces(start: int, stop: int, piece_elements: int) -> tuple[tuple[int, int], ...]:
    """Cut a range into about equal pieces of at most this many elements.

    An empty range is one empty piece, so that all members still meet for it.

    >>> cut_pieces(10, 20, 4)
    ((10, 14), (14, 18), (18, 20))
    >>> cut_pieces(5, 5, 4)
    ((5, 5),)
    """
    num_pieces = max(1, math.ceil((stop - start) / piece_elements))
    size = math.ceil((stop - start) / num_pieces)
    return tuple(
        (min(start + i * size, stop), min(start + (i + 1) * size, stop))
        for i in range(num_pieces)
    )


def cut_slices(num_elements: int, shares: Sequence[float]) -> tuple[tuple[int, int], ...]:
    """Give each member the part of a piece that it adds up.

    Args:
        num_elements: Of the piece.
        shares: Of each member, shape (num_members,); they sum to 1, 0 adds nothing.

    >>> cut_slices(256, [0.5, 0.0, 0.5])
    ((0, 128), (128, 128), (128, 256))
    """
    total = 0.0
    ends = [0]
    for share in shares[:-1]:
        total += share
        end = round(total * num_elements / SLICE_ELEMENTS) * SLICE_ELEMENTS
        ends.append(min(max(end, ends[-1]), num_elements))
    ends.append(num_elements)
    # Rounding leaves the last member a rest even where its share is 0.
    if shares[-1] == 0:
        last = max(index for index, share in enumerate(shares) if share > 0)
        ends[last + 1 :] = [num_elements] * (len(ends) - last - 1)
    return tuple((ends[i], ends[i + 1]) for i in range(len(shares)))


def normalised(shares: Sequence[float], num_members: int) -> tuple[float, ...]:
    """Scale shares so that they sum to 1.

    Raises:
        ConfigError: If one is negative or not finite, all are 0, or the number is wrong.

    >>> normalised([1.0, 3.0], 2)
    (0.25, 0.75)
    """
    total = sum(shares)
    bad = [share for share in shares if not (share >= 0 and math.isfinite(share))]
    if len(shares) != num_members or bad or total <= 0:
        msg = (
            f"slice shares {list(shares)} for {num_members} processes; expected one a "
            "process, each >= 0, not all 0. Give their speeds, or None for equal slices"
        )
        raise ConfigError(msg)
    return tuple(share / total for share in shares)
