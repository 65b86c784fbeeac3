"""The shared tail of a step: whoever is free takes the next samples.

The last samples of a global batch belong to nobody in advance. A rank that is done
with its own share takes a ticket: one atomic add on the store, one round trip. Takes
shrink with what is left (guided self-scheduling, Polychronopoulos and Kuck 1987), so
that all ranks finish close together.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from geartrain.collectives.lost_peers import lost_peers

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store


@dataclass(slots=True)
class TailTickets:
    """Tickets of one step.

    Args:
        store: Shared by all ranks.
        step: Number of the step in this session. Not that of the run: a session that
            loads an earlier state would find tickets already taken.
        num_samples: Samples in this step's tail.
        rate_fraction: This rank's part of the fleet's samples per second.
        largest_take: Samples that fit in one micro-batch here.
    """

    store: Store
    step: int
    num_samples: int
    rate_fraction: float
    largest_take: int
    _taken: int = 0

    def take(self) -> tuple[int, int] | None:
        """Take the next samples; None when none is left.

        Returns:
            (start, stop) within the tail.
        """
        left = self.num_samples - self._taken
        if left <= 0:
            return None
        wanted = self.take_size(left)
        with lost_peers("taking samples of the shared tail"):
            stop = int(self.store.add(self._key(self.step), wanted))
        self._taken = stop
        start = stop - wanted
        if start >= self.num_samples:
            return None
        return start, min(stop, self.num_samples)

    def take_size(self, left: int) -> int:
        """How many samples to ask for when that many were left at last sight."""
        guided = math.ceil(left * self.rate_fraction / 2)
        return max(1, min(guided, self.largest_take))

    def forget_old(self) -> None:
        """Remove the counter of two steps ago; one rank calls it, once a step."""
        if self.step >= 2:  # noqa: PLR2004 - two steps ago
            with lost_peers("tidying the shared tail"):
                self.store.delete_key(self._key(self.step - 2))

    def _key(self, step: int) -> str:
        return f"tail/{step}"
