"""Cut a global batch into one slice a device, and a tail that nobody owns yet."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from itertools import accumulate, pairwise

from geartrain.data.split import apportion
from geartrain.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class ShareView:
    """The shares in force for the next step, as seen by one rank."""

    shares: tuple[int, ...]
    """Samples of a full global batch, in rank order; 0 for a rank left out."""
    rank: int
    tail_samples: int = 0
    """Samples at the end of the batch that are handed out during the step."""

    def __post_init__(self) -> None:
        if not 0 <= self.rank < len(self.shares):
            msg = f"rank={self.rank} has no share among {self.shares}; expected one a rank"
            raise ConfigError(msg)
        if min(self.shares) < 0 or self.tail_samples < 0 or not self.num_samples:
            msg = (
                f"shares={self.shares} and tail_samples={self.tail_samples} must be >= 0 "
                "and must not all be 0; plan again"
            )
            raise ConfigError(msg)

    @property
    def num_samples(self) -> int:
        """Samples of the full global batch that these shares were made for."""
        return sum(self.shares) + self.tail_samples


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSlices:
    """Positions within one global batch, as half-open intervals."""

    own: tuple[tuple[int, int], ...]
    """(start, stop) of each rank, in rank order."""
    tail: tuple[int, int]


def slice_by_shares(
    count: int, shares: tuple[int, ...], tail_samples: int = 0
) -> BatchSlices:
    """Give each rank a contiguous slice of a global batch.

    Where the batch is not of the size that the shares add up to (the last one of an
    epoch, or an evaluation), shares and tail are scaled by largest remainder.

    Args:
        count: Samples in this global batch.
        shares: Samples of a full batch per rank, shape (num_ranks,).
        tail_samples: Samples of a full batch that belong to nobody in advance.

    Returns:
        Slices that cover 0..count-1 once, the tail last.

    Raises:
        ConfigError: If all shares are 0, or one is negative.

    >>> slice_by_shares(8, (5, 1), tail_samples=2)
    BatchSlices(own=((0, 5), (5, 6)), tail=(6, 8))
    >>> slice_by_shares(4, (5, 1), tail_samples=2)
    BatchSlices(own=((0, 3), (3, 3)), tail=(3, 4))
    """
    parts = apportion(count, (*shares, tail_samples))
    *own, tail = pairwise(accumulate(parts, initial=0))
    return BatchSlices(own=tuple(own), tail=tail)


def positions_without(
    count: int, view: ShareView, ranks: Collection[int]
) -> tuple[int, ...]:
    """Positions of a global batch that do not belong to some ranks.

    Args:
        count: Samples of the global batch.
        view: The shares that it was cut by; its tail belongs to nobody.
        ranks: Whose slices are left out.

    >>> positions_without(6, ShareView(shares=(3, 1, 2), rank=0), [1])
    (0, 1, 2, 4, 5)
    """
    own = slice_by_shares(count, view.shares, view.tail_samples).own
    gone = {p for rank in ranks for p in range(*own[rank])}
    return tuple(p for p in range(count) if p not in gone)


@dataclass(frozen=True, slots=True, kw_only=True)
class CurrentBatch:
    """One step's global batch and this rank's part of it."""

    epoch: int
    step_in_epoch: int
    global_count: int
    """Samples of the global batch, over all ranks."""
    start: int
    stop: int
    """This rank's positions within the global batch: start..stop-1."""
    tail_start: int
    tail_stop: int
    """Positions that belong to nobody in advance."""
    sample_indices: tuple[int, ...]
    """Dataset index of each position of the global batch, shape (global_count,)."""

    @property
    def own_count(self) -> int:
        """Samples of this rank, without the tail."""
        return self.stop - self.start


def locate_batch(
    epoch: int, step_in_epoch: int, sample_indices: tuple[int, ...], view: ShareView
) -> CurrentBatch:
    """Find one rank's part of a global batch.

    Args:
        epoch: The epoch, from 0.
        step_in_epoch: Position of the batch in the epoch.
        sample_indices: Dataset indices of the global batch, shape (global_count,).
        view: The shares in force.
    """
    slices = slice_by_shares(len(sample_indices), view.shares, view.tail_samples)
    start, stop = slices.own[view.rank]
    return CurrentBatch(
        epoch=epoch,
        step_in_epoch=step_in_epoch,
        global_count=len(sample_indices),
        start=start,
        stop=stop,
        tail_start=slices.tail[0],
        tail_stop=slices.tail[1],
        sample_indices=sample_indices,
    )
