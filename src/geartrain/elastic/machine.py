"""The coordinator's decisions, as a function of what happened: no clock, socket or file.

``handle(state, event, now_s)`` gives the next state and what is to be done. The rooms of
the house are told apart by what they decide: :mod:`joining`, :mod:`voting`,
:mod:`detection`, :mod:`suspicion`, :mod:`losing`, :mod:`forming`, :mod:`operating`. Why it
decides so: docs/explanation/elastic.md.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from geartrain.elastic.detection import (
    find_lost,
    forgive_held_up,
    hear_beat,
    next_wake_at_s,
)
from geartrain.elastic.events import Action, Closed, Event, Received, Tick
from geartrain.elastic.forming import advance
from geartrain.elastic.joining import (
    find_eligible,
    hear_healed,
    hear_holds,
    hear_join,
    hear_not_restored,
    plan_heals,
)
from geartrain.elastic.losing import drain, lose, remove
from geartrain.elastic.messages import (
    Beat,
    DrainAsked,
    Healed,
    Holds,
    Join,
    Leave,
    NotRestored,
    Ready,
    RewindAsked,
    ScaleAsked,
    StatusAsked,
    Suspect,
    Vote,
)
from geartrain.elastic.operating import (
    drain_asked,
    rewind_asked,
    scale_asked,
    status_asked,
)
from geartrain.elastic.state import Peer, State, begin, resume
from geartrain.elastic.suspicion import hear_suspicion
from geartrain.elastic.turn import Turn
from geartrain.elastic.voting import hear_ready, hear_vote

__all__ = ["State", "begin", "handle", "next_wake_at_s", "resume"]


def handle(state: State, event: Event, now_s: float) -> tuple[State, tuple[Action, ...]]:
    """Decide what an event leads to.

    Args:
        state: Before it.
        event: What happened.
        now_s: Of a clock that only goes forward.

    Returns:
        The state after it, and what is to be done, in this order.
    """
    turn = Turn(state, now_s)
    forgive_held_up(turn)
    if isinstance(event, Received):
        _hear(turn, event)
    elif isinstance(event, Closed):
        _end_connection(turn, event)
    elif isinstance(event, Tick):
        find_lost(turn)
    if isinstance(event, Tick) or not isinstance(_message(event), Beat | Vote):
        find_eligible(turn)
        plan_heals(turn)
        advance(turn)
    return turn.state, tuple(turn.actions)


def _leave(turn: Turn, peer: Peer, message: Leave) -> None:
    drain(turn, peer, message.reason)


# Any: each function takes the one kind of message that it stands beside.
_FROM_MEMBER: dict[type, Callable[[Turn, Peer, Any], None]] = {
    Ready: hear_ready,
    Beat: hear_beat,
    Vote: hear_vote,
    Suspect: hear_suspicion,
    Healed: hear_healed,
    Holds: hear_holds,
    NotRestored: hear_not_restored,
    Leave: _leave,
}
_FROM_ANYBODY: dict[type, Callable[[Turn, int, Any], None]] = {
    Join: hear_join,
    DrainAsked: drain_asked,
    ScaleAsked: scale_asked,
    RewindAsked: rewind_asked,
    StatusAsked: status_asked,
}


def _hear(turn: Turn, event: Received) -> None:
    message = event.message
    from_anybody = _FROM_ANYBODY.get(type(message))
    if from_anybody is not None:
        from_anybody(turn, event.connection, message)
        return
    member_id = turn.state.connections.get(event.connection)
    if member_id is None:
        # Also what was on its way when the connection was closed from here.
        return
    peer = turn.state.peers[member_id]
    if not isinstance(message, Beat):
        peer = turn.set_peer(peer, heard_at_s=turn.now_s)
    _FROM_MEMBER[type(message)](turn, peer, message)


def _end_connection(turn: Turn, event: Closed) -> None:
    member_id = turn.state.connections.get(event.connection)
    if member_id is None:
        return
    peer = turn.state.peers[member_id]
    if peer.is_draining:  # it has ended, or could not wait for its turn
        remove(turn, peer, peer.drain_reason or event.reason, is_failure=False)
    else:
        lose(turn, peer, event.reason, is_closed=True)


def _message(event: Event) -> object:
    return event.message if isinstance(event, Received) else None
