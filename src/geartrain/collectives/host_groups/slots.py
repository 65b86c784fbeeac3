"""Slots in shared memory through which one piece after the other passes.

A lane is a ring of slots. Piece number ``i`` of a lane goes through slot ``i % num_slots``
on every member; all members send the same pieces in the same order. Few slots that are
used again and again need no memory of the size of a gradient, and no new pages.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from geartrain.errors import CommunicationError

if TYPE_CHECKING:
    from geartrain.collectives.host_groups.shared_segment import SharedSegment

_LABEL = struct.Struct("=QQ")
_LABEL_BYTES = 64
"""Before each row, a cache line that says what is in it."""
_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)

COUNTERS_PER_LANE = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneLayout:
    """Where a lane lies in a segment."""

    offset_bytes: int
    first_counter: int
    """Its counters of each member: filled, added, done."""
    num_slots: int
    num_rows: int
    """Of each slot: one a member, and one for the sum where there is one."""
    piece_bytes: int
    """Largest piece; a multiple of 128."""

    @property
    def num_bytes(self) -> int:
        """Bytes that the lane takes."""
        return self.num_slots * self.num_rows * (_LABEL_BYTES + self.piece_bytes)


class Lane:
    """One process's side of a lane; used by one thread.

    Args:
        segment: The memory.
        layout: Where in it.
    """

    def __init__(self, segment: SharedSegment, layout: LaneLayout) -> None:
        self._segment = segment
        self._layout = layout
        self._all = torch.frombuffer(segment.memory, dtype=torch.uint8)
        self._rows: dict[tuple[int, int, torch.dtype], torch.Tensor] = {}
        self._next = 0
        first = layout.first_counter
        self._filled, self._added, self._done = first, first + 1, first + 2

    def piece_elements(self, dtype: torch.dtype) -> int:
        """How many elements of this dtype fit into a slot."""
        return self._layout.piece_bytes // dtype.itemsize

    def begin_piece(self) -> int:
        """Take the next piece number; waits until all have left that slot.

        Raises:
            CommunicationError: If a member was lost or late.
        """
        number = self.next_piece()
        before = number - self._layout.num_slots + 1
        for member in range(self._segment.num_members):
            if member != self._segment.index:
                self._segment.wait(member, self._done, before, "take earlier gradients")
        return number

    def next_piece(self) -> int:
        """Take the next piece number without waiting: for who only reads the slot."""
        number = self._next
        self._next = (number + 1) & (2**32 - 1)
        return number

    def row(self, number: int, row: int, dtype: torch.dtype) -> torch.Tensor:
        """A row of the piece's slot, shape (piece_elements,)."""
        slot = number % self._layout.num_slots
        key = (slot, row, dtype)
        found = self._rows.get(key)
        if found is None:
            start = self._row_offset(slot, row) + _LABEL_BYTES
            found = self._all[start : start + self._layout.piece_bytes].view(dtype)
            self._rows[key] = found
        return found

    def label(self, number: int, row: int, num_elements: int, dtype: torch.dtype) -> None:
        """Say what this member puts into a row."""
        slot = number % self._layout.num_slots
        _LABEL.pack_into(
            self._segment.memory,
            self._row_offset(slot, row),
            num_elements,
            _DTYPES.index(dtype),
        )

    def expect(
        self, number: int, row: int, num_elements: int, dtype: torch.dtype, member: int
    ) -> None:
        """Check what another member says that it put there.

        Raises:
            CommunicationError: If it exchanges something else.
        """
        slot = number % self._layout.num_slots
        found_elements, code = _LABEL.unpack_from(
            self._segment.memory, self._row_offset(slot, row)
        )
        if (found_elements, code) != (num_elements, _DTYPES.index(dtype)):
            found_dtype = _DTYPES[code] if code < len(_DTYPES) else code
            self._segment.abort()
            msg = (
                f"{self._segment.name(member)} exchanges {found_elements} elements of "
                f"{found_dtype} where {self._segment.name(self._segment.index)} has "
                f"{num_elements} of {dtype}; all must exchange the same tensors in the "
                "same order and the same chunks"
            )
            raise CommunicationError(msg)

    def say_filled(self) -> None:
        """This member's row is there."""
        self._say(self._filled)

    def say_added(self) -> None:
        """This member's slice of the sum is there."""
        self._say(self._added)

    def say_done(self) -> None:
        """This member has read what it wants of the slot."""
        self._say(self._done)

    def wait_filled(self, number: int, member: int) -> None:
        """Wait for a member's row."""
        self._segment.wait(member, self._filled, number + 1, "bring its gradients")

    def wait_added(self, number: int, member: int) -> None:
        """Wait for a member's slice of the sum."""
        self._segment.wait(member, self._added, number + 1, "add its slice of gradients")

    def _say(self, which: int) -> None:
        self._segment.words.add(self._segment.counter(self._segment.index, which))

    def _row_offset(self, slot: int, row: int) -> int:
        layout = self._layout
        index = slot * layout.num_rows + row
        return layout.offset_bytes + index * (_LABEL_BYTES + layout.piece_bytes)
