"""Ready, votes and commits: a step is applied when all members of the epoch have it."""

from __future__ import annotations

from collections import Counter

from msgspec.structs import replace

from geartrain.elastic.assessing import Shortfall, assess, is_near
from geartrain.elastic.forming import form, hold_on, received_state
from geartrain.elastic.losing import break_epoch, halt, lose, release
from geartrain.elastic.messages import Commit, Ready, Vote
from geartrain.elastic.records import Committed
from geartrain.elastic.state import Peer, State
from geartrain.elastic.turn import Turn


def hear_ready(turn: Turn, peer: Peer, message: Ready) -> None:
    """A member's exchange stands, and it holds the state."""
    state = turn.state
    if not _is_of_epoch(state, peer, message.epoch) or state.phase != "building":
        return
    if (message.step, message.lineage) != (state.facts.step, state.facts.lineage):
        lose(turn, peer, _differs(state, message.step, message.lineage))
        return
    _take_as_ready(turn, peer)


def hear_vote(turn: Turn, peer: Peer, message: Vote) -> None:
    """A member could apply the step."""
    state, facts = turn.state, turn.state.facts
    if (message.step, message.lineage) == (facts.step, facts.lineage):
        # Asked again after a connection broke; the answer is known.
        turn.send(peer, Commit(**turn.where()))
        return
    if _is_between_epochs(state, peer, message.epoch):
        turn.set_peer(
            peer,
            voted_epoch=message.epoch,
            voted_step=message.step,
            voted_lineage=message.lineage,
        )
        answer_votes_brought(turn)
        return
    if not _is_of_epoch(state, peer, message.epoch):
        turn.note(
            "refused",
            f"a vote of {peer.member_id} for step {message.step} in epoch "
            f"{message.epoch}, which is over",
            peer.member_id,
        )
        return
    earlier = state.votes.get(peer.member_id)
    if earlier is not None and earlier.lineage == message.lineage:
        return
    is_next = (message.step, message.parent) == (facts.step + 1, facts.lineage)
    if not is_next or earlier is not None:
        lose(turn, peer, _differs(state, message.step - 1, message.parent))
        return
    peer = _take_as_ready(turn, peer)
    turn.set(votes={**turn.state.votes, peer.member_id: message})
    if len(turn.state.votes) == len(turn.state.members):
        _settle(turn)


def answer_votes_brought(turn: Turn) -> None:
    """Tell members that came back of commits that they have not heard of.

    A commit may be in the journal and not have reached everybody. And if all members of the
    epoch come back with the same vote, or give it before the next epoch is formed, they
    have agreed on that step.
    """
    state = turn.state
    returned = [state.peers[name] for name in state.members]
    if state.phase == "gathering" and returned and not state.awaited and not state.lost:
        brought = {(p.voted_step, p.voted_lineage, p.step, p.lineage) for p in returned}
        is_whole = {peer.who for peer in returned} == set(state.facts.members)
        step, lineage, *_ = next(iter(brought))
        is_next = step == state.facts.step + 1 and all(
            state.holds_state(peer) and peer.voted_epoch == state.facts.epoch
            for peer in returned
        )
        if len(brought) == 1 and is_whole and is_next:
            commit(turn, step, lineage)
    for peer in tuple(turn.state.peers.values()):
        lineage_there = turn.state.facts.lineage_at(peer.voted_step)
        if peer.voted_step == peer.step + 1 and lineage_there == peer.voted_lineage:
            send_commit(turn, peer)


def send_commit(turn: Turn, peer: Peer) -> Peer:
    """Tell a peer that the step that it voted for is committed."""
    turn.send(
        peer,
        Commit(epoch=peer.voted_epoch, step=peer.voted_step, lineage=peer.voted_lineage),
    )
    return turn.set_peer(
        peer, step=peer.voted_step, lineage=peer.voted_lineage, voted_step=0
    )


def commit(turn: Turn, step: int, lineage: str) -> None:
    """All members have voted for it: it is applied."""
    epoch = turn.state.facts.epoch
    turn.record(Committed(epoch=epoch, step=step, lineage=lineage))
    message = Commit(**turn.where())
    peers = dict(turn.state.peers)
    for member_id in turn.state.members:
        peers[member_id] = replace(
            peers[member_id],
            step=step,
            lineage=lineage,
            progress_at_s=turn.now_s,
            activity="step",
        )
        turn.send(peers[member_id], message)
    turn.set(
        peers=peers,
        votes={},
        num_barren=0,
        num_disagreements=0,
        build_s=turn.state.limits.build_s,
        since_s=turn.now_s,
    )


