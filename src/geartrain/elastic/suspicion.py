"""Members that live, but that others can't reach: whom to leave out.

A link between two members may be torn while both reach the coordinator. The first time
everybody builds anew, since a connection that broke may just be made again, and since a
member that lost its peer cuts connections to others, which then accuse it. Only who is
accused again within a while is left out.
"""

from __future__ import annotations

from collections import Counter

from geartrain.elastic.losing import break_epoch, lose
from geartrain.elastic.messages import Suspect
from geartrain.elastic.state import Accusation, Peer
from geartrain.elastic.turn import Turn


def hear_suspicion(turn: Turn, peer: Peer, message: Suspect) -> None:
    """A member's exchange failed: end the epoch, and hear all sides before judging."""
    state = turn.state
    is_current = message.epoch == state.facts.epoch
    if not is_current or state.phase not in {"gathering", "building", "running"}:
        return
    if peer.member_id not in state.members:
        return
    accusations = [
        Accusation(by=peer.member_id, of=name, at_s=turn.now_s, epoch=message.epoch)
        for name in message.member_ids
        if name in state.members and name != peer.member_id
    ]
    turn.set(accusations=(*state.accusations, *accusations))
    who = ", ".join(message.member_ids) or "somebody"
    reason = f"{peer.member_id} could not exchange with {who}: {message.reason}"
    turn.note("suspect", reason, peer.member_id)
    is_explained = any(lost.is_failure for lost in state.lost)
    gather_s = 0.0 if is_explained else state.limits.suspect_gather_s
    break_epoch(turn, reason, gather_s)


def judge(turn: Turn) -> None:
    """Before an epoch is formed: leave out who is accused for the second time.

    Accusations that a real loss explains are dropped. Of those left, the member that most
    others accuse goes, of equals the one with the last place; until no accusation is
    between two that stay.
    """
    state, now_s = turn.state, turn.now_s
    epoch = state.facts.epoch
    if any(lost.is_failure for lost in state.lost):
        turn.set(accusations=tuple(a for a in state.accusations if a.epoch != epoch))
        return
    fresh_s = now_s - state.limits.suspect_memory_s
    kept = tuple(a for a in state.accusations if a.at_s >= fresh_s)
    turn.set(accusations=kept)
    before = {accusation.of for accusation in kept if accusation.epoch != epoch}
    while True:
        standing = {
            (a.by, a.of)
            for a in turn.state.accusations
            if a.epoch == epoch and {a.by, a.of} <= set(turn.state.members)
        }
        counts = Counter(accused for _, accused in standing if accused in before)
        if not counts:
            return
        most = max(counts, key=lambda name: (counts[name], turn.state.peers[name].order))
        lose(
            turn,
            turn.state.peers[most],
            f"{counts[most]} of the others can't reach it, again",
        )
        if turn.state.phase == "halted":
            return
