"""The pieces of a chunk tile it and follow the shares."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from geartrain.errors import ConfigError
from geartrain.planner.exchange import CommSchedule, RackPart
from geartrain.planner.exchange.ownership import Piece, chunk_bounds, pieces


def make_schedule(
    host_shares: list[list[float]], rack_shares: list[float] | None = None
) -> CommSchedule:
    """A schedule with one process a host, numbered rack by rack."""
    num_racks = len(host_shares)
    racks, position = [], 0
    for index, shares in enumerate(host_shares):
        hosts = tuple((position + i,) for i in range(len(shares)))
        position += len(shares)
        share = rack_shares[index] if rack_shares else 1 / num_racks
        part = RackPart(
            rack_id=f"rack{index}", hosts=hosts, share=share, host_shares=tuple(shares)
        )
        racks.append(part)
    return CommSchedule(
        algorithm="hierarchical", num_members=position, racks=tuple(racks), num_chunks=4
    )


@st.composite
def shares(draw: st.DrawFn, size: int) -> list[float]:
    """Shares that sum to 1, some of them 0."""
    weight = st.one_of(st.just(0.0), st.floats(0.01, 1))
    raw = draw(st.lists(weight, min_size=size, max_size=size).filter(any))
    return [value / sum(raw) for value in raw]


@st.composite
def schedules(draw: st.DrawFn) -> CommSchedule:
    sizes = draw(st.lists(st.integers(1, 6), min_size=1, max_size=6))
    host_shares = [draw(shares(size)) for size in sizes]
    return make_schedule(host_shares, draw(shares(len(sizes))))


lengths = st.one_of(st.integers(0, 40), st.integers(0, 100_000))
rows = st.sampled_from([1, 2, 7, 256, 1024])


@given(schedules(), lengths, rows, st.integers(0, 10_000))
def test_pieces_tile_the_chunk_in_order_and_none_is_empty(
    schedule: CommSchedule, length: int, row: int, start: int
) -> None:
    found = pieces(schedule, start, start + length, row)

    ends = [start, *(piece.stop for piece in found)]
    assert [piece.start for piece in found] == ends[:-1]
    assert ends[-1] == start + length
    assert all(piece.num_elements > 0 for piece in found)
    assert all((piece.start - start) % row == 0 for piece in found)


@given(schedules(), lengths, rows)
def test_every_rack_holds_its_hosts_shares_to_within_a_row(
    schedule: CommSchedule, length: int, row: int
) -> None:
    found = pieces(schedule, 0, length, row)

    for index, rack in enumerate(schedule.racks):
        for leader, share in zip(rack.leaders, rack.host_shares, strict=True):
            held = sum(p.num_elements for p in found if p.holders[index] == leader)
            assert abs(held - share * length) <= 2 * row
            assert held == 0 or share > 0


@given(schedules(), lengths, rows)
def test_racks_own_their_shares_though_every_interval_is_rounded(
    schedule: CommSchedule, length: int, row: int
) -> None:
    found = pieces(schedule, 0, length, row)

    for index, rack in enumerate(schedule.racks):
        owned = sum(piece.num_elements for piece in found if piece.owner_rack == index)
        assert owned == 0 or rack.share > 0
        if len(schedule.racks) > 2:
            assert abs(owned - rack.share * length) <= 3 * row


@given(schedules(), lengths, rows)
def test_an_owner_is_a_holder_of_its_rack(
    schedule: CommSchedule, length: int, row: int
) -> None:
    for piece in pieces(schedule, 0, length, row):
        assert piece.owner in schedule.racks[piece.owner_rack].leaders
        assert len(piece.holders) == len(schedule.racks)


def test_racks_of_three_and_five_hosts_meet_in_the_intersections_of_their_cuts() -> None:
    schedule = make_schedule([[1 / 3] * 3, [1 / 5] * 5])

    found = pieces(schedule, 0, 15)

    spans = [(p.start, p.stop, p.holders) for p in found]
    assert spans == [
        (0, 3, (0, 3)),
        (3, 5, (0, 4)),
        (5, 6, (1, 4)),
        (6, 9, (1, 5)),
        (9, 10, (1, 6)),
        (10, 12, (2, 6)),
        (12, 15, (2, 7)),
    ]


def test_three_racks_cut_an_interval_again_by_their_shares() -> None:
    schedule = make_schedule([[1.0], [1.0], [1.0]], [0.5, 0.0, 0.5])

    assert pieces(schedule, 8, 16) == (
        Piece(start=8, stop=12, owner_rack=0, holders=(0, 1, 2)),
        Piece(start=12, stop=16, owner_rack=2, holders=(0, 1, 2)),
    )


def test_a_single_rack_is_a_direct_exchange() -> None:
    schedule = make_schedule([[0.5, 0.0, 0.5]], [1.0])

    assert [(p.start, p.stop, p.owner) for p in pieces(schedule, 0, 6)] == [
        (0, 3, 0),
        (3, 6, 2),
    ]


def test_no_elements_have_no_pieces_and_no_chunks() -> None:
    schedule = make_schedule([[0.5, 0.5]])

    assert pieces(schedule, 5, 5, 4) == ()
    assert chunk_bounds(0, 8, 4) == ()


@given(lengths, st.integers(1, 40), rows)
def test_chunks_tile_the_tensor_at_rows_and_differ_by_one_row_at_most(
    length: int, num_chunks: int, row: int
) -> None:
    bounds = chunk_bounds(length, num_chunks, row)

    ends = [0, *(stop for _, stop in bounds)]
    assert [start for start, _ in bounds] == ends[:-1]
    assert ends[-1] == length
    assert len(bounds) == min(num_chunks, -(-length // row))
    assert all(start % row == 0 and stop > start for start, stop in bounds)
    num_rows = [-(-(stop - start) // row) for start, stop in bounds]
    assert not num_rows or max(num_rows) - min(num_rows) <= 1


def test_impossible_counts_are_refused_with_the_value() -> None:
    schedule = make_schedule([[1.0]])

    with pytest.raises(ConfigError, match="-1 elements"):
        pieces(schedule, 1, 0)
    with pytest.raises(ConfigError, match="num_chunks=0"):
        chunk_bounds(4, 0)
    with pytest.raises(ConfigError, match="rows of 0"):
        chunk_bounds(4, 1, 0)
