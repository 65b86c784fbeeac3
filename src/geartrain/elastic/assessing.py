"""Whether an epoch can be formed now, of whom, and who must get what first."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from geartrain.checkpoint.ranges import describe_ranges
from geartrain.elastic.holdings import (
    Holder,
    Need,
    Ranges,
    add_ranges,
    adopt_orphans,
    find_lacking,
    plan_transfers,
)
from geartrain.elastic.messages import WHOLE_STATE, Restore, Transfer
from geartrain.elastic.state import Peer, State


@dataclass(frozen=True, slots=True, kw_only=True)
class Formation:
    """An epoch that can be formed."""

    members: tuple[Peer, ...]
    """In order of rank."""
    transfers: tuple[Transfer, ...] = ()
    restores: tuple[Restore, ...] = ()

    def to_get(self) -> Mapping[str, Ranges]:
        """What each receiver gets."""
        found: dict[str, Ranges] = {}
        orders: tuple[Transfer | Restore, ...] = (*self.transfers, *self.restores)
        for order in orders:
            so_far = found.get(order.receiver, ())
            found[order.receiver] = add_ranges(so_far, order.ranges)
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Shortfall:
    """Why no epoch can be formed."""

    kind: Literal["too_few", "no_state"]
    reason: str
    ranges: Ranges = ()


def assess(state: State, *, with_joiners: bool) -> Formation | Shortfall:
    """Decide who would be in an epoch that begins now.

    Args:
        state: With a state that the fleet has agreed on.
        with_joiners: At a step boundary, and whenever nothing trains anyway.
    """
    members = choose_members(state, with_joiners=with_joiners)
    least = state.limits.min_members
    if len(members) < least:
        return Shortfall(
            kind="too_few",
            reason=f"{len(members)} members are left, min_members={least}",
        )
    needs = _needs_of(state, members)
    holders = [_holder(peer) for peer in state.holders()]
    wanting = [need for need in needs if need.ranges]
    transfers, restores = plan_transfers(wanting, holders, state.facts.known_ranges)
    if restores and not state.limits.restores_from_tier_1:
        missing: Ranges = ()
        for restore in restores:
            missing = add_ranges(missing, restore.ranges)
        what = (
            "the state" if WHOLE_STATE in missing else f"ranges {describe_ranges(missing)}"
        )
        return Shortfall(
            kind="no_state",
            reason=f"nobody holds {what} at step {state.facts.step} any more",
            ranges=missing,
        )
    return Formation(members=members, transfers=transfers, restores=restores)


def choose_members(state: State, *, with_joiners: bool) -> tuple[Peer, ...]:
    """Choose who would be in the next epoch, in order of rank.

    Who is in this one stays. Joiners come at step boundaries, since they cost the others a
    moment; and whenever the others are too few, or lack a part of the state.
    """
    staying = [peer for peer in state.peers.values() if not peer.is_draining]
    groups: list[list[Peer]] = [[p for p in staying if p.member_id in state.members]]
    if state.facts.epoch == 0:
        groups = [staying]
    elif with_joiners:
        groups[0] += [p for p in staying if p.eligible_at_s is not None]
    admitted = [peer for peer in staying if peer.may_enter(state.seen_at_s)]
    groups += [[peer for peer in admitted if state.holds_state(peer)], admitted]
    chosen: dict[str, Peer] = {}
    for group in groups:
        for peer in sorted(
            group, key=lambda p: (p.member_id not in state.members, p.order)
        ):
            if _has_room(state, chosen):
                chosen.setdefault(peer.member_id, peer)
        if len(chosen) >= state.limits.min_members and _covers(state, chosen.values()):
            break
    if not _covers(state, chosen.values()):
        # Who holds what nobody else does need not wait for its turn.
        chosen |= {p.member_id: p for p in staying if state.holds_state(p)}
    return tuple(sorted(chosen.values(), key=lambda peer: peer.order))


def is_near(state: State, peer: Peer) -> bool:
    """Whether a joiner's state is so new that the rest can be made up in a moment."""
    if peer.step < 0 or find_lacking(peer.wants, [peer.holds], state.facts.known_ranges):
        return False
    is_outrun = peer.num_heals >= state.limits.most_heals
    return is_outrun or state.facts.step - peer.step <= state.limits.catch_up_steps


def _has_room(state: State, chosen: Mapping[str, Peer]) -> bool:
    most = state.facts.most_members
    return most is None or len(chosen) < most


def _covers(state: State, chosen: Iterable[Peer]) -> bool:
    """Whether the chosen and those that leave hold the whole state among them."""
    names = {peer.member_id for peer in chosen}
    held = [
        peer.holds
        for peer in state.holders()
        if peer.member_id in names or peer.is_draining
    ]
    return not find_lacking((WHOLE_STATE,), held, state.facts.known_ranges)


def _needs_of(state: State, members: tuple[Peer, ...]) -> tuple[Need, ...]:
    known = state.facts.known_ranges
    needs, kept, sizes = [], [], {}
    for peer in members:
        held = peer.holds if state.holds_state(peer) else ()
        lacks = find_lacking(peer.wants, [held], known)
        from_step = state.facts.step if held else peer.step
        needs.append(
            Need(
                member_id=peer.member_id,
                host_id=peer.host_id,
                ranges=lacks,
                from_step=from_step,
            )
        )
        kept += [held, lacks]
        sizes[peer.member_id] = sum(part.num_elements for part in (*held, *lacks))
    orphans = find_lacking((WHOLE_STATE,), kept, known)
    return adopt_orphans(needs, orphans, sizes) if orphans else tuple(needs)


def _holder(peer: Peer) -> Holder:
    return Holder(
        member_id=peer.member_id,
        address=peer.address,
        host_id=peer.host_id,
        ranges=peer.holds,
    )
