"""How survivors agree, through the store, on who is left."""

from __future__ import annotations

import time
from collections.abc import Collection
from typing import TYPE_CHECKING

from geartrain.collectives.faults.bounded import within

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_PAUSE_S = 0.002
_GRACE_S = 5.0


def roll_call(
    store: Store,
    epoch: int,
    rank: int,
    deadline_s: float,
    expected: Collection[int] = (),
) -> tuple[int, ...]:
    """Agree on the members of an epoch.

    Everybody signs a list; the first to close it wins, and all take what it says.

    Args:
        store: Shared by all; nobody else waits for long on this client.
        epoch: Of which the members are wanted.
        rank: This process.
        deadline_s: Seconds after which this process closes the list at the latest.
        expected: Ranks on whose signatures it is closed at once; none: wait for the
            deadline.

    Returns:
        The members' ranks, rising; the same for everybody. Who came late is not
        in it and must not take part.

    Raises:
        CommunicationError: If the store is gone.
    """
    return within(
        deadline_s + _GRACE_S,
        lambda: _call(store, epoch, rank, deadline_s, frozenset(expected)),
        f"the store, at the roll call of epoch {epoch},",
    )


def _call(
    store: Store, epoch: int, rank: int, deadline_s: float, expected: frozenset[int]
) -> tuple[int, ...]:
    prefix = f"roll/{epoch}/"
    closes_at_s = time.monotonic() + deadline_s
    if not store.check([prefix + "closed"]):
        number = store.add(prefix + "count", 1)
        store.set(f"{prefix}signed/{number}", str(rank))
    present: set[int] = set()
    while not store.check([prefix + "closed"]):
        present |= _signed(store, prefix)
        if (expected and expected <= present) or time.monotonic() >= closes_at_s:
            listed = ",".join(map(str, sorted(present | {rank})))
            store.compare_set(prefix + "closed", "", listed)
            break
        time.sleep(_PAUSE_S)
    return tuple(int(part) for part in store.get(prefix + "closed").decode().split(","))


def _signed(store: Store, prefix: str) -> set[int]:
    """Ranks whose signature is there; who died between number and name is not."""
    keys = [f"{prefix}signed/{k + 1}" for k in range(store.add(prefix + "count", 0))]
    return {int(store.get(key)) for key in keys if store.check([key])}
