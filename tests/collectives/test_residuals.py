"""Who codes what is known from the schedule, and what is owed can change hands."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from collectives.exchange.memory_network import World, one_size, racks_of
from geartrain.collectives.codecs.error_feedback import ErrorFeedback, state_pieces
from geartrain.collectives.codecs.registry import make_codec
from geartrain.collectives.codecs.residual_ranges import Piece, lay_out, plan_moves
from geartrain.collectives.exchange.scheduled_collective import (
    ExchangeSettings,
    ScheduledCollective,
)
from geartrain.collectives.residuals import (
    MemberResiduals,
    carry_out,
    encoded_pieces,
    merge_states,
)
from geartrain.errors import CommunicationError
from geartrain.planner.exchange.schedule import CommSchedule, ScheduleBook
from local_ranks import run_ranks

SIZES = [700, 900, 1300, 64]
BUCKETS = {"bucket0": (3, 2), "bucket1": (1, 0)}
LAYOUT = lay_out(SIZES, BUCKETS)
NUM_ELEMENTS = sum(SIZES)


def book(
    sizes: list[list[int]],
    codecs: list[str],
    algorithm: str = "hierarchical",
    **fields: Any,
) -> ScheduleBook:
    return one_size(
        CommSchedule(
            algorithm=algorithm,  # type: ignore[arg-type]  # a name of the test's
            num_members=sum(map(sum, sizes)),
            racks=racks_of(sizes, codecs=codecs, **fields),
            num_chunks=3,
            ring_order=tuple(range(len(sizes))) if algorithm == "ring" else (),
        )
    )


def after_one_exchange(exchange: ScheduleBook) -> list[MemberResiduals]:
    """What every member owes once both buckets have been summed."""
    members = [
        MemberResiduals(
            book=exchange,
            member=member,
            layout=LAYOUT,
            partial=ErrorFeedback(),
            total=ErrorFeedback(),
        )
        for member in range(exchange.schedules[0].num_members)
    ]

    def settings(me: int) -> ExchangeSettings:
        return ExchangeSettings(
            make_codec=make_codec,
            partial_feedback=members[me].partial,
            total_feedback=members[me].total,
        )

    def sum_all(me: int, member: ScheduledCollective) -> None:
        for seed, (key, parameters) in enumerate(BUCKETS.items()):
            generator = torch.Generator().manual_seed(10 * me + seed)
            count = sum(SIZES[index] for index in parameters)
            bucket = torch.randn(count, generator=generator)
            member.all_reduce(bucket, key=key).wait()

    with World(exchange, settings=settings) as world:
        world.each(sum_all)
    return members


BOOKS = {
    "two racks": book([[1, 1], [1, 1]], ["int8", "int8"]),
    "several processes a host": book([[2, 1], [1, 3]], ["int4", "int4"]),
    "uneven racks": book([[1], [1, 1, 1]], ["int8", "int8"]),
    "three racks": book([[1, 1], [1], [1, 2]], ["int8"] * 3),
    "one rack is exact": book([[1, 1], [1], [1, 1]], ["none", "int8", "none"]),
    "two codecs": book([[1], [1], [1]], ["int8", "int4", "none"]),
}


@pytest.mark.parametrize("name", BOOKS)
def test_the_schedule_says_who_owes_what(name: str) -> None:
    for member in after_one_exchange(BOOKS[name]):
        kept = state_pieces(member.state(), owner=member.member)
        assert kept == member.codes(member.member)


@pytest.mark.parametrize(
    "exact",
    [
        book([[1], [1]], ["none", "none"]),
        book([[2, 1]], ["int8"]),
        book([[1], [1]], ["int8", "int8"], "leader"),
        book([[1], [1]], ["int8", "int8"], "ring"),
    ],
    ids=["no codec", "one rack", "leader", "ring"],
)
def test_nobody_owes_anything_where_nothing_is_coded(exact: ScheduleBook) -> None:
    for member in after_one_exchange(exact):
        assert member.codes(0) == ()
        assert member.state() == {}


def test_each_rack_codes_all_that_it_does_not_add_up_itself() -> None:
    exchange = BOOKS["three racks"]
    pieces = [p for m in range(6) for p in encoded_pieces(exchange, LAYOUT, m, m)]
    times = torch.zeros(NUM_ELEMENTS)
    for piece in pieces:
        times[piece.start : piece.stop] += 1
    # Two racks send partial sums of an element to the third, which sends the total.
    assert torch.equal(times, torch.full((NUM_ELEMENTS,), 3.0))


def whole(states: list[dict[str, torch.Tensor]]) -> torch.Tensor:
    """All that is owed, by element."""
    total = torch.zeros(NUM_ELEMENTS, dtype=torch.float64)
    for state in states:
        for piece in state_pieces(state):
            total[piece.start : piece.stop] += state[piece.name][0]
    return total


def move(
    rank: int, world_size: int, old: ScheduleBook, new: ScheduleBook, new_layout: Any
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """For run_ranks: each rank is the member of both exchanges; before and after."""
    before = after_one_exchange(old)
    states = [member.state() for member in before]
    after = MemberResiduals(
        book=new,
        member=rank,
        layout=new_layout,
        partial=ErrorFeedback(),
        total=ErrorFeedback(),
    )
    old_pieces = [p for m, s in enumerate(states) for p in state_pieces(s, owner=m)]
    new_pieces = [
        piece
        for member in range(world_size)
        for piece in encoded_pieces(new, new_layout, member, member)
    ]
    moves = plan_moves(old_pieces, new_pieces)
    arrived, here = carry_out(moves, states[rank], rank, dist.group.WORLD, 20.0)
    after.load(arrived, here)
    kept, coded = state_pieces(after.state(), rank), after.codes(rank)
    for piece in kept:
        assert any(
            c.side == piece.side and c.start <= piece.start and piece.stop <= c.stop
            for c in coded
        )
    return states[rank], after.state()


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("two racks", "three racks of four"),
        ("three racks of four", "two racks"),
        ("two racks", "two racks"),
    ],
)
def test_what_is_owed_goes_to_who_codes_it_and_nothing_is_lost(old: str, new: str) -> None:
    books = BOOKS | {"three racks of four": book([[1, 1], [1], [1]], ["int8"] * 3)}
    new_layout = lay_out(SIZES, {"bucket0": (3,), "bucket1": (2, 1, 0)})
    results = run_ranks(move, 4, books[old], books[new], new_layout)
    before, after = whole([b for b, _ in results]), whole([a for _, a in results])
    assert float(before.abs().sum()) > 0
    torch.testing.assert_close(after, before, rtol=0, atol=1e-6)


def test_states_of_several_ranks_become_one_whatever_their_cuts() -> None:
    merged = merge_states(
        [
            {"total:4": torch.ones(1, 3), "partial-a:0": torch.ones(1, 2)},
            {"total:7": torch.full((1, 1), 2.0)},
            {"total:6": torch.full((1, 2), 4.0), "total:20": torch.ones(1, 1)},
        ]
    )
    assert {name: tensor.tolist() for name, tensor in merged.items()} == {
        "partial-a:0": [[1.0, 1.0]],
        "total:4": [[1.0, 1.0, 5.0, 6.0]],
        "total:20": [[1.0]],
    }


def lose_a_peer(rank: int, world_size: int) -> str:
    """For run_ranks: rank 1 never sends."""
    del world_size
    if rank == 1:
        return ""
    source = Piece(owner=1, side="total", start=0, stop=4)
    moves = plan_moves([source], [Piece(owner=0, side="total", start=0, stop=4)])
    with pytest.raises(CommunicationError) as caught:
        carry_out(moves, {}, rank, dist.group.WORLD, 0.5)
    return str(caught.value)


def test_a_peer_that_does_not_send_ends_the_wait() -> None:
    message, _ = run_ranks(lose_a_peer, 2)
    assert "moving what compression still owes failed" in message
