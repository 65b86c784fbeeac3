"""Processes that come, come back, and get the state while the others train."""

from __future__ import annotations

from geartrain.checkpoint.ranges import StateRange
from geartrain.elastic.assessing import is_near
from geartrain.elastic.events import Close, Send
from geartrain.elastic.forming import received_state
from geartrain.elastic.holdings import (
    Holder,
    Need,
    add_ranges,
    find_lacking,
    plan_transfers,
)
from geartrain.elastic.losing import break_epoch, halt, hold, lose, tell_halt, wait_s
from geartrain.elastic.messages import (
    PROTOCOL_VERSION,
    Dismiss,
    Heal,
    Healed,
    Holds,
    Join,
    NotRestored,
    Welcome,
)
from geartrain.elastic.records import Committed, EpochSeen, RangesKnown
from geartrain.elastic.state import NO_STATE, Healing, Peer
from geartrain.elastic.turn import Turn
from geartrain.elastic.voting import answer_votes_brought, send_commit


def hear_join(turn: Turn, connection: int, join: Join) -> None:
    """A process asks to take part, or comes back on a new connection."""
    if refusal := _refusal(turn, connection, join):
        turn.note("refused", f"{join.member_id}: {refusal}", join.member_id)
        turn.actions += _turn_away(turn, connection, refusal)
        return
    former = turn.state.peers.get(join.member_id)
    if former is not None and former.incarnation == join.incarnation:
        _reconnect(turn, former, connection, join)
        return
    if former is not None:
        turn.set(superseded=turn.state.superseded | {former.incarnation})
        lose(turn, former, "another process of the same member has joined")
    if join.epoch > turn.state.facts.epoch:
        turn.record(EpochSeen(epoch=join.epoch))
    _enter(turn, _to_peer(turn, connection, join), join)


def plan_heals(turn: Turn) -> None:
    """Have the state copied to joiners while the others train."""
    state = turn.state
    if state.phase not in {"building", "running"}:
        return
    holders = [
        Holder(member_id=p.member_id, address=p.address, host_id=p.host_id, ranges=p.holds)
        for p in state.holders()
    ]
    for peer in tuple(state.peers.values()):
        if _wants_healing(turn, peer):
            _heal(turn, peer, holders)


def find_eligible(turn: Turn) -> None:
    """Joiners that hold the state, or nearly, may enter at the next boundary."""
    for peer in tuple(turn.state.peers.values()):
        if (
            peer.eligible_at_s is None
            and peer.healing is None
            and _may_enter(turn, peer)
            and is_near(turn.state, peer)
        ):
            turn.set_peer(peer, eligible_at_s=turn.now_s)


def hear_healed(turn: Turn, peer: Peer, message: Healed) -> None:
    """A member has got what it was to get, and is a holder from now on."""
    state, facts = turn.state, turn.state.facts
    if peer.member_id in state.members:
        ranges = state.to_get.get(peer.member_id)
        is_now = (message.step, message.lineage) == (facts.step, facts.lineage)
        if ranges is not None and is_now and message.epoch == facts.epoch:
            received_state(turn, peer, ranges)
        return
    healing = peer.healing
    lineage = facts.lineage_at(message.step)
    is_as_asked = healing is not None and (message.step, message.lineage) == (
        healing.step,
        healing.lineage,
    )
    if healing is None or not (is_as_asked or lineage == message.lineage):
        turn.note(
            "diverged",
            f"{peer.member_id} was healed to step {message.step} of lineage "
            f"{message.lineage[:8]}, which is none of this run's; it is healed again",
            peer.member_id,
        )
        turn.set_peer(peer, healing=None)
        return
    turn.set_peer(
        peer,
        step=message.step,
        lineage=message.lineage,
        holds=add_ranges((), healing.ranges),
        healing=None,
        num_heals=peer.num_heals + 1,
    )


def hear_holds(turn: Turn, peer: Peer, message: Holds) -> None:
    """A member says which ranges it holds."""
    facts = turn.state.facts
    is_on_chain = not facts.lineage or facts.lineage_at(message.step) == message.lineage
    if is_on_chain and (message.step, message.lineage) == (peer.step, peer.lineage):
        turn.set_peer(peer, holds=message.ranges)
        _learn_ranges(turn, message.ranges)


