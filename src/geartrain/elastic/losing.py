"""A member is gone, or must go: the epoch ends, the others are told at once."""

from __future__ import annotations

from msgspec.structs import replace

from geartrain.elastic.holdings import Ranges
from geartrain.elastic.limits import backoff_s
from geartrain.elastic.messages import Dismiss, Drain, Halt, Hold, LostMember
from geartrain.elastic.records import DrainBegan, Halted, HaltKind, MemberLost
from geartrain.elastic.state import Lost, Peer
from geartrain.elastic.turn import Turn

_LONGEST_GATHER_FACTOR = 10
"""Losses in a row put the next epoch off by at most so many gathering times."""
_LONGEST_PAUSE_S = 2.0


def lose(
    turn: Turn,
    peer: Peer,
    reason: str,
    *,
    is_closed: bool = False,
    silent_s: float = 0.0,
) -> None:
    """Drop a peer because of a failure.

    Args:
        turn: Of the event that showed it.
        peer: Who it is.
        reason: For people.
        is_closed: Its connection is gone already.
        silent_s: How long it had been silent by now.
    """
    turn.record(
        MemberLost(
            member_id=peer.member_id,
            incarnation=peer.incarnation,
            reason=reason,
            at_s=turn.now_s,
        )
    )
    turn.note("lost", f"{peer.member_id}: {reason}", peer.member_id)
    turn.set(failed=turn.state.failed | {peer.incarnation})
    if not is_closed:
        turn.send(peer, _dismissal(turn, peer, reason))
        turn.close(peer.connection)
    remove(turn, peer, reason, is_failure=True, silent_s=silent_s)
    limits, facts = turn.state.limits, turn.state.facts
    if limits.max_failures is not None and facts.num_failures > limits.max_failures:
        halt(
            turn,
            "too_many_failures",
            f"{facts.num_failures} failures, the last one of {peer.member_id} ({reason}); "
            f"max_failures={limits.max_failures} allows no more",
        )


def remove(
    turn: Turn, peer: Peer, reason: str, *, is_failure: bool, silent_s: float = 0.0
) -> None:
    """Forget a peer, and end the epoch if that leaves a gap in it."""
    state = turn.state
    was_member = peer.member_id in state.members
    peers = {name: other for name, other in state.peers.items() if name != peer.member_id}
    for name, other in peers.items():
        if other.healing is not None and peer.member_id in other.healing.givers:
            peers[name] = _without_healing(other)
    lost = Lost(
        who=peer.who,
        reason=reason,
        at_s=turn.now_s,
        is_failure=is_failure,
        silent_s=silent_s,
    )
    turn.set(
        peers=peers,
        connections={c: m for c, m in state.connections.items() if c != peer.connection},
        members=tuple(name for name in state.members if name != peer.member_id),
        givers=tuple(name for name in state.givers if name != peer.member_id),
        awaited=state.awaited - {peer.who},
        lost=(*state.lost, lost) if was_member else state.lost,
    )
    if was_member:
        # Who falls silent does so at a time of its own: there is nobody to wait for.
        gather_s = 0.0 if silent_s else None
        break_epoch(turn, f"{peer.member_id} is lost: {reason}", gather_s)
    elif peer.member_id in state.givers and state.phase == "building":
        break_epoch(turn, f"{peer.member_id} is gone before it had handed its state over")


def break_epoch(turn: Turn, reason: str, gather_s: float | None = None) -> None:
    """End the epoch now; the next one is formed once others had time to be noticed, too."""
    state, now_s = turn.state, turn.now_s
    wait_s = state.limits.loss_gather_s if gather_s is None else gather_s
    if state.phase == "gathering":
        if not state.awaited:
            turn.set(reason=reason)
        latest_s = state.since_s + _LONGEST_GATHER_FACTOR * wait_s
        until_s = max(state.gather_until_s, min(now_s + wait_s, latest_s))
        if not state.awaited:
            turn.set(gather_until_s=until_s)
        return
    if state.phase not in {"building", "running"}:
        return
    was_explained = any(lost.is_failure for lost in state.lost)
    # Epochs that come to nothing one after the other are not tried at full speed.
    wait_s = min(wait_s * 2.0 ** min(state.num_barren, 16), max(wait_s, _LONGEST_PAUSE_S))
    turn.set(
        phase="gathering",
        since_s=now_s,
        gather_until_s=now_s + wait_s,
        reason=reason,
        votes={},
        ready=frozenset(),
        num_barren=state.num_barren + (not was_explained),
    )
    for member_id in state.members:
        hold(turn, turn.state.peers[member_id], reason)


