"""How the processes of a host add up a piece in shared memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from geartrain.collectives.host_groups.slices import cut_slices
from geartrain.collectives.host_groups.sum_dtype import put_weighted, scale_

if TYPE_CHECKING:
    from collections.abc import Sequence

    from geartrain.collectives.host_groups.shared_segment import SharedSegment
    from geartrain.collectives.host_groups.slots import Lane

_NUM_STEPS = 3
"""Fill, add, take: as many pieces are under way at once."""


class Part:
    """A member's part of a piece on its way.

    Args:
        source: This member's part, shape (num_elements,), on any device.
        target: Where the sum goes; None where only others need it.
        weight: Of this member's part.
        dtype: In which the sum is taken.
    """

    __slots__ = ("dtype", "is_plain", "number", "source", "target", "weight")

    def __init__(
        self,
        source: torch.Tensor,
        target: torch.Tensor | None,
        weight: float,
        dtype: torch.dtype,
    ) -> None:
        self.source = source
        self.target = target
        self.weight = weight
        self.dtype = dtype
        self.number = 0
        # A plain part's own slice is added where it is, without a copy.
        self.is_plain = source.device.type == "cpu" and source.dtype == dtype

    @property
    def num_elements(self) -> int:
        """Length of the piece."""
        return self.source.numel()


class SlicedSum:
    """Each member adds its slice of every piece: for large messages.

    While one piece is copied in, the one before is added and the one before that is
    taken out, so that a member seldom waits for another.

    Args:
        segment: The processes.
        lane: Slots with a row a member and one for the sum.
        shares: What part of a piece each member adds, shape (num_members,).
    """

    def __init__(self, segment: SharedSegment, lane: Lane, shares: Sequence[float]) -> None:
        self._me = segment.index
        self._num = segment.num_members
        self._lane = lane
        self._shares = shares
        self._adders = [m for m, share in enumerate(shares) if share > 0]

    def run(self, parts: Sequence[Part]) -> None:
        """Add up pieces; returns when every target holds its sum.

        Raises:
            CommunicationError: If a member was lost or late.
        """
        for step in range(len(parts) + _NUM_STEPS - 1):
            if step < len(parts):
                self._fill(parts[step])
            if 0 <= step - 1 < len(parts):
                self._add(parts[step - 1])
            if 0 <= step - 2 < len(parts):
                self._take(parts[step - 2])

    def _slice(self, part: Part) -> tuple[int, int]:
        return cut_slices(part.num_elements, self._shares)[self._me]

    def _fill(self, part: Part) -> None:
        lane = self._lane
        part.number = lane.begin_piece()
        row = lane.row(part.number, self._me, part.dtype)
        num = part.num_elements
        lane.label(part.number, self._me, num, part.dtype)
        if part.is_plain:
            start, stop = self._slice(part)
            if start:
                put_weighted(row[:start], part.source[:start], part.weight)
            if stop < num:
                put_weighted(row[stop:num], part.source[stop:], part.weight)
        else:
            put_weighted(row[:num], part.source, part.weight)
        lane.say_filled()

    def _add(self, part: Part) -> None:
        start, stop = self._slice(part)
        self._check_all(part)
        if start < stop:
            rows = self._slices_in_order(part, start, stop)
            total = self._lane.row(part.number, self._num, part.dtype)[start:stop]
            torch.add(rows[0], rows[1], out=total)
            for row in rows[2:]:
                total.add_(row)
        self._lane.say_added()
        if part.target is None:
            self._lane.say_done()

    def _slices_in_order(self, part: Part, start: int, stop: int) -> list[torch.Tensor]:
        rows = [
            self._lane.row(part.number, member, part.dtype)[start:stop]
            for member in range(self._num)
        ]
        if part.is_plain:
            rows[self._me] = scale_(part.source[start:stop], part.weight)
        return rows

    def _check_all(self, part: Part) -> None:
        for member in range(self._num):
            if member != self._me:
                self._lane.wait_filled(part.number, member)
                self._lane.expect(
                    part.number, member, part.num_elements, part.dtype, member
                )

    def _take(self, part: Part) -> None:
        if part.target is None:
            return
        for member in self._adders:
            if member != self._me:
                self._lane.wait_added(part.number, member)
        total = self._lane.row(part.number, self._num, part.dtype)
        part.target.copy_(total[: part.num_elements])
        self._lane.say_done()


class WholeSum:
    """Each member that needs the sum adds all of it itself: for small messages.

    One meeting instead of two; the same bits, since the order is the same.

    Args:
        segment: The processes.
        lane: Slots with a row a member.
    """

    def __init__(self, segment: SharedSegment, lane: Lane) -> None:
        self._me = segment.index
        self._num = segment.num_members
        self._lane = lane

    def run(self, part: Part) -> None:
        """Add up one piece; returns when the target holds its sum.

        Raises:
            CommunicationError: If a member was lost or late.
        """
        lane, num = self._lane, part.num_elements
        part.number = lane.begin_piece()
        lane.label(part.number, self._me, num, part.dtype)
        own = lane.row(part.number, self._me, part.dtype)
        put_weighted(own[:num], part.source, part.weight)
        lane.say_filled()
        if part.target is not None:
            part_rows = self._rows(part)
            target = part.target
            total = target if _adds_in_place(target, part.dtype) else own.new_empty(num)
            torch.add(part_rows[0], part_rows[1], out=total)
            for row in part_rows[2:]:
                total.add_(row)
            if total is not target:
                target.copy_(total)
        lane.say_done()

    def _rows(self, part: Part) -> list[torch.Tensor]:
        rows = []
        for member in range(self._num):
            if member != self._me:
                self._lane.wait_filled(part.number, member)
                self._lane.expect(
                    part.number, member, part.num_elements, part.dtype, member
                )
            row = self._lane.row(part.number, member, part.dtype)
            rows.append(row[: part.num_elements])
        return rows


def _adds_in_place(target: torch.Tensor, dtype: torch.dtype) -> bool:
    return target.device.type == "cpu" and target.dtype == dtype
