"""When all ranks copy their parts of the state into memory: pure, the same everywhere.

Parts make up a state only where all are of the same step. So each rank says in its figures
of a step what it can and would do, and each decides alike from what all have said.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass


class Wish(enum.IntEnum):
    """What a rank says in its figures of a step."""

    NONE = 0
    """It has no agent, or does not take part."""
    LATER = 1
    """It has a part, and can't or need not copy it now."""
    SOON = 2
    """All should be ready as soon as they can: a save waits, or the log is nearly full."""
    READY = 3
    """A buffer is in hand, and by its own costs a snapshot is due."""
    READY_SOON = 4
    """A buffer is in hand, and all should be ready as soon as they can."""


_READY = (Wish.READY, Wish.READY_SOON)
_HASTE = (Wish.SOON, Wish.READY_SOON)


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """What follows from the wishes of a step."""

    owners: tuple[int, ...]
    """Ranks that have an agent; the state is divided among them."""
    is_taken: bool
    """Whether the state after this step is copied."""
    is_hasty: bool
    """Whether all should be ready as soon as they can."""


def agree(wishes: Mapping[int, float], owners_before: tuple[int, ...]) -> Agreement:
    """Decide on a snapshot of the state after a step.

    Args:
        wishes: Of the ranks that take part in the step.
        owners_before: By the step before: buffers were made ready for a division among
            them, so nothing is copied in the step in which they change.

    >>> agree({0: 3.0, 1: 3.0, 2: 0.0}, (0, 1)).is_taken
    True
    >>> agree({0: 3.0, 1: 1.0, 2: 0.0}, (0, 1)).is_taken
    False
    """
    said = {rank: _read(wish) for rank, wish in sorted(wishes.items())}
    owners = tuple(rank for rank, wish in said.items() if wish is not Wish.NONE)
    return Agreement(
        owners=owners,
        is_taken=bool(owners)
        and owners == owners_before
        and all(said[rank] in _READY for rank in owners),
        is_hasty=any(said[rank] in _HASTE for rank in owners),
    )


def _read(wish: float) -> Wish:
    try:
        return Wish(int(wish))
    except ValueError:  # of a version that knows more
        return Wish.LATER