def hold(turn: Turn, peer: Peer, reason: str) -> None:
    """Tell a member that the epoch is over and there is no new one yet."""
    turn.send(peer, Hold(lost=lost_members(turn), reason=reason, **turn.where()))


def halt(turn: Turn, kind: HaltKind, reason: str, ranges: Ranges = ()) -> None:
    """The run can't go on by itself; say so to everybody."""
    if turn.state.phase == "halted":
        return
    turn.record(Halted(kind=kind, reason=reason, ranges=ranges))
    turn.note("halt", f"{kind}: {reason}")
    turn.set(phase="halted", since_s=turn.now_s, votes={}, ready=frozenset(), members=())
    for peer in turn.state.peers.values():
        tell_halt(turn, peer)


def tell_halt(turn: Turn, peer: Peer) -> None:
    """Tell a peer why the run stands still."""
    halted = turn.state.facts.halted
    if halted is not None:
        turn.send(
            peer,
            Halt(
                kind=halted.kind,
                reason=halted.reason,
                ranges=halted.ranges,
                **turn.where(),
            ),
        )


def drain(turn: Turn, peer: Peer, reason: str) -> None:
    """A peer is to leave in order: at the next boundary, or now if it is in no epoch."""
    if peer.is_draining:
        return
    turn.record(DrainBegan(who=peer.who))
    turn.note("drain", f"{peer.member_id} leaves: {reason}", peer.member_id)
    until_s = turn.now_s + turn.state.limits.drain_s
    peer = turn.set_peer(peer, drain_reason=reason, drain_until_s=until_s)
    turn.send(peer, Drain(reason=reason, **turn.where()))
    is_member = peer.member_id in turn.state.members
    if not is_member and not turn.state.holds_state(peer):
        release(turn, peer)


def release(turn: Turn, peer: Peer) -> None:
    """Let a peer go that leaves in order."""
    reason = peer.drain_reason or "left"
    turn.send(peer, Dismiss(reason=reason, is_failure=False, **turn.where()))
    turn.close(peer.connection)
    remove(turn, peer, reason, is_failure=False)


def lost_members(turn: Turn) -> tuple[LostMember, ...]:
    """Who was lost since the last epoch began, for a message."""
    return tuple(
        LostMember(
            member_id=lost.who.member_id,
            incarnation=lost.who.incarnation,
            reason=lost.reason,
            noticed_ago_s=max(0.0, turn.now_s - lost.at_s),
            is_failure=lost.is_failure,
            silent_s=lost.silent_s,
        )
        for lost in turn.state.lost
    )


def wait_s(turn: Turn, member_id: str) -> float:
    """How long a member that failed is kept waiting from now on; negative: for good."""
    limits, facts = turn.state.limits, turn.state.facts
    failed_at_s = facts.failures.get(member_id, ())
    if not failed_at_s:
        return 0.0
    most = limits.max_member_failures
    if most is not None and len(failed_at_s) > most:
        return -1.0
    # A clock that began anew with its host is before the times in the journal.
    since_s = min(failed_at_s[-1], turn.now_s)
    until_s = since_s + backoff_s(limits, failed_at_s, turn.now_s)
    return max(0.0, until_s - turn.now_s)


def _dismissal(turn: Turn, peer: Peer, reason: str) -> Dismiss:
    # It may come at once: it waits here for its turn, and may be needed for its state.
    after_s = -1.0 if wait_s(turn, peer.member_id) < 0 else 0.0
    return Dismiss(reason=reason, may_return_after_s=after_s, **turn.where())


def _without_healing(peer: Peer) -> Peer:
    return replace(peer, healing=None)
