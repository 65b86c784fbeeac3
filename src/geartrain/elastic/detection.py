"""Who counts as lost though its connection stands: silence, a main loop that hangs."""

from __future__ import annotations

from geartrain.elastic.events import TICK_S
from geartrain.elastic.losing import break_epoch, lose, release
from geartrain.elastic.messages import Beat
from geartrain.elastic.state import Peer, State
from geartrain.elastic.turn import Turn

_HELD_UP_S = 0.25
"""The coordinator ticks every 0.05 s. Where it was not awake for this long it can't blame
others for what it has not heard."""

_PAST_S = 1e-3
"""Silence has to be longer than its limit."""
_MOST_LIMITS = 4
_NEWCOMER_S = 1.0
"""A member's first steps may keep its control thread from the processor for a while."""


def forgive_held_up(turn: Turn) -> None:
    """Count only the time in which the coordinator itself was awake."""
    state = turn.state
    held_up_s = turn.now_s - state.seen_at_s
    turn.set(seen_at_s=turn.now_s)
    if held_up_s < _HELD_UP_S:
        return
    for peer in tuple(state.peers.values()):
        turn.set_peer(
            peer,
            heard_at_s=peer.heard_at_s + held_up_s,
            progress_at_s=peer.progress_at_s + held_up_s,
        )
    turn.set(since_s=state.since_s + held_up_s)


def hear_beat(turn: Turn, peer: Peer, beat: Beat) -> None:
    """A sign of life, with how far the main loop is."""
    state, facts = turn.state, turn.state.facts
    is_member = peer.member_id in state.members
    there = facts.lineage_at(beat.step)
    is_ahead = beat.step > facts.step
    is_strange = is_ahead or (there is not None and there != beat.lineage)
    if is_member and is_strange and beat.epoch == facts.epoch:
        what = f"step {beat.step} of lineage {beat.lineage[:8] or 'none'}"
        lose(turn, peer, f"it says that it holds {what}, which was not committed")
        return
    pace = peer.pace.with_gap(max(0.0, turn.now_s - peer.heard_at_s))
    if beat.step_s > 0:
        pace = pace.with_step(beat.step_s)
    has_moved = (beat.progress, beat.phase) != (peer.progress, peer.activity)
    is_moving = peer.progress >= 0 and beat.progress != peer.progress
    turn.set_peer(
        peer,
        must_move=peer.must_move and not is_moving,
        heard_at_s=turn.now_s,
        progress=beat.progress,
        progress_at_s=turn.now_s if has_moved else peer.progress_at_s,
        activity=beat.phase,
        main_epoch=max(peer.main_epoch, beat.epoch),
        taken_up_at_s=turn.now_s if beat.epoch > peer.main_epoch else peer.taken_up_at_s,
        pace=pace,
    )


def find_lost(turn: Turn) -> None:
    """Look at all clocks; at each tick."""
    for peer in tuple(turn.state.peers.values()):
        silent_s = turn.now_s - peer.heard_at_s
        limit_s = _silence_limit_s(turn.state, peer)
        if silent_s > limit_s:
            reason = f"no sign of life for {silent_s:.2f} s (limit {limit_s:.2f} s)"
            lose(turn, peer, reason, silent_s=silent_s)
    if turn.state.phase == "running":
        _find_hung(turn)
    elif turn.state.phase == "building":
        _find_late_builders(turn)
    _let_go(turn)
    _end_slow_heals(turn)


def next_wake_at_s(state: State) -> float:
    """When the machine wants a tick at the latest: also when a silence is too long."""
    silent = (p.heard_at_s + _silence_limit_s(state, p) for p in state.peers.values())
    wakes_at_s = min((state.seen_at_s + TICK_S, *(at_s + _PAST_S for at_s in silent)))
    if state.phase == "gathering":
        wakes_at_s = min(wakes_at_s, state.gather_until_s)
    return max(wakes_at_s, state.seen_at_s)


def _silence_limit_s(state: State, peer: Peer) -> float:
    """A member that has just come beats like the others, before it has made steps.

    One that came back to a coordinator that returned did so before, too.
    """
    limits = state.limits
    own_s = peer.pace.silence_limit_s(limits)
    if peer.pace.slow_step_s or peer.member_id not in state.members:
        return own_s
    if peer.has_trained:
        return min(own_s, max(_NEWCOMER_S, peer.pace.starved_s(limits)))
    measured = [
        other.pace.silence_limit_s(limits)
        for other in (state.peers[name] for name in state.members)
        if other.pace.slow_step_s
    ]
    return min(own_s, max(_NEWCOMER_S, *measured)) if measured else own_s