def hear_not_restored(turn: Turn, peer: Peer, message: NotRestored) -> None:
    """Ranges that nobody holds are not in tier 1 either."""
    state = turn.state
    is_current = message.epoch == state.facts.epoch and state.phase == "building"
    if is_current and peer.member_id in state.members:
        reason = f"tier 1 does not have step {state.facts.step} either: {message.reason}"
        halt(turn, "no_state", reason, message.ranges)


def _refusal(turn: Turn, connection: int, join: Join) -> str:
    state = turn.state
    if connection in state.connections:
        return "it has joined on this connection already; open a new one"
    if join.version != PROTOCOL_VERSION:
        return (
            f"it speaks version {join.version} of the protocol, not {PROTOCOL_VERSION}; "
            "use the same geartrain everywhere"
        )
    if join.incarnation in state.superseded:
        return "a later process of this member has taken its place; end this one"
    if wait_s(turn, join.member_id) < 0:
        count = len(state.facts.failures[join.member_id])
        most = state.limits.max_member_failures
        return f"it has failed {count} times; max_member_failures={most} allows no more"
    return ""


def _turn_away(turn: Turn, connection: int, reason: str) -> list[Send | Close]:
    message = Dismiss(reason=reason, **turn.where())
    return [Send(connection=connection, message=message), Close(connection=connection)]


def _to_peer(turn: Turn, connection: int, join: Join) -> Peer:
    return Peer(
        connection=connection,
        member_id=join.member_id,
        incarnation=join.incarnation,
        host_id=join.host_id,
        place=join.place,
        address=join.address,
        facts=join.facts,
        wants=join.wants,
        voted_epoch=join.epoch,
        voted_step=join.voted_step,
        voted_lineage=join.voted_lineage,
        heard_at_s=turn.now_s,
        progress_at_s=turn.now_s,
        must_move=join.incarnation in turn.state.failed,
        admitted_at_s=turn.now_s + wait_s(turn, join.member_id),
    )


def _enter(turn: Turn, peer: Peer, join: Join) -> None:
    step, lineage = _trusted_state(turn, peer, join)
    holds = join.holds if lineage else ()
    peer = turn.set_peer(peer, step=step, lineage=lineage, holds=holds)
    state = turn.state
    turn.set(connections={**state.connections, peer.connection: peer.member_id})
    _learn_ranges(turn, holds)
    if peer.who in state.awaited:
        awaited = state.awaited - {peer.who}
        peer = turn.set_peer(peer, has_trained=True)
        turn.set(awaited=awaited, members=(*state.members, peer.member_id))
        if state.phase == "gathering":
            gap_s = state.limits.rejoin_gap_s if awaited else 0.0
            latest_s = state.since_s + state.limits.rejoin_s
            turn.set(gather_until_s=min(turn.now_s + gap_s, max(latest_s, turn.now_s)))
    _welcome(turn, peer)
    answer_votes_brought(turn)
    if peer.who in turn.state.facts.draining:
        turn.set_peer(
            turn.state.peers[peer.member_id],
            drain_reason="asked to before the coordinator came back",
            drain_until_s=turn.now_s + turn.state.limits.drain_s,
        )


def _trusted_state(turn: Turn, peer: Peer, join: Join) -> tuple[int, str]:
    """What of a process's own word can be taken: a state on the fleet's history."""
    facts = turn.state.facts
    if not join.lineage:
        return NO_STATE, ""
    if not facts.lineage or facts.lineage_at(join.step) == join.lineage:
        return join.step, join.lineage
    if peer.who in turn.state.awaited and _proves_commits(turn, join):
        return join.step, join.lineage
    turn.note(
        "diverged",
        f"{join.member_id} comes with step {join.step} of lineage {join.lineage[:8]}, the "
        f"fleet is at step {facts.step} of {facts.lineage[:8]}; its state is replaced",
        join.member_id,
    )
    return NO_STATE, ""


