"""Who holds and who adds up which elements: interval arithmetic on a flat tensor.

Each rack cuts a chunk among its hosts by their shares. The union of all racks' cuts
gives intervals that every rack has on exactly one host, whatever the racks' sizes; each
interval is then dealt out to the racks that add it up. Uneven racks, hosts that own
nothing and tensors smaller than the fleet need no case of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from geartrain.errors import ConfigError
from geartrain.planner.exchange.schedule import CommSchedule

_TWO_RACKS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Elements that travel together."""

    start: int
    stop: int
    owner_rack: int
    """Index of the rack whose holder adds the partial sums up.

    Two racks swap their partial sums whole, one message each way, and both add in rack
    order: nothing rests on the owner there, so an interval is not cut again.
    """
    holders: tuple[int, ...]
    """Per rack the member position of the host leader that holds the rack's sum."""

    @property
    def owner(self) -> int:
        """Member position of the holder in the owning rack."""
        return self.holders[self.owner_rack]

    @property
    def num_elements(self) -> int:
        """Length of the piece."""
        return self.stop - self.start


def chunk_bounds(
    num_elements: int, num_chunks: int, row_elements: int = 1
) -> tuple[tuple[int, int], ...]:
    """Cut a tensor into chunks of nearly equal length, at multiples of a row.

    Args:
        num_elements: Length of the flat tensor.
        num_chunks: Chunks wanted; fewer where there are fewer rows.
        row_elements: What a codec codes together; only the last chunk may end inside one.

    Returns:
        ``(start, stop)`` of each chunk, none of them empty; nothing for no elements.

    >>> chunk_bounds(10, 2, 4)
    ((0, 8), (8, 10))
    >>> chunk_bounds(2, 4), chunk_bounds(0, 4)
    (((0, 1), (1, 2)), ())
    """
    _check_counts(num_elements=num_elements, row_elements=row_elements)
    if num_chunks < 1:
        msg = f"num_chunks={num_chunks} must be >= 1"
        raise ConfigError(msg)
    num_rows = -(-num_elements // row_elements)
    parts = min(num_chunks, num_rows)
    cuts = (
        [
            min(-(-num_rows * i // parts) * row_elements, num_elements)
            for i in range(parts + 1)
        ]
        if parts
        else []
    )
    return tuple(pairwise(cuts))


def pieces(
    schedule: CommSchedule, start: int, stop: int, row_elements: int = 1
) -> tuple[Piece, ...]:
    """Cut one chunk into pieces, each with a holder in every rack and an owning rack.

    Args:
        schedule: Racks with their shares and their hosts' shares.
        start: First element of the chunk; rows are counted from here.
        stop: End of the chunk.
        row_elements: Pieces are whole rows, except that the last one may end inside one.

    Returns:
        Pieces in order that tile ``start..stop``; none is empty. A party whose share is
        0 holds or owns nothing, the others get their shares to within two rows.
    """
    _check_counts(num_elements=stop - start, row_elements=row_elements)
    num_rows = -(-(stop - start) // row_elements)
    cuts = [_cut(num_rows, rack.host_shares) for rack in schedule.racks]
    ends = sorted({end for rack_cuts in cuts for end in rack_cuts} | {0, num_rows})
    host_index = [0] * len(cuts)
    dealer = _Dealer([rack.share for rack in schedule.racks])
    found: list[Piece] = []
    for first, last in pairwise(ends):
        for index, rack_cuts in enumerate(cuts):
            while rack_cuts[host_index[index] + 1] <= first:
                host_index[index] += 1
        holders = tuple(
            rack.hosts[i][0] for rack, i in zip(schedule.racks, host_index, strict=True)
        )
        for owner, begin, end in dealer.deal(first, last):
            found.append(
                Piece(
                    start=start + begin * row_elements,
                    stop=min(start + end * row_elements, stop),
                    owner_rack=owner,
                    holders=holders,
                )
            )
    return tuple(found)


class _Dealer:
    """Deals rows out to racks by share and carries what rounding left over.

    Without the carry every interval would round the same way, and the same rack would
    own a row too much of each.
    """

    def __init__(self, shares: Sequence[float]) -> None:
        total = sum(shares)
        self._shares = [share / total for share in shares]
        self._owned = [0] * len(shares)
        self._dealt = 0

    def deal(self, first: int, last: int) -> list[tuple[int, int, int]]:
        """``(rack index, first row, end row)`` of the rows ``first..last``, in order."""
        num_rows = last - first
        self._dealt += num_rows
        due = [
            share * self._dealt - owned
            for share, owned in zip(self._shares, self._owned, strict=True)
        ]
        counts = [0] * len(due)
        if len(due) <= _TWO_RACKS:
            counts[_most_due(due, self._shares)] = num_rows
        else:
            counts = self._apportion(due, num_rows)
        dealt, begin = [], first
        for rack, count in enumerate(counts):
            self._owned[rack] += count
            if count:
                dealt.append((rack, begin, begin + count))
                begin += count
        return dealt

    def _apportion(self, due: Sequence[float], num_rows: int) -> list[int]:
        counts = [max(0, int(rows)) for rows in due]
        rest = num_rows - sum(counts)
        left = [rows - count for rows, count in zip(due, counts, strict=True)]
        for _ in range(abs(rest)):
            step = 1 if rest > 0 else -1
            able = [
                share if step > 0 else count
                for share, count in zip(self._shares, counts, strict=True)
            ]
            rack = _most_due([step * rows for rows in left], able)
            counts[rack] += step
            left[rack] -= step
        return counts


def _most_due(due: Sequence[float], able: Sequence[float]) -> int:
    """The first of those that are most due, among those that can take it."""
    return max((i for i, can in enumerate(able) if can > 0), key=lambda i: (due[i], -i))


def _cut(num_rows: int, shares: Sequence[float]) -> list[int]:
    """Boundaries of the hosts' rows, shape (num_hosts + 1,)."""
    sums = list(accumulate(shares))
    # Divided by the sum as it was added up, so that trailing zeros get exactly nothing.
    return [0, *(int(num_rows * part / sums[-1] + 0.5) for part in sums)]


def _check_counts(*, num_elements: int, row_elements: int) -> None:
    if num_elements < 0 or row_elements < 1:
        msg = (
            f"{num_elements} elements in rows of {row_elements}; expected >= 0 elements "
            "and rows of >= 1"
        )
        raise ConfigError(msg)
