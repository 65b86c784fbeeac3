"""Cut a share into micro-batches."""

from __future__ import annotations

from itertools import pairwise


def split_share(num_samples: int, micro_batch_size: int) -> list[tuple[int, int]]:
    """Cut into micro-batches of a fixed size; the last one may be smaller.

    Returns:
        (start, stop) of each, none for an empty share.

    >>> split_share(7, 3)
    [(0, 3), (3, 6), (6, 7)]
    """
    size = max(micro_batch_size, 1)
    return [
        (start, min(start + size, num_samples)) for start in range(0, num_samples, size)
    ]


def split_evenly(num_samples: int, num_micro_batches: int) -> list[tuple[int, int]]:
    """Cut into a fixed number of micro-batches, sizes differing by at most one.

    Empty ones stand for ghosts: all ranks run the same number (see batchnorm).

    >>> split_evenly(5, 2)
    [(0, 3), (3, 5)]
    >>> split_evenly(1, 2)
    [(0, 1), (1, 1)]
    """
    base, extra = divmod(num_samples, num_micro_batches)
    bounds = [0]
    for index in range(num_micro_batches):
        bounds.append(bounds[-1] + base + (index < extra))
    return list(pairwise(bounds))