def _find_hung(turn: Turn) -> None:
    state = turn.state
    slow = [state.peers[name] for name in state.members if name not in state.votes]
    for peer in slow:
        still_s = turn.now_s - peer.progress_at_s
        if peer.activity != "waiting" and still_s > _still_limit_s(state, peer):
            lose(
                turn,
                peer,
                f"its main loop has made no progress for {still_s:.2f} s, though it beats",
                silent_s=still_s,
            )
    if turn.state.phase != "running" or not slow:
        return
    # All wait for each other: either the exchange is stuck, or one of them hangs in it.
    # A new epoch tells, since who hangs does not take it up.
    longest_s = max(peer.pace.limit_s(state.limits) for peer in slow)
    latest_s = max(peer.progress_at_s for peer in slow)
    is_still = turn.now_s - latest_s > longest_s
    # A main loop that only wakes to look whether it may go on moves, but gets nowhere.
    is_endless = turn.now_s - state.since_s > _MOST_LIMITS * longest_s
    if all(p.activity == "waiting" for p in slow) and (is_still or is_endless):
        names = ", ".join(peer.member_id for peer in slow)
        break_epoch(turn, f"an exchange among {names} does not end")


def _still_limit_s(state: State, peer: Peer) -> float:
    limits = state.limits
    return limits.away_s if peer.activity == "away" else peer.pace.limit_s(limits)


def _find_late_builders(turn: Turn) -> None:
    """Whose main loop has not taken the epoch up, or whose exchange does not stand."""
    state, since_s = turn.state, turn.state.since_s
    waiting = [state.peers[name] for name in state.members if name not in state.ready]
    hung = [peer for peer in waiting if _has_not_taken_up(turn, peer)]
    if hung:
        _leave_out(turn, hung, "its main loop does not take up the epoch")
        return
    is_taken_up = all(p.main_epoch == state.facts.epoch for p in waiting)
    late = [peer for peer in waiting if turn.now_s > _ready_until_s(turn, peer)]
    if late and is_taken_up and turn.now_s - since_s > state.build_s:
        _leave_out(turn, late, "it was not ready in time")


def _has_not_taken_up(turn: Turn, peer: Peer) -> bool:
    state = turn.state
    if peer.main_epoch == state.facts.epoch:
        return False
    patience_s = max(state.build_s, _taking_up_limit_s(state, peer))
    return turn.now_s - max(state.since_s, peer.progress_at_s) > patience_s


def _taking_up_limit_s(state: State, peer: Peer) -> float:
    """A joiner only waits for its epoch: it need not be given the time of a first step."""
    limits = state.limits
    measured = [
        other.pace.limit_s(limits)
        for other in (state.peers[name] for name in state.members)
        if other.pace.slow_step_s
    ]
    if measured and not peer.pace.slow_step_s and peer.activity != "away":
        return max(measured)
    return _still_limit_s(state, peer)


def _ready_until_s(turn: Turn, peer: Peer) -> float:
    """A member that gets its state has longer, as long as it gets on."""
    state = turn.state
    until_s = max(state.since_s, _taken_up_at_s(state)) + state.build_s
    if peer.member_id not in state.to_get:
        return until_s
    moving_s = peer.progress_at_s + max(state.build_s, peer.pace.limit_s(state.limits))
    return min(max(until_s, moving_s), until_s + state.limits.transfer_s)


def _taken_up_at_s(state: State) -> float:
    return max(state.peers[name].taken_up_at_s for name in state.members)


def _leave_out(turn: Turn, late: list[Peer], reason: str) -> None:
    """Leave out who is late; where the rest could not go on, all try again, longer."""
    state, limits = turn.state, turn.state.limits
    names = {peer.member_id for peer in late}
    rest = [state.peers[name] for name in state.members if name not in names]
    can_go_on = len(rest) >= limits.min_members and 2 * len(late) < len(state.members)
    if can_go_on and any(state.holds_state(peer) for peer in rest):
        for peer in late:
            lose(turn, peer, reason)
        return
    turn.set(build_s=min(2 * state.build_s, limits.longest_build_s))
    break_epoch(turn, f"of {', '.join(sorted(names))}: {reason}")


def _let_go(turn: Turn) -> None:
    """Who is leaving and is in no epoch any more goes, unless only it holds something."""
    state = turn.state
    trains = state.phase in {"building", "running"}
    for peer in tuple(state.peers.values()):
        is_needed = peer.member_id in (state.members if trains else ())
        is_giving = peer.member_id in state.givers
        is_time = trains or turn.now_s >= peer.drain_until_s
        if peer.is_draining and is_time and not is_needed and not is_giving:
            release(turn, peer)


def _end_slow_heals(turn: Turn) -> None:
    limits = turn.state.limits
    for peer in tuple(turn.state.peers.values()):
        healing = peer.healing
        if healing is not None and turn.now_s - healing.since_s > limits.transfer_s:
            turn.set_peer(peer, healing=None, num_heals=peer.num_heals + 1)
            turn.note("heal", f"{peer.member_id} did not get the state in time; again")
