"""This member's part in each chunk of a schedule: pure arithmetic, cut once a size."""

from __future__ import annotations

from dataclasses import dataclass

from geartrain.errors import ConfigError
from geartrain.planner.exchange.ownership import Piece, chunk_bounds, pieces
from geartrain.planner.exchange.schedule import EXACT, CommSchedule

_TWO_RACKS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a member stands in a schedule."""

    rack_index: int
    host_index: int
    """Within its rack."""
    is_leader: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkRoute:
    """Which elements of a chunk this member holds, and with whom it exchanges them."""

    start: int
    stop: int
    rack_cuts: tuple[tuple[int, int], ...]
    """What each host of this member's rack holds; empty intervals are possible."""
    slow_pieces: tuple[Piece, ...]
    """What this member holds of its rack's sum, for the exchange between racks."""
    swaps: bool
    """Racks swap whole partial sums and all add them, instead of the owner alone."""


def place_of(schedule: CommSchedule, member: int) -> Place:
    """Find a member in a schedule.

    Raises:
        ConfigError: If it is not there.
    """
    for rack_index, rack in enumerate(schedule.racks):
        for host_index, host in enumerate(rack.hosts):
            if member in host:
                return Place(
                    rack_index=rack_index,
                    host_index=host_index,
                    is_leader=host[0] == member,
                )
    msg = f"the schedule has no member {member}, only 0..{schedule.num_members - 1}"
    raise ConfigError(msg)


def plan_routes(
    schedule: CommSchedule, place: Place, num_elements: int, row_elements: int
) -> tuple[ChunkRoute, ...]:
    """This member's route of every chunk.

    Args:
        schedule: Any but ``ring``.
        place: Of a leader.
        num_elements: Length of the flat tensor.
        row_elements: What the codec codes together; 1 without one.
    """
    bounds = chunk_bounds(num_elements, schedule.num_chunks, row_elements)
    if schedule.algorithm == "leader":
        return tuple(_leader_route(schedule, place, start, stop) for start, stop in bounds)
    return tuple(
        _shared_route(schedule, place, pieces(schedule, start, stop, row_elements))
        for start, stop in bounds
    )


def slow_codec(schedule: CommSchedule, first_rack: int, second_rack: int) -> str:
    """The codec of partial sums between two racks: that of a rack that has one.

    Where both have one the alphabetically first is taken, so that both agree.
    """
    names = {schedule.racks[i].codec for i in (first_rack, second_rack)} - {EXACT}
    return min(names, default=EXACT)


def total_codec(schedule: CommSchedule) -> str:
    """The codec of totals, one for all racks.

    A total that went to one rack coded and to another exact would differ between them.
    """
    names = {rack.codec for rack in schedule.racks} - {EXACT}
    return min(names, default=EXACT)


def _leader_route(
    schedule: CommSchedule, place: Place, start: int, stop: int
) -> ChunkRoute:
    """The rack's first host holds everything; rack leaders swap whole sums."""
    num_hosts = len(schedule.racks[place.rack_index].hosts)
    holders = tuple(rack.leaders[0] for rack in schedule.racks)
    whole = Piece(start=start, stop=stop, owner_rack=0, holders=holders)
    several = len(schedule.racks) > 1 and place.host_index == 0
    return ChunkRoute(
        start=start,
        stop=stop,
        rack_cuts=((start, stop), *((stop, stop),) * (num_hosts - 1)),
        slow_pieces=(whole,) if several else (),
        swaps=True,
    )


def _shared_route(
    schedule: CommSchedule, place: Place, chunk: tuple[Piece, ...]
) -> ChunkRoute:
    leaders = schedule.racks[place.rack_index].leaders
    start, stop = chunk[0].start, chunk[-1].stop
    cuts, begin = [], start
    for leader in leaders:
        held = [p.stop for p in chunk if p.holders[place.rack_index] == leader]
        end = max(held, default=begin)
        cuts.append((begin, end))
        begin = end
    mine = leaders[place.host_index]
    held_here = tuple(p for p in chunk if p.holders[place.rack_index] == mine)
    swaps = len(schedule.racks) == _TWO_RACKS
    return ChunkRoute(
        start=start,
        stop=stop,
        rack_cuts=tuple(cuts),
        slow_pieces=() if len(schedule.racks) == 1 else _merge(held_here, swaps=swaps),
        swaps=swaps,
    )


def _merge(held: tuple[Piece, ...], *, swaps: bool) -> tuple[Piece, ...]:
    """Join neighbours that take the same way, so that they travel as one message."""
    merged: list[Piece] = []
    for piece in held:
        last = merged[-1] if merged else None
        same_way = (
            last is not None
            and last.stop == piece.start
            and last.holders == piece.holders
            and (swaps or last.owner_rack == piece.owner_rack)
        )
        if last is not None and same_way:
            merged[-1] = Piece(
                start=last.start,
                stop=piece.stop,
                owner_rack=last.owner_rack,
                holders=last.holders,
            )
        else:
            merged.append(piece)
    return tuple(merged)
