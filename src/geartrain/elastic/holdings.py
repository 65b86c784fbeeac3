"""Who can give what to whom: transfers between members, by named ranges."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from geartrain.checkpoint.ranges import (
    StateRange,
    intersect_ranges,
    merge_ranges,
    subtract_ranges,
)
from geartrain.elastic.messages import WHOLE_STATE, Restore, Transfer

Ranges = tuple[StateRange, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """A live member that holds ranges of the fleet's state."""

    member_id: str
    address: str
    host_id: str
    ranges: Ranges


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """What a member must get."""

    member_id: str
    host_id: str
    ranges: Ranges
    from_step: int = -1
    """What it has of the same history, as in :class:`Transfer`."""


def add_ranges(ranges: Iterable[StateRange], more: Iterable[StateRange]) -> Ranges:
    """Return what lies in either; the whole state swallows all else.

    >>> add_ranges([StateRange(name="w", start=0, stop=3)], [WHOLE_STATE])
    (StateRange(name='*', start=0, stop=1),)
    """
    together = (*ranges, *more)
    return (WHOLE_STATE,) if WHOLE_STATE in together else merge_ranges(together)


def find_lacking(wanted: Ranges, held: Iterable[Ranges], known: Ranges) -> Ranges:
    """Return what of the wanted ranges nobody holds.

    Args:
        wanted: The whole state, or some of it.
        held: Of each holder.
        known: All parts that the state is known to have; they are what the whole state
            stands for where no holder has it whole.

    >>> half = (StateRange(name="w", start=0, stop=5),)
    >>> find_lacking((WHOLE_STATE,), [half], (StateRange(name="w", start=0, stop=9),))
    (StateRange(name='w', start=5, stop=9),)
    """
    together = [part for ranges in held for part in ranges]
    if WHOLE_STATE in together:
        return ()
    return subtract_ranges(_spell_out(wanted, known), together)


def plan_transfers(
    needs: Sequence[Need], holders: Sequence[Holder], known: Ranges
) -> tuple[tuple[Transfer, ...], tuple[Restore, ...]]:
    """Decide who gives what to whom.

    A giver on the same host comes first, then the one that gives least so far, in the order
    given. What a receiver is still to get is not given on by it.

    Args:
        needs: At most one of each member.
        holders: All that hold any of the fleet's state now.
        known: All parts that the state is known to have.

    Returns:
        Transfers, and restores of what nobody holds.

    >>> holders = [Holder(member_id=n, address="", host_id="h", ranges=(WHOLE_STATE,))
    ...            for n in "ab"]
    >>> needs = [Need(member_id=n, host_id="h", ranges=(WHOLE_STATE,)) for n in "xy"]
    >>> [(t.giver, t.receiver) for t in plan_transfers(needs, holders, ())[0]]
    [('a', 'x'), ('b', 'y')]
    """
    num_given = {holder.member_id: 0 for holder in holders}
    transfers: list[Transfer] = []
    restores: list[Restore] = []
    for need in needs:
        left = need.ranges
        for holder in sorted(
            (h for h in holders if h.member_id != need.member_id),
            key=lambda h: (h.host_id != need.host_id, num_given[h.member_id]),
        ):
            given, left = _give(left, holder.ranges, known)
            if given:
                num_given[holder.member_id] += 1
                transfers.append(_transfer(holder, need, given))
            if not left:
                break
        if left:
            restores.append(Restore(receiver=need.member_id, ranges=left))
    return tuple(transfers), tuple(restores)


def adopt_orphans(
    needs: Sequence[Need], orphans: Ranges, sizes: dict[str, int]
) -> tuple[Need, ...]:
    """Share out ranges that no member of an epoch holds or is to hold.

    Each goes to the member with the fewest elements, the first of equals.

    Args:
        needs: One of each member, perhaps of nothing.
        orphans: Ranges.
        sizes: Elements that each member holds or is to hold.
    """
    extra: dict[str, list[StateRange]] = {need.member_id: [] for need in needs}
    held = dict(sizes)
    for part in sorted(orphans, key=lambda part: (-part.num_elements, part)):
        taker = min(extra, key=lambda member_id: held[member_id])
        extra[taker].append(part)
        held[taker] += part.num_elements
    return tuple(
        replace(need, ranges=add_ranges(need.ranges, extra[need.member_id]))
        for need in needs
    )


def _spell_out(wanted: Ranges, known: Ranges) -> Ranges:
    named = tuple(part for part in known if part != WHOLE_STATE)
    return named if WHOLE_STATE in wanted and named else wanted


def _give(left: Ranges, held: Ranges, known: Ranges) -> tuple[Ranges, Ranges]:
    if WHOLE_STATE in held:
        return left, ()
    wanted = _spell_out(left, known)
    given = intersect_ranges(wanted, held)
    return (given, subtract_ranges(wanted, given)) if given else ((), left)


def _transfer(holder: Holder, need: Need, ranges: Ranges) -> Transfer:
    return Transfer(
        giver=holder.member_id,
        giver_address=holder.address,
        receiver=need.member_id,
        ranges=ranges,
        from_step=need.from_step,
    )
