"""Forms epochs: when, and what everybody is told."""

from __future__ import annotations

from geartrain.elastic.assessing import Formation, Shortfall, assess
from geartrain.elastic.holdings import Ranges, add_ranges
from geartrain.elastic.losing import halt, hold, lost_members, release
from geartrain.elastic.messages import Heal, LostMember, MemberPlace, NewEpoch
from geartrain.elastic.records import EpochFormed, MemberLost, RunBegan
from geartrain.elastic.state import Lost, Peer
from geartrain.elastic.suspicion import judge
from geartrain.elastic.turn import Turn


def advance(turn: Turn) -> None:
    """Form the next epoch if it is due, or halt if that has become hopeless."""
    state = turn.state
    if state.phase == "gathering" and _is_due(turn):
        form(turn, with_joiners=False)
    elif state.phase == "holding":
        form(turn, with_joiners=True)


def form(turn: Turn, *, with_joiners: bool) -> None:
    """Form the next epoch, or hold until that is possible."""
    judge(turn)
    _give_up_awaited(turn)
    if turn.state.phase == "halted" or (not turn.state.has_begun and not _begin(turn)):
        return
    state = turn.state
    if state.num_barren > state.limits.max_barren_epochs:
        halt(
            turn,
            "too_many_failures",
            f"{state.num_barren} epochs in a row came to nothing though nobody was lost, "
            f"the last one since {state.reason}; look at the members' logs",
        )
        return
    found = assess(state, with_joiners=with_joiners)
    if isinstance(found, Formation):
        _announce(turn, found)
    else:
        hold_on(turn, found)


def hold_on(turn: Turn, shortfall: Shortfall) -> None:
    """Wait for others; halt if that takes too long."""
    state, limits = turn.state, turn.state.limits
    wait_s = limits.hold_s if shortfall.kind == "too_few" else limits.lost_state_s
    reason = f"{shortfall.kind}: {shortfall.reason}"
    if state.phase != "holding" or not state.reason.startswith(shortfall.kind):
        turn.set(
            phase="holding",
            since_s=turn.now_s,
            hold_until_s=turn.now_s + wait_s,
            reason=reason,
            votes={},
            ready=frozenset(),
        )
        turn.note("hold", f"{reason}; waiting for others up to {wait_s:g} s")
        for peer in turn.state.peers.values():
            hold(turn, peer, reason)
    elif turn.now_s >= state.hold_until_s:
        halt(turn, shortfall.kind, shortfall.reason, shortfall.ranges)


def _is_due(turn: Turn) -> bool:
    state = turn.state
    if turn.now_s >= state.gather_until_s:
        return True
    is_first = state.facts.epoch == 0
    return is_first and len(state.peers) >= state.limits.expected_members


def _give_up_awaited(turn: Turn) -> None:
    for who in sorted(turn.state.awaited):
        reason = "it did not come back after the coordinator had"
        turn.record(
            MemberLost(
                member_id=who.member_id,
                incarnation=who.incarnation,
                reason=reason,
                at_s=turn.now_s,
            )
        )
        turn.note("lost", f"{who.member_id}: {reason}", who.member_id)
        lost = Lost(who=who, reason=reason, at_s=turn.now_s, is_failure=True)
        turn.set(lost=(*turn.state.lost, lost), awaited=turn.state.awaited - {who})


def _begin(turn: Turn) -> bool:
    """Agree on the state that the run starts from; never by a vote."""
    state = turn.state
    states = {(p.step, p.lineage) for p in state.peers.values() if p.lineage}
    if not states:
        least = state.limits.min_members
        reason = f"no member holds a state to begin with; {least} or more must join"
        hold_on(turn, Shortfall(kind="too_few", reason=reason))
        return False
    if len(states) > 1:
        named = ", ".join(
            f"{p.member_id}: step {p.step} {p.lineage[:8]}"
            for p in sorted(state.peers.values(), key=lambda peer: peer.order)
        )
        halt(
            turn,
            "no_state",
            f"the members hold different states ({named}), and none is known to be the "
            "run's; say which to go on from, or start all from one",
        )
        return False
    step, lineage = states.pop()
    turn.record(RunBegan(step=step, lineage=lineage))
    return True


def _announce(turn: Turn, formation: Formation) -> None:
    before = turn.state
    former = {who.member_id for who in before.facts.members}
    leaving = _leaving(turn)
    lost = (*lost_members(turn), *(_as_lost(peer) for peer in leaving))
    turn.record(
        EpochFormed(
            epoch=before.facts.epoch + 1,
            members=tuple(peer.who for peer in formation.members),
            reason=before.reason,
        )
    )
    message = NewEpoch(
        members=tuple(_place(peer) for peer in formation.members),
        lost=lost,
        joined=tuple(p.member_id for p in formation.members if p.member_id not in former),
        transfers=formation.transfers,
        restores=formation.restores,
        reason=before.reason,
        build_s=before.build_s,
        **turn.where(),
    )
    _enter(turn, formation, message)
    _tell_givers(turn, formation)
    for peer in leaving:
        if peer.member_id not in turn.state.givers:
            release(turn, turn.state.peers[peer.member_id])


def _enter(turn: Turn, formation: Formation, message: NewEpoch) -> None:
    names = tuple(peer.member_id for peer in formation.members)
    turn.note("epoch", f"epoch {message.epoch} of {', '.join(names)}: {message.reason}")
    givers = {transfer.giver for transfer in formation.transfers} - set(names)
    turn.set(
        phase="building",
        since_s=turn.now_s,
        members=names,
        ready=frozenset(),
        votes={},
        to_get=formation.to_get(),
        givers=tuple(sorted(givers)),
        lost=(),
    )
    for member_id in names:
        peer = turn.set_peer(
            turn.state.peers[member_id],
            eligible_at_s=None,
            healing=None,
            num_heals=0,
            voted_step=0,
            progress_at_s=turn.now_s,
        )
        # It says as much, and who heard of the commit first would begin a step in vain.
        turn.unsend_commit(peer)
        turn.send(peer, message)


def _tell_givers(turn: Turn, formation: Formation) -> None:
    for member_id in turn.state.givers:
        given = tuple(t for t in formation.transfers if t.giver == member_id)
        giver = turn.state.peers[member_id]
        turn.send(giver, Heal(transfers=given, **turn.where()))


def _leaving(turn: Turn) -> list[Peer]:
    return [peer for peer in turn.state.peers.values() if peer.is_draining]


def _as_lost(peer: Peer) -> LostMember:
    return LostMember(
        member_id=peer.member_id,
        incarnation=peer.incarnation,
        reason=peer.drain_reason or "left",
        is_failure=False,
    )


def _place(peer: Peer) -> MemberPlace:
    return MemberPlace(
        member_id=peer.member_id,
        incarnation=peer.incarnation,
        host_id=peer.host_id,
        address=peer.address,
        facts=dict(peer.facts),
    )


def received_state(turn: Turn, peer: Peer, ranges: Ranges) -> Peer:
    """A peer now holds these ranges of the fleet's state, beside those it had of it."""
    held = peer.holds if turn.state.holds_state(peer) else ()
    facts = turn.state.facts
    merged = add_ranges(held, ranges)
    return turn.set_peer(peer, step=facts.step, lineage=facts.lineage, holds=merged)
