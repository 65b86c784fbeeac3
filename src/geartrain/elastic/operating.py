"""What an operator asks: take members out, limit their number, go back, tell."""

from __future__ import annotations

from geartrain.elastic.events import Send
from geartrain.elastic.losing import drain
from geartrain.elastic.messages import (
    Answer,
    DrainAsked,
    MemberStatus,
    RewindAsked,
    ScaleAsked,
    Status,
    StatusAsked,
)
from geartrain.elastic.records import MembersLimited, Rewound
from geartrain.elastic.state import NO_STATE, Peer, State
from geartrain.elastic.turn import Turn


def drain_asked(turn: Turn, connection: int, request: DrainAsked) -> None:
    """Take members, or all of a host, out at the next boundary."""
    state = turn.state
    chosen = [
        peer
        for peer in state.peers.values()
        if peer.member_id in request.member_ids or peer.host_id in request.host_ids
    ]
    known = {p.member_id for p in chosen} | {p.host_id for p in chosen}
    unknown = [n for n in (*request.member_ids, *request.host_ids) if n not in known]
    staying = _num_staying(state, chosen)
    if unknown:
        text = f"{', '.join(unknown)} takes no part; those that do: {_names(state)}"
    elif staying < state.limits.min_members:
        text = (
            f"that would leave {staying} members, min_members={state.limits.min_members}; "
            "add members first, or end the run"
        )
    else:
        for peer in sorted(chosen, key=lambda p: p.order):
            drain(turn, peer, request.reason)
        names = ", ".join(sorted(peer.member_id for peer in chosen))
        _answer(turn, connection, request.request_id, f"{names} leave at the next step")
        return
    _answer(turn, connection, request.request_id, text, is_accepted=False)


def scale_asked(turn: Turn, connection: int, request: ScaleAsked) -> None:
    """Train with at most so many; those beyond leave, last places first."""
    state, most = turn.state, request.num_members
    if most < state.limits.min_members:
        text = f"{most} members are fewer than min_members={state.limits.min_members}"
        _answer(turn, connection, request.request_id, text, is_accepted=False)
        return
    turn.record(MembersLimited(num_members=most))
    staying = sorted(
        (state.peers[n] for n in state.members if not state.peers[n].is_draining),
        key=lambda peer: peer.order,
    )
    for peer in staying[most:]:
        drain(turn, peer, f"scaled down to {most}")
    text = f"at most {most} members from the next step on, {len(staying)} take part now"
    _answer(turn, connection, request.request_id, text)


def rewind_asked(turn: Turn, connection: int, request: RewindAsked) -> None:
    """Go on from another state; only where nothing can be trained without it."""
    state = turn.state
    if state.phase not in {"halted", "holding"} or not request.lineage:
        text = f"the run is {state.phase}: only a run that has halted can be rewound"
        _answer(turn, connection, request.request_id, text, is_accepted=False)
        return
    turn.record(Rewound(step=request.step, lineage=request.lineage, reason=request.reason))
    turn.note("rewound", f"to step {request.step}: {request.reason}")
    for peer in tuple(state.peers.values()):
        if not turn.state.holds_state(peer):
            turn.set_peer(peer, step=NO_STATE, lineage="", holds=(), healing=None)
    turn.set(
        phase="holding",
        since_s=turn.now_s,
        hold_until_s=turn.now_s + state.limits.hold_s,
        reason="too_few: rewound",
        num_barren=0,
        num_disagreements=0,
    )
    text = f"the run goes on from step {request.step} with who holds it"
    _answer(turn, connection, request.request_id, text)


def status_asked(turn: Turn, connection: int, request: StatusAsked) -> None:
    """Say how the run stands."""
    state = turn.state
    message = Status(
        request_id=request.request_id,
        phase=state.phase,
        members=tuple(
            _status(state, peer)
            for peer in sorted(state.peers.values(), key=lambda p: p.order)
        ),
        **turn.where(),
    )
    turn.actions.append(Send(connection=connection, message=message))


def _status(state: State, peer: Peer) -> MemberStatus:
    is_member = peer.member_id in state.members
    note = peer.drain_reason or ""
    if not is_member and peer.admitted_at_s > state.seen_at_s:
        note = f"waits {peer.admitted_at_s - state.seen_at_s:.1f} s since it failed often"
    return MemberStatus(
        member_id=peer.member_id,
        incarnation=peer.incarnation,
        host_id=peer.host_id,
        standing="draining" if peer.is_draining else "member" if is_member else "joining",
        num_failures=len(state.facts.failures.get(peer.member_id, ())),
        note=note,
    )


def _num_staying(state: State, leaving: list[Peer]) -> int:
    gone = {peer.member_id for peer in leaving}
    members = [state.peers[name] for name in state.members]
    return sum(1 for p in members if p.member_id not in gone and not p.is_draining)


def _names(state: State) -> str:
    return ", ".join(sorted(state.peers)) or "nobody"


def _answer(
    turn: Turn, connection: int, request_id: int, text: str, *, is_accepted: bool = True
) -> None:
    message = Answer(request_id=request_id, is_accepted=is_accepted, text=text)
    turn.actions.append(Send(connection=connection, message=message))
