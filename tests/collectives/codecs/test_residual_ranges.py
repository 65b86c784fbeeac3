import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from geartrain.collectives.codecs.residual_ranges import (
    Piece,
    Span,
    lay_out,
    plan_moves,
    to_buckets,
    to_flat,
)
from geartrain.errors import ConfigError


def piece(owner: int, start: int, stop: int, side: str = "total") -> Piece:
    return Piece(owner=owner, side=side, start=start, stop=stop)


def cut(edges: list[int], owners: list[int], side: str) -> list[Piece]:
    ends = sorted(set(edges) | {0, 100})
    return [
        piece(owners[i % len(owners)], low, high, side)
        for i, (low, high) in enumerate(itertools.pairwise(ends))
    ]


def test_a_range_goes_to_whoever_encodes_it_now() -> None:
    moves = plan_moves(
        [piece(0, 0, 60), piece(1, 60, 100)], [piece(1, 0, 30), piece(2, 30, 100)]
    )
    assert [(m.source.owner, m.start, m.stop, m.to_owner) for m in moves] == [
        (0, 0, 30, 1),
        (0, 30, 60, 2),
        (1, 60, 100, 2),
    ]


def test_a_range_stays_with_its_side_while_that_side_encodes_it() -> None:
    new = [piece(1, 0, 10, "partial-a"), piece(2, 0, 10, "partial-b")]
    (move,) = plan_moves([piece(0, 0, 10, "partial-b")], new)
    assert (move.to_owner, move.to_side) == (2, "partial-b")


def test_a_side_that_is_gone_leaves_its_losses_to_another() -> None:
    new = [piece(2, 0, 10, "partial-b"), piece(1, 0, 10, "partial-a")]
    (move,) = plan_moves([piece(0, 0, 10, "partial-z")], new)
    assert (move.to_owner, move.to_side) == (1, "partial-a")


def test_what_nobody_encodes_any_more_is_said_to_be_lost() -> None:
    moves = plan_moves([piece(0, 0, 10)], [piece(1, 0, 4)])
    assert [(m.start, m.stop, m.to_owner) for m in moves] == [(0, 4, 1), (4, 10, None)]


@given(
    old_edges=st.lists(st.integers(1, 99), max_size=5),
    new_edges=st.lists(st.integers(1, 99), max_size=5),
    old_owners=st.lists(st.integers(0, 5), min_size=1, max_size=4),
    new_owners=st.lists(st.integers(0, 5), min_size=1, max_size=4),
    new_side=st.sampled_from(["total", "partial-a"]),
)
def test_every_element_moves_exactly_once_and_to_its_new_owner(
    old_edges: list[int],
    new_edges: list[int],
    old_owners: list[int],
    new_owners: list[int],
    new_side: str,
) -> None:
    old = cut(old_edges, old_owners, "total")
    new = cut(new_edges, new_owners, new_side)
    owner_of = {i: p.owner for p in new for i in range(p.start, p.stop)}
    seen = []
    for move in plan_moves(old, new):
        assert move.source.start <= move.start < move.stop <= move.source.stop
        assert move.to_side == new_side
        for i in range(move.start, move.stop):
            assert move.to_owner == owner_of[i]
            seen.append(i)
    assert sorted(seen) == list(range(100))


def test_buckets_and_the_flat_gradient_name_the_same_elements() -> None:
    sizes = [3, 5, 2]
    layout = lay_out(sizes, {"0": [2, 1], "1": [0]})
    assert to_flat(layout["0"], 1, 4) == (
        Span(bucket_start=1, flat_start=9, num_elements=1),
        Span(bucket_start=2, flat_start=3, num_elements=2),
    )
    assert to_buckets(layout, 2, 4) == (
        ("0", Span(bucket_start=2, flat_start=3, num_elements=1)),
        ("1", Span(bucket_start=2, flat_start=2, num_elements=1)),
    )


def test_an_empty_piece_is_refused() -> None:
    with pytest.raises(ConfigError, match="empty"):
        piece(0, 5, 5)
