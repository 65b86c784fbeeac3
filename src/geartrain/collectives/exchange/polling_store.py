"""A store that Gloo can wait on while others use the same client, and that can be ended.

A client of torch's TCPStore answers one thread at a time, so that a group under
construction, waiting for a member that is dead, would hold up everybody else, and can't
be told to give up. One client for each group is no way out: every connection asks the
name service, and where that is slow it takes seconds (5.0 s for each 25th, measured with
torch 2.13). So Gloo gets a store whose waits are short questions.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from datetime import timedelta

from torch._C._distributed_c10d import Store

from geartrain.errors import CommunicationError

_FIRST_PAUSE_S = 0.0005
_LONGEST_PAUSE_S = 0.02
_GROWTH = 1.3


class PollingStore(Store):
    """Keys under a prefix of a shared store, each call short.

    Args:
        inner: The shared store.
        epoch: Keys lie under ``epoch/<n>/``; a key ``abort/<n>`` ends all waits.
        ended: When set, all waits end too.
        timeout_s: Deadline of a wait that names none.
        within: A further part of the prefix.
    """

    def __init__(
        self,
        inner: Store,
        epoch: int,
        ended: threading.Event,
        timeout_s: float,
        within: str = "",
    ) -> None:
        super().__init__()
        self._inner = inner
        self._prefix = f"epoch/{epoch}/{within}"
        self._abort_key = f"abort/{epoch}"
        self._ended = ended
        self._timeout_s = timeout_s

    def set(self, key: str, value: str) -> None:
        """Set a key."""
        self._inner.set(self._prefix + key, value)

    def add(self, key: str, value: int) -> int:
        """Add to a counter."""
        return self._inner.add(self._prefix + key, value)

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all keys are there."""
        return self._inner.check([self._prefix + key for key in keys])

    def get(self, key: str) -> bytes:
        """The value of a key, once it is there."""
        self.wait([key])
        return self._inner.get(self._prefix + key)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys are there.

        Raises:
            CommunicationError: After the timeout, or when the epoch ended.
        """
        self.wait_at_most(keys, timeout.total_seconds() if timeout else self._timeout_s)

    def wait_at_most(self, keys: Sequence[str], limit_s: float) -> None:
        """As ``wait``, in seconds."""
        deadline_at_s = time.monotonic() + limit_s
        pause_s = _FIRST_PAUSE_S
        while not self.check(keys):
            if self._ended.wait(pause_s) or self._is_aborted(pause_s):
                msg = "the epoch ended while its members were connected"
                raise CommunicationError(msg)
            if time.monotonic() > deadline_at_s:
                msg = f"not all of {list(keys)} came within {limit_s:g} s"
                raise CommunicationError(msg)
            pause_s = min(_GROWTH * pause_s, _LONGEST_PAUSE_S)

    def _is_aborted(self, pause_s: float) -> bool:
        """Asked seldom: who is connected hears it sooner otherwise."""
        return pause_s == _LONGEST_PAUSE_S and self._inner.check([self._abort_key])
