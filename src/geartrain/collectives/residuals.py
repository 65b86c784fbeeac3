"""What one member's codes lost in an exchange, and how that changes hands.

The schedule says who codes which part of every bucket, so what was lost has an owner.
When buckets, members or links change, it moves to whoever codes that part from then on.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

import torch

from geartrain.collectives.codecs.error_feedback import state_pieces
from geartrain.collectives.codecs.registry import make_codec
from geartrain.collectives.codecs.residual_ranges import Move, Piece, to_flat
from geartrain.collectives.exchange.routes import (
    place_of,
    plan_routes,
    slow_codec,
    total_codec,
)
from geartrain.collectives.lost_peers import lost_peers
from geartrain.planner.exchange.schedule import EXACT

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    import torch.distributed as dist

    from geartrain.collectives.codecs.error_feedback import ErrorFeedback
    from geartrain.collectives.codecs.residual_ranges import Layout, Span
    from geartrain.planner.exchange.schedule import CommSchedule, ScheduleBook

_WIRE_BYTES = 4
_TOTAL = "total"

State = dict[str, torch.Tensor]
"""Residuals by ``Piece.name``, each float32 of shape (num_planes, num_elements)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberResiduals:
    """Where this member's residuals are, and what they belong to.

    Args:
        book: Of the exchange.
        member: This member's position in it.
        layout: Where each bucket's elements lie in the flat gradient; the keys are those
            that buckets are exchanged by.
        partial: What codes of partial sums lost.
        total: What codes of totals lost.
    """

    book: ScheduleBook
    member: int
    layout: Layout
    partial: ErrorFeedback
    total: ErrorFeedback

    def codes(self, owner: int) -> tuple[Piece, ...]:
        """The ranges that this member codes, as pieces of ``owner``."""
        return encoded_pieces(self.book, self.layout, self.member, owner)

    def all_codes(self) -> tuple[Piece, ...]:
        """The ranges that all members code, by their positions."""
        return tuple(
            piece
            for member in range(self.book.schedules[0].num_members)
            for piece in encoded_pieces(self.book, self.layout, member, member)
        )

    def state(self) -> State:
        """Copies of all that is kept here; neighbours are joined."""
        states = []
        for key, spans in self.layout.items():
            for feedback, side in self._sides(spans):
                states.append(feedback.state(side, {key: spans}))
        return merge_states(states)

    def load(self, state: Mapping[str, torch.Tensor], moves: Sequence[Move]) -> None:
        """Add what was kept elsewhere.

        Args:
            state: The pieces that the moves start from.
            moves: Those that end here.

        Raises:
            ConfigError: If the state lacks a piece, or was kept in another way.
        """
        for key, spans in self.layout.items():
            for feedback, side in self._sides(spans):
                feedback.load(side, {key: spans}, state, moves)

    def end_step(self, *, applied: bool) -> None:
        """Close a step; see ``ErrorFeedback.end_step``."""
        for feedback in (self.partial, self.total):
            feedback.end_step(applied=applied)

    def scale_(self, factor: float) -> None:
        """Follow the loss scale; see ``ErrorFeedback.scale_``."""
        for feedback in (self.partial, self.total):
            feedback.scale_(factor)

    def clear(self) -> None:
        """Forget everything."""
        for feedback in (self.partial, self.total):
            feedback.clear()

    def _sides(self, spans: tuple[Span, ...]) -> tuple[tuple[ErrorFeedback, str], ...]:
        schedule = _schedule_of(self.book, spans)
        rack_index = place_of(schedule, self.member).rack_index
        return (
            (self.partial, _partial_side(schedule, rack_index)),
            (self.total, _TOTAL),
        )


def encoded_pieces(
    book: ScheduleBook, layout: Layout, member: int, owner: int
) -> tuple[Piece, ...]:
    """Which ranges of the flat gradient a member codes, and for which side.

    Pure: all members find the same for each other.

    Args:
        book: Of the exchange.
        layout: Of the buckets.
        member: Position of the member in the exchange.
        owner: What the pieces call it.

    Returns:
        Pieces by side and start; neighbours are joined.
    """
    ranges: list[tuple[str, int, int]] = []
    for spans in layout.values():
        schedule = _schedule_of(book, spans)
        for side, start, stop in _coded_intervals(schedule, member, _length(spans)):
            ranges.extend(
                (side, part.flat_start, part.flat_start + part.num_elements)
                for part in to_flat(spans, start, stop)
            )
    return tuple(
        Piece(owner=owner, side=side, start=start, stop=stop)
        for side, start, stop in _joined(ranges)
    )


