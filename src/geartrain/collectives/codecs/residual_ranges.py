"""Who keeps which residual, in element ranges of the model's flat gradient. No torch.

Buckets and owners change with the plan; the flat gradient, all parameters one after the
other in the model's order, does not. What a code lost is therefore saved and moved by
ranges of it.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING

from geartrain.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Elements of a bucket that lie one after the other in the flat gradient too."""

    bucket_start: int
    flat_start: int
    num_elements: int


Layout = dict[str, tuple[Span, ...]]
"""Each bucket's spans, by the bucket's key, in the bucket's order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A range of the flat gradient whose codes one member writes."""

    owner: int
    side: str
    """Which code: ``partial-RACK`` or ``total``; equal names on all members."""
    start: int
    stop: int

    def __post_init__(self) -> None:
        if not 0 <= self.start < self.stop:
            msg = f"piece {self.side}: range {self.start}..{self.stop} must not be empty"
            raise ConfigError(msg)

    @property
    def name(self) -> str:
        """Its name in a saved state."""
        return f"{self.side}:{self.start}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """A range whose residual goes from one owner to another (or stays)."""

    source: Piece
    start: int
    stop: int
    to_owner: int | None
    """None: nobody encodes this range any more, so what was lost there stays lost."""
    to_side: str


def lay_out(
    sizes: Sequence[int], buckets: Mapping[str, Sequence[int]]
) -> dict[str, tuple[Span, ...]]:
    """Where the elements of each bucket lie in the flat gradient.

    Args:
        sizes: Elements of each parameter, in the model's order.
        buckets: By key, the parameters in each bucket, in the bucket's order.

    >>> lay_out([2, 3], {"0": [1, 0]})["0"][1]
    Span(bucket_start=3, flat_start=0, num_elements=2)
    """
    starts = [sum(sizes[:index]) for index in range(len(sizes))]
    layout: dict[str, tuple[Span, ...]] = {}
    for key, parameters in buckets.items():
        spans, bucket_start = [], 0
        for index in parameters:
            spans.append(
                Span(
                    bucket_start=bucket_start,
                    flat_start=starts[index],
                    num_elements=sizes[index],
                )
            )
            bucket_start += sizes[index]
        layout[key] = tuple(spans)
    return layout


def to_flat(spans: Sequence[Span], start: int, stop: int) -> tuple[Span, ...]:
    """The parts of a bucket's interval, as ranges of the flat gradient."""
    parts = []
    for span in spans:
        low = max(start, span.bucket_start)
        high = min(stop, span.bucket_start + span.num_elements)
        if low < high:
            flat_start = span.flat_start + low - span.bucket_start
            parts.append(
                Span(bucket_start=low, flat_start=flat_start, num_elements=high - low)
            )
    return tuple(parts)


def to_buckets(layout: Layout, start: int, stop: int) -> tuple[tuple[str, Span], ...]:
    """The buckets' intervals that make up a range of the flat gradient."""
    parts = []
    for key, spans in layout.items():
        for span in spans:
            low = max(start, span.flat_start)
            high = min(stop, span.flat_start + span.num_elements)
            if low < high:
                bucket_start = span.bucket_start + low - span.flat_start
                part = Span(
                    bucket_start=bucket_start, flat_start=low, num_elements=high - low
                )
                parts.append((key, part))
    return tuple(parts)


def plan_moves(old: Sequence[Piece], new: Sequence[Piece]) -> tuple[Move, ...]:
    """Which residuals go where when owners, racks or cuts change.

    A range stays with its side where that side still encodes it. Otherwise the side
    that comes first by name takes it: the codes of all sides end in the same sum, so
    what one of them lost may be sent by any other.

    Args:
        old: Former owners that still have their residuals; a lost member's are gone.
        new: Owners from now on. One side's pieces do not overlap.

    Returns:
        Moves that cover every old piece exactly once, in the order of ``old``.
    """
    return tuple(move for source in old for move in _moves_of(source, new))


def _moves_of(source: Piece, new: Sequence[Piece]) -> list[Move]:
    touching = [p for p in new if p.start < source.stop and source.start < p.stop]
    inside = {edge for p in touching for edge in (p.start, p.stop)}
    edges = sorted(
        {source.start, source.stop}
        | {edge for edge in inside if source.start < edge < source.stop}
    )
    moves: list[Move] = []
    for start, stop in itertools.pairwise(edges):
        takers = [p for p in touching if p.start <= start and stop <= p.stop]
        taker = min(takers, key=lambda p: (p.side != source.side, p.side), default=None)
        owner = None if taker is None else taker.owner
        side = source.side if taker is None else taker.side
        last = moves[-1] if moves else None
        if last is not None and (last.to_owner, last.to_side) == (owner, side):
            start = moves.pop().start  # noqa: PLW2901 - one move less to carry out
        moves.append(
            Move(source=source, start=start, stop=stop, to_owner=owner, to_side=side)
        )
    return moves