def _proves_commits(turn: Turn, join: Join) -> bool:
    """Take over steps that the journal lost, from a member of its last epoch.

    Such a member applies nothing but what was committed, so what it has applied on top of
    the journal's last step was.
    """
    facts = turn.state.facts
    ahead = join.step - facts.step
    chain = (*join.recent, join.lineage)
    if not 0 < ahead < len(chain) or chain[-1 - ahead] != facts.lineage:
        return False
    for index, lineage in enumerate(chain[-ahead:], start=1):
        turn.record(Committed(epoch=facts.epoch, step=facts.step + index, lineage=lineage))
    turn.note("recovered", f"{ahead} steps that the journal had lost", join.member_id)
    return True


def _reconnect(turn: Turn, peer: Peer, connection: int, join: Join) -> None:
    """The same process on a new connection, before the old one was seen to end."""
    state = turn.state
    turn.close(peer.connection)
    connections = {c: m for c, m in state.connections.items() if c != peer.connection}
    turn.set(connections={**connections, connection: peer.member_id})
    on_chain = state.facts.lineage_at(join.step) == join.lineage
    is_behind_a_commit = join.step == peer.step - 1 and (
        join.voted_step,
        join.voted_lineage,
    ) == (peer.step, peer.lineage)
    peer = turn.set_peer(
        peer, connection=connection, heard_at_s=turn.now_s, voted_epoch=join.epoch
    )
    _welcome(turn, peer)
    is_member = peer.member_id in turn.state.members
    if is_behind_a_commit:
        peer = turn.set_peer(
            peer,
            step=join.step,
            lineage=join.lineage,
            voted_step=join.voted_step,
            voted_lineage=join.voted_lineage,
        )
        peer = send_commit(turn, peer)
    elif is_member and (not on_chain or join.step != peer.step):
        lose(turn, peer, "it came back with another state than it had")
        return
    elif not is_member:
        step, lineage = _trusted_state(turn, peer, join)
        holds = join.holds if lineage else ()
        turn.set_peer(
            peer, step=step, lineage=lineage, holds=holds, healing=None, eligible_at_s=None
        )
    if is_member and turn.state.phase in {"gathering", "holding"}:
        hold(turn, peer, turn.state.reason)
    elif is_member:
        # What was on its way over the old connection is lost, in both directions.
        break_epoch(turn, f"{peer.member_id} came back on a new connection")


def _welcome(turn: Turn, peer: Peer) -> None:
    limits = turn.state.limits
    turn.send(
        peer,
        Welcome(
            beat_interval_s=limits.beat_interval_s,
            build_s=limits.build_s,
            min_members=limits.min_members,
            admitted_after_s=max(0.0, peer.admitted_at_s - turn.now_s),
            **turn.where(),
        ),
    )
    if turn.state.phase == "halted":
        tell_halt(turn, peer)


def _learn_ranges(turn: Turn, ranges: tuple[StateRange, ...]) -> None:
    known = turn.state.facts.known_ranges
    if find_lacking(ranges, [known], ()) and not set(ranges) <= set(known):
        turn.record(RangesKnown(ranges=ranges))


def _may_enter(turn: Turn, peer: Peer) -> bool:
    return peer.member_id not in turn.state.members and peer.may_enter(turn.now_s)


def _wants_healing(turn: Turn, peer: Peer) -> bool:
    return (
        peer.healing is None
        and peer.eligible_at_s is None
        and _may_enter(turn, peer)
        and not is_near(turn.state, peer)
    )


def _heal(turn: Turn, peer: Peer, holders: list[Holder]) -> None:
    facts = turn.state.facts
    need = Need(
        member_id=peer.member_id,
        host_id=peer.host_id,
        ranges=peer.wants,
        from_step=peer.step,
    )
    transfers, missing = plan_transfers([need], holders, facts.known_ranges)
    if missing or not transfers:
        return  # told when the next epoch is formed
    givers = tuple(sorted({transfer.giver for transfer in transfers}))
    ranges = tuple(part for transfer in transfers for part in transfer.ranges)
    healing = Healing(
        step=facts.step,
        lineage=facts.lineage,
        since_s=turn.now_s,
        givers=givers,
        ranges=add_ranges((), ranges),
    )
    turn.set_peer(peer, healing=healing)
    turn.note("heal", f"{peer.member_id} gets step {facts.step} from {', '.join(givers)}")
    message = Heal(transfers=transfers, **turn.where())
    for name in (peer.member_id, *givers):
        turn.send(turn.state.peers[name], message)