def _take_as_ready(turn: Turn, peer: Peer) -> Peer:
    """A vote says as much as a ready, and may come before it on the way."""
    if peer.member_id in turn.state.ready:
        return peer
    ranges = turn.state.to_get.get(peer.member_id)
    if ranges is not None:
        peer = received_state(turn, peer, ranges)
    epoch = turn.state.facts.epoch
    if peer.main_epoch != epoch:
        peer = turn.set_peer(peer, main_epoch=epoch, taken_up_at_s=turn.now_s)
    turn.set(ready=turn.state.ready | {peer.member_id})
    if len(turn.state.ready) == len(turn.state.members):
        _begin_running(turn)
    return peer


def _begin_running(turn: Turn) -> None:
    turn.set(phase="running", since_s=turn.now_s)
    for member_id in turn.state.members:
        turn.set_peer(turn.state.peers[member_id], progress_at_s=turn.now_s)
    givers = turn.state.givers
    turn.set(givers=())
    for member_id in givers:
        peer = turn.state.peers[member_id]
        if peer.is_draining:
            release(turn, peer)


def _settle(turn: Turn) -> None:
    votes = turn.state.votes
    lineages = Counter(vote.lineage for vote in votes.values())
    if len(lineages) == 1:
        vote = next(iter(votes.values()))
        commit(turn, vote.step, vote.lineage)
        cross_boundary(turn)
        return
    _refuse_different_sums(turn, lineages)


def _refuse_different_sums(turn: Turn, lineages: Counter[str]) -> None:
    """Members would apply different updates: nobody applies any.

    The first time the step is done again. The second time in a row those go that differ
    from most; where no sum has more than half of the members, it takes a person.
    """
    state = turn.state
    turn.set(num_disagreements=state.num_disagreements + 1)
    reason = f"members had {len(lineages)} different sums for step {state.facts.step + 1}"
    turn.note("diverged", reason)
    if state.num_disagreements == 0:
        break_epoch(turn, reason)
        return
    commonest, count = lineages.most_common(1)[0]
    if 2 * count <= len(state.members):
        halt(turn, "diverged", f"{reason} twice in a row, none of them in the majority")
        return
    votes = state.votes
    for member_id in state.members:
        if votes[member_id].lineage != commonest and member_id in turn.state.peers:
            lose(
                turn,
                turn.state.peers[member_id],
                f"{reason}, twice; it was in the minority",
            )


def cross_boundary(turn: Turn) -> None:
    """Between a commit and the next vote: who leaves leaves, who is healed enters."""
    for peer in tuple(turn.state.peers.values()):
        if peer.eligible_at_s is not None and not is_near(turn.state, peer):
            turn.set_peer(peer, eligible_at_s=None)  # outrun; it is healed again
    state = turn.state
    leaving = [name for name in state.members if state.peers[name].is_draining]
    joining = _joining(turn)
    if not leaving and not joining:
        return
    found = assess(state, with_joiners=True)
    if isinstance(found, Shortfall):
        if leaving:
            turn.set(reason="")
            hold_on(turn, found)
        return
    if not leaving and not {p.member_id for p in found.members} - set(state.members):
        return  # no room for them
    words = [f"{name} leaves" for name in leaving] + [f"{name} joins" for name in joining]
    turn.set(reason=", ".join(words))
    form(turn, with_joiners=True)


def _joining(turn: Turn) -> list[str]:
    """Who could enter now; they wait a moment for others that are about to."""
    state = turn.state
    could = [p for p in state.peers.values() if p.eligible_at_s is not None]
    since_s = min((p.eligible_at_s or 0.0 for p in could), default=turn.now_s)
    is_time = turn.now_s - since_s >= state.limits.join_gather_s
    is_alone = not any(p.healing is not None for p in state.peers.values())
    return [p.member_id for p in could] if is_time or is_alone else []


def _is_between_epochs(state: State, peer: Peer, epoch: int) -> bool:
    """Whether a vote is one of an epoch that has ended without a loss, or may have."""
    is_member = peer.member_id in state.members
    return is_member and state.phase == "gathering" and epoch == state.facts.epoch


def _is_of_epoch(state: State, peer: Peer, epoch: int) -> bool:
    return (
        epoch == state.facts.epoch
        and state.phase in {"building", "running"}
        and peer.member_id in state.members
    )


def _differs(state: State, step: int, lineage: str) -> str:
    facts = state.facts
    return (
        f"it holds step {step} of lineage {lineage[:8] or 'none'}, the fleet is at step "
        f"{facts.step} of {facts.lineage[:8]}; its state has to be replaced"
    )
