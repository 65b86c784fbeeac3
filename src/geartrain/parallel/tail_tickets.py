"""The shared tail of a step: whoever is free takes the next samples.

The last samples of a global batch belong to nobody in advance. A rank that is done
with its own share looks at how many are left and takes some: two round trips to the
store. Takes shrink with what is left (guided self-scheduling, Polychronopoulos and
Kuck 1987), and a slow rank takes none that the others would be done with earlier, so
that all ranks finish close together.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from geartrain.collectives.lost_peers import lost_peers

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store


@dataclass(frozen=True, slots=True, kw_only=True)
class TailPace:
    """How fast this rank and the others that take part compute; alike on all ranks."""

    samples_per_s: float
    others_samples_per_s: float
    """Of all others together."""
    sample_s: float
    """One sample as a micro-batch of its own here."""
    least_sample_s: float
    """The same on the fastest rank, which may be this one."""

    @property
    def fraction(self) -> float:
        """This rank's part of the fleet's samples per second."""
        return self.samples_per_s / (self.samples_per_s + self.others_samples_per_s)

    def is_too_slow_for(self, num_left: int) -> bool:
        """Whether the others would be done with all that is left before one sample here.

        Never on the fastest rank: somebody has to compute the last sample.
        """
        if not self.others_samples_per_s:
            return False
        others_s = num_left / self.others_samples_per_s + self.least_sample_s
        return self.sample_s > others_s


@dataclass(slots=True)
class TailTickets:
    """Tickets of one step.

    Args:
        store: Shared by all ranks.
        step: Number of the step in this session. Not that of the run: a session that
            loads an earlier state would find tickets already taken.
        num_samples: Samples in this step's tail.
        pace: How fast this rank and the others compute.
        largest_take: Samples that fit in one micro-batch here.
    """

    store: Store
    step: int
    num_samples: int
    pace: TailPace
    largest_take: int
    _left: int = 0  # at last sight
    _is_done: bool = False

    def take(self) -> tuple[int, int] | None:
        """Take the next samples; None when none is left for this rank.

        Returns:
            (start, stop) within the tail.
        """
        if self.none_left():
            return None
        wanted = self.take_size(self._left)
        stop = self._add(wanted)
        start = stop - wanted
        if start >= self.num_samples:  # another rank was quicker
            self._is_done = True
            return None
        return start, min(stop, self.num_samples)

    def none_left(self) -> bool:
        """Whether this rank gets no more samples; once true, it stays so.

        It may then send its gradients: also where samples are left that others will
        compute sooner.
        """
        if not self._is_done:
            self._left = self.num_samples - self._add(0)
            self._is_done = self._left <= 0 or self.pace.is_too_slow_for(self._left)
        return self._is_done

    def take_size(self, left: int) -> int:
        """How many samples to ask for when that many are left."""
        # Its whole part, not half of it: ranks come nearly at once, and small
        # micro-batches cost more a sample.
        guided = math.ceil(left * self.pace.fraction)
        return max(1, min(guided, self.largest_take))

    def forget_old(self) -> None:
        """Remove the counter of two steps ago; one rank calls it, once a step."""
        if self.step >= 2:  # noqa: PLR2004 - two steps ago
            with lost_peers("tidying the shared tail"):
                self.store.delete_key(self._key(self.step - 2))

    def _add(self, num_samples: int) -> int:
        with lost_peers("taking samples of the shared tail"):
            return int(self.store.add(self._key(self.step), num_samples))

    def _key(self, step: int) -> str:
        return f"tail/{step}"
