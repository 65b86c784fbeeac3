"""Gets the state from a giver, and the steps after it, while this process prepares."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from geartrain.checkpoint.tree_file import tree_from_bytes
from geartrain.elastic.greeting import Credentials
from geartrain.elastic.state_wire import connect_giver, receive_tree
from geartrain.errors import CommunicationError, GeartrainError

logger = logging.getLogger(__name__)

Tree = Mapping[str, Any]  # Any: what checkpoint.tree keeps


class StateReceiver:
    """One giver's state and steps; a daemon thread reads them as they come.

    Args:
        address: Of the giver.
        credentials: Of the run.
    """

    def __init__(self, address: str, credentials: Credentials) -> None:
        self._address = address
        self._credentials = credentials
        self._changed = threading.Condition()
        self._state: Tree | None = None
        self._steps: deque[Tree] = deque()
        self._failure: str | None = None
        self._is_closed = False
        threading.Thread(target=self._read, name="state", daemon=True).start()

    @property
    def failure(self) -> str | None:
        """Why nothing more comes; None while it may."""
        return self._failure

    def state(self, limit_s: float) -> Tree | None:
        """Wait for the state; None where it has not come by then.

        Raises:
            CommunicationError: If it will not come.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: self._state is not None or self._failure is not None, limit_s
            )
            if self._state is None and self._failure is not None:
                raise CommunicationError(self._failure)
            return self._state

    def take_steps(self) -> Sequence[Tree]:
        """Steps that have come since the last call, in order."""
        with self._changed:
            steps, self._steps = self._steps, deque()
        return list(steps)

    def close(self) -> None:
        """Read no more."""
        self._is_closed = True

    def _read(self) -> None:
        try:
            with connect_giver(self._address, self._credentials) as connected:
                while not self._is_closed:
                    block = receive_tree(connected, lambda: not self._is_closed)
                    self._take(tree_from_bytes(block))
        except (OSError, GeartrainError) as error:
            if not self._is_closed:
                logger.debug("no more from the giver at %s: %s", self._address, error)
            with self._changed:
                self._failure = f"the giver of the state is gone: {error}"
                self._changed.notify_all()

    def _take(self, tree: Tree) -> None:
        with self._changed:
            if self._state is None:
                self._state = tree
            else:
                self._steps.append(tree)
            self._changed.notify_all()
