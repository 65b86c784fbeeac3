"""One event being worked on: the state so far, and the actions that come of it."""

from __future__ import annotations

from typing import Any, TypedDict

from msgspec.structs import replace

from geartrain.elastic.events import Action, Close, Note, Record, Send
from geartrain.elastic.messages import Commit, CoordinatorMessage
from geartrain.elastic.records import JournalRecord, apply
from geartrain.elastic.state import Peer, State


class OfState(TypedDict):
    """What all messages carry."""

    epoch: int
    step: int
    lineage: str


class Turn:
    """Collects what an event leads to; begins with a state and ends with another.

    Args:
        state: Before the event.
        now_s: Of the coordinator's clock, monotonic.
    """

    __slots__ = ("actions", "now_s", "state")

    def __init__(self, state: State, now_s: float) -> None:
        self.state = state
        self.now_s = now_s
        self.actions: list[Action] = []

    def set(self, **changes: Any) -> None:  # Any: fields of State
        """Change fields of the state."""
        self.state = replace(self.state, **changes)

    def set_peer(self, peer: Peer, **changes: Any) -> Peer:  # Any: fields of Peer
        """Change a peer, or add one."""
        changed = replace(peer, **changes) if changes else peer
        self.set(peers={**self.state.peers, peer.member_id: changed})
        return changed

    def record(self, record: JournalRecord) -> None:
        """Add to the journal, and to what it adds up to."""
        self.set(facts=apply(self.state.facts, record))
        self.actions.append(Record(record=record))

    def send(self, peer: Peer, message: CoordinatorMessage) -> None:
        """Send to a member."""
        self.actions.append(Send(connection=peer.connection, message=message))

    def unsend_commit(self, peer: Peer) -> None:
        """Do not tell a member of the last commit: what it is sent instead names it."""
        facts = self.state.facts

        def is_it(action: Action) -> bool:
            return (
                isinstance(action, Send)
                and isinstance(action.message, Commit)
                and action.connection == peer.connection
                and (action.message.step, action.message.lineage)
                == (facts.step, facts.lineage)
            )

        self.actions = [action for action in self.actions if not is_it(action)]

    def close(self, connection: int) -> None:
        """Close a connection."""
        self.actions.append(Close(connection=connection))

    def note(self, kind: str, text: str, member_id: str = "") -> None:
        """Tell people."""
        self.actions.append(Note(kind=kind, text=text, member_id=member_id))

    def where(self) -> OfState:
        """Where the fleet is."""
        facts = self.state.facts
        return OfState(epoch=facts.epoch, step=facts.step, lineage=facts.lineage)
