"""Small facts among ranks through a torch Store: JSON, deadlines, no pickle."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, TypeVar

from geartrain.errors import CommunicationError
from geartrain.telemetry import decode_document, encode_document

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch._C._distributed_c10d import Store

T = TypeVar("T")

_FIND_MISSING_S = 2.0
_FIRST_PAUSE_S = 0.001
_LONGEST_PAUSE_S = 0.02


@dataclass(slots=True)
class Rendezvous:
    """Exchanges documents among all ranks.

    Args:
        store: Shared by all ranks; None for a single one.
        rank: This process.
        world_size: All processes.
        timeout_s: Deadline of each wait.
        member_ids: What to call the ranks in an error.
    """

    store: Store | None
    rank: int
    world_size: int
    timeout_s: float
    member_ids: Sequence[str]
    interruption: Callable[[], str | None] | None = None
    """Why a wait is in vain, since a member was lost; None while it is not."""
    _round: int = 0

    def gather(
        self, topic: str, document: T, kind: type[T], *, timeout_s: float | None = None
    ) -> list[T]:
        """Collect one document from each rank, in rank order.

        All ranks must call it in the same order.

        Args:
            topic: Names it in an error.
            document: This rank's.
            kind: Of all documents.
            timeout_s: Another deadline than usual.

        Raises:
            CommunicationError: If a rank does not answer in time; names it.
        """
        if self.store is None:
            return [document]
        self._round += 1
        keys = [f"gather/{self._round}/{topic}/{r}" for r in range(self.world_size)]
        self.store.set(keys[self.rank], encode_document(document).decode())
        limit_s = self.timeout_s if timeout_s is None else timeout_s
        deadline_at_s = time.monotonic() + limit_s
        return [
            decode_document(
                self._get(keys[r], r, topic, deadline_at_s, limit_s), kind, f"rank {r}"
            )
            for r in range(self.world_size)
        ]

    def broadcast(self, topic: str, document: T, kind: type[T], source: int = 0) -> T:
        """Hand one rank's document to all; what the others pass is not looked at.

        All ranks must call it in the same order.

        Args:
            topic: Names it in an error.
            document: The source's.
            kind: Of the document.
            source: Whose it is.

        Raises:
            CommunicationError: If the source does not answer in time.
        """
        if self.store is None:
            return document
        self._round += 1
        key = f"broadcast/{self._round}/{topic}"
        if self.rank == source:
            self.store.set(key, encode_document(document).decode())
            return document
        deadline_at_s = time.monotonic() + self.timeout_s
        found = self._get(key, source, topic, deadline_at_s, self.timeout_s)
        return decode_document(found, kind, self.member_ids[source])

    def find_missing(self, topic: str) -> list[str]:
        """After a failed exchange: who does not say that it failed for them too."""
        if self.store is None:
            return []
        keys = [f"missing/{topic}/{r}" for r in range(self.world_size)]
        try:
            self.store.set(keys[self.rank], "1")
            deadline_at_s = time.monotonic() + _FIND_MISSING_S
            while time.monotonic() < deadline_at_s and not self.store.check(keys):
                time.sleep(0.05)
            return [
                self.member_ids[r]
                for r, key in enumerate(keys)
                if not self.store.check([key])
            ]
        except (RuntimeError, ConnectionError):
            return []  # the store is gone as well: its owner was the one lost

    def _get(
        self, key: str, rank: int, topic: str, deadline_at_s: float, limit_s: float
    ) -> bytes:
        assert self.store is not None
        try:
            # What was answered before the loss still counts, on every rank.
            if not self._is_there(key, deadline_at_s) and not self.store.check([key]):
                reason = self.interruption() if self.interruption is not None else ""
                msg = f"the {topic} of all ranks will not come together: {reason}"
                raise CommunicationError(msg)
            return bytes(self.store.get(key))
        except (RuntimeError, ConnectionError) as error:
            msg = (
                f"waited {limit_s:g} s for the {topic} of {self.member_ids[rank]} "
                f"(rank {rank}), which did not come; look at that worker's log"
            )
            raise CommunicationError(msg) from error

    def _is_there(self, key: str, deadline_at_s: float) -> bool:
        """Wait for a key; False as soon as the wait is in vain.

        Raises:
            RuntimeError: After the deadline, or if the store is gone.
        """
        assert self.store is not None
        left_s = max(deadline_at_s - time.monotonic(), 0.001)
        if self.interruption is None:
            self.store.wait([key], timedelta(seconds=left_s))
            return True
        # Asked again and again, since torch prints a warning whenever a wait times out.
        pause_s = _FIRST_PAUSE_S
        while time.monotonic() < deadline_at_s:
            if self.store.check([key]):
                return True
            if self.interruption() is not None:
                return False
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        msg = f"{key} was not set in time"
        raise RuntimeError(msg)
