"""Finds who gives a joiner the state, and gets it from there."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from geartrain.elastic.state_receiver import StateReceiver
from geartrain.errors import CommunicationError

if TYPE_CHECKING:
    from geartrain.elastic.client import Client
    from geartrain.elastic.greeting import Credentials
    from geartrain.elastic.messages import Heal, Transfer

_LOOK_S = 0.05

Tree = Mapping[str, Any]  # Any: what checkpoint.tree keeps


class StateSearch:
    """One joiner's.

    Args:
        member_id: Of this process's device.
        credentials: Of the run.
        client: Hears whom the coordinator names.
    """

    def __init__(self, member_id: str, credentials: Credentials, client: Client) -> None:
        self._member_id = member_id
        self._credentials = credentials
        self._client = client
        self._givers: tuple[str, ...] = ()  # addresses, the latest last
        self._receiver: StateReceiver | None = None
        self.is_asked_again = False
        """The coordinator wants this process to get a newer state."""

    def told(self, heal: Heal) -> None:
        """The coordinator names a giver; called by the control thread."""
        addresses = self._addresses(heal.transfers)
        if addresses:
            self._givers = addresses
            self.is_asked_again = self._receiver is not None

    def receive(self, limit_s: float) -> Tree:
        """Wait for the state of a giver.

        Raises:
            CommunicationError: If nobody gives it in time.
        """
        if self.is_asked_again:
            self.is_asked_again, self._receiver = False, None
        deadline_s = time.monotonic() + limit_s
        trouble = "the coordinator has named nobody to give it"
        while time.monotonic() < deadline_s:
            self._client.progress()
            try:
                if self._receiver is None:
                    self._receiver = self._ask()
                state = self._receiver.state(_LOOK_S) if self._receiver else None
            except CommunicationError as error:
                trouble, self._receiver, self._givers = str(error), None, ()
                continue
            if state is not None:
                return state
        msg = (
            f"{self._member_id} got no state within {limit_s:g} s: {trouble}; look at the "
            "other workers' logs"
        )
        raise CommunicationError(msg)

    def take_steps(self) -> Sequence[Tree]:
        """Steps that have come since the last call, in order."""
        return self._receiver.take_steps() if self._receiver is not None else ()

    def close(self) -> None:
        """Read no more."""
        if self._receiver is not None:
            self._receiver.close()

    def _ask(self) -> StateReceiver | None:
        """Turn to whom the coordinator has named last."""
        epoch = self._client.peek_epoch(0)
        if not self._givers and epoch is not None:
            self._givers = self._addresses(epoch.transfers)
        if not self._givers:
            self._client.wait_for_news(_LOOK_S)
            return None
        return StateReceiver(self._givers[-1], self._credentials)

    def _addresses(self, transfers: Sequence[Transfer]) -> tuple[str, ...]:
        return tuple(t.giver_address for t in transfers if t.receiver == self._member_id)