def merge_states(states: Iterable[Mapping[str, torch.Tensor]]) -> State:
    """Join neighbouring pieces; what two of them hold of the same elements adds up."""
    tensors = [
        (piece, tensor)
        for state in states
        for piece, tensor in zip(state_pieces(state), state.values(), strict=True)
    ]
    merged: State = {}
    for side, start, stop in _joined([(p.side, p.start, p.stop) for p, _ in tensors]):
        inside = [
            (piece, tensor)
            for piece, tensor in tensors
            if piece.side == side and start <= piece.start < stop
        ]
        num_planes = inside[0][1].shape[0]
        whole = torch.zeros(num_planes, stop - start)
        for piece, tensor in inside:
            whole[:, piece.start - start : piece.stop - start].add_(tensor)
        merged[f"{side}:{start}"] = whole
    return merged


def carry_out(
    moves: Sequence[Move],
    state: Mapping[str, torch.Tensor],
    rank: int,
    group: dist.ProcessGroup | None,
    timeout_s: float,
) -> tuple[State, tuple[Move, ...]]:
    """Send what others take over from here, and receive what comes here.

    All members of the group call it with the same moves; only what moves is sent.

    Args:
        moves: Of all residuals; owners are ranks of the group.
        state: What is kept here.
        rank: This rank in the group.
        group: Carries tensors in host memory; None where nothing leaves this rank.
        timeout_s: Deadline of each message.

    Returns:
        The pieces that end here, and moves from them, for ``MemberResiduals.load``.

    Raises:
        CommunicationError: If a peer was lost or late.
    """
    num_planes = next((t.shape[0] for t in state.values()), 1)
    arrived: State = {}
    here: list[Move] = []
    under_way = []
    with lost_peers("moving what compression still owes"):
        for move in moves:
            if move.to_owner == move.source.owner == rank:
                name = f"{len(here)}/{move.source.side}:{move.start}"
                arrived[name] = _part_of(state, move)
                here.append(_moved(name, move))
            elif move.source.owner == rank and move.to_owner is not None:
                assert group is not None
                part = _part_of(state, move).reshape(-1)
                under_way.append((group.send([part], move.to_owner, 0), part))
            elif move.to_owner == rank:
                assert group is not None
                name = f"{len(here)}/{move.source.side}:{move.start}"
                part = torch.empty(num_planes * (move.stop - move.start))
                under_way.append((group.recv([part], move.source.owner, 0), part))
                arrived[name] = part.view(num_planes, -1)
                here.append(_moved(name, move))
        for work, _ in under_way:
            work.wait(timedelta(seconds=timeout_s))
    return arrived, tuple(here)


def _part_of(state: Mapping[str, torch.Tensor], move: Move) -> torch.Tensor:
    source = move.source
    columns = slice(move.start - source.start, move.stop - source.start)
    return state[source.name][:, columns].contiguous()


def _moved(name: str, move: Move) -> Move:
    """The same move, from a piece that holds nothing else."""
    side = name.rpartition(":")[0]
    source = Piece(owner=move.source.owner, side=side, start=move.start, stop=move.stop)
    return Move(
        source=source,
        start=move.start,
        stop=move.stop,
        to_owner=move.to_owner,
        to_side=move.to_side,
    )


def _coded_intervals(
    schedule: CommSchedule, member: int, num_elements: int
) -> list[tuple[str, int, int]]:
    """``(side, start, stop)`` of a bucket that the member codes; as the exchange does."""
    place = place_of(schedule, member)
    if schedule.algorithm != "hierarchical" or not place.is_leader:
        return []
    if schedule.codec == EXACT:
        return []
    rack = place.rack_index
    found = []
    for chunk in plan_routes(schedule, place, num_elements, _row_elements(schedule)):
        for piece in chunk.slow_pieces:
            adds = not chunk.swaps and piece.owner_rack == rack
            other = 1 - rack if chunk.swaps else piece.owner_rack
            codec = total_codec(schedule) if adds else slow_codec(schedule, rack, other)
            if codec != EXACT:
                side = _TOTAL if adds else _partial_side(schedule, rack)
                found.append((side, piece.start, piece.stop))
    return found


def _row_elements(schedule: CommSchedule) -> int:
    names = {rack.codec for rack in schedule.racks} - {EXACT}
    return math.lcm(*(make_codec(name).row_elements for name in names))


def _partial_side(schedule: CommSchedule, rack_index: int) -> str:
    return f"partial-{schedule.racks[rack_index].rack_id}"


def _schedule_of(book: ScheduleBook, spans: tuple[Span, ...]) -> CommSchedule:
    return book.schedule_for(_length(spans) * _WIRE_BYTES)


def _length(spans: tuple[Span, ...]) -> int:
    return sum(span.num_elements for span in spans)


def _joined(ranges: Sequence[tuple[str, int, int]]) -> list[tuple[str, int, int]]:
    """Join ranges of a side that touch or overlap."""
    joined: list[tuple[str, int, int]] = []
    for side, group in itertools.groupby(sorted(ranges), key=lambda r: r[0]):
        first = len(joined)
        for _, start, stop in group:
            if len(joined) > first and joined[-1][2] >= start:
                _, begin, end = joined.pop()
                joined.append((side, begin, max(end, stop)))
            else:
                joined.append((side, start, stop))
    return joined
