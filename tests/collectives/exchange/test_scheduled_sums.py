"""Whatever the schedule and the timing: the exact sum, with the same bits everywhere."""

from __future__ import annotations

import itertools
import math
from typing import Any, Literal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from collectives.exchange.memory_network import World, one_size, racks_of
from geartrain.collectives.exchange.scheduled_collective import ScheduledCollective
from geartrain.errors import CommunicationError, ConfigError
from geartrain.planner.exchange.schedule import CommSchedule, ScheduleBook

Algorithm = Literal["local", "ring", "leader", "hierarchical"]


def schedule_of(
    sizes: list[list[int]], algorithm: Algorithm = "hierarchical", **fields: Any
) -> CommSchedule:
    shares = {k: fields.pop(k, None) for k in ("host_shares", "rack_shares", "codecs")}
    racks = racks_of(sizes, **shares)
    return CommSchedule(
        algorithm=algorithm,
        num_members=sum(map(sum, sizes)),
        racks=racks,
        **fields,
    )


def shares(draw: st.DrawFn, count: int) -> list[float]:
    """Non-negative and adding up to 1, some of them 0."""
    parts = draw(st.lists(st.integers(0, 3), min_size=count, max_size=count))
    total = sum(parts)
    return [part / total for part in parts] if total else [1 / count] * count


@st.composite
def schedules(draw: st.DrawFn) -> CommSchedule:
    hosts = st.lists(st.sampled_from([1, 1, 1, 2]), min_size=1, max_size=3)
    sizes = draw(
        st.lists(hosts, min_size=1, max_size=4).filter(lambda s: sum(map(sum, s)) < 7)
    )
    algorithm: Algorithm = draw(st.sampled_from(["hierarchical", "leader", "ring"]))
    racks = racks_of(
        sizes, [shares(draw, len(hosts)) for hosts in sizes], shares(draw, len(sizes))
    )
    leaders = [leader for rack in racks for leader in rack.leaders]
    return CommSchedule(
        algorithm=algorithm,
        num_members=sum(map(sum, sizes)),
        racks=racks,
        ring_order=tuple(draw(st.permutations(leaders))) if algorithm == "ring" else (),
        num_chunks=draw(st.integers(1, 5)),
    )


@settings(max_examples=60, deadline=None)
@given(
    schedule=schedules(),
    sizes=st.lists(st.integers(0, 40), min_size=1, max_size=4),
    seed=st.integers(0, 99),
)
def test_every_schedule_gives_every_member_the_exact_sum(
    schedule: CommSchedule, sizes: list[int], seed: int
) -> None:
    # Small integers, so that every order of adding is exact.
    def run(me: int, member: ScheduledCollective) -> list[torch.Tensor]:
        tensors = [torch.arange(float(n)) + 100 * i + me for i, n in enumerate(sizes)]
        pending = [member.all_reduce(tensor) for tensor in tensors]
        for exchange in reversed(pending):
            exchange.wait()
        return tensors

    with World(one_size(schedule), seed) as world:
        results = world.each(run)

    n = schedule.num_members
    for tensors in results:
        for i, (tensor, size) in enumerate(zip(tensors, sizes, strict=True)):
            expected = n * (torch.arange(float(size)) + 100 * i) + n * (n - 1) / 2
            assert torch.equal(tensor, expected)


@pytest.mark.parametrize(
    "schedule",
    [
        schedule_of([[1, 1, 1], [1, 1]], num_chunks=3),
        schedule_of([[1, 1], [1], [1, 1]], num_chunks=2),
        schedule_of([[1, 1], [1], [1, 1]], "leader"),
        schedule_of([[1, 1, 1, 1]], host_shares=[[0.0, 0.5, 0.25, 0.25]], num_chunks=4),
    ],
    ids=["two racks", "three racks", "leaders", "one rack"],
)
def test_sums_have_the_same_bits_on_all_members_and_in_all_runs(
    schedule: CommSchedule,
) -> None:
    def run(me: int, member: ScheduledCollective) -> torch.Tensor:
        generator = torch.Generator().manual_seed(me)
        tensor = torch.randn(1001, generator=generator)
        member.all_reduce(tensor).wait()
        return tensor

    runs = []
    for seed in range(3):
        with World(one_size(schedule), seed) as world:
            runs += world.each(run)

    assert all(torch.equal(runs[0], other) for other in runs)
    exact = sum(
        torch.randn(1001, generator=torch.Generator().manual_seed(me)).double()
        for me in range(schedule.num_members)
    )
    torch.testing.assert_close(runs[0].double(), exact, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16]
)
def test_sums_keep_their_dtype_and_round_once(dtype: torch.dtype) -> None:
    # In 16 bits 2048 + 1 + 1 is lost or not, by order; in float32 it never is.
    parts = [2048.0, 1.0, 1.0, 2.0]

    def run(me: int, member: ScheduledCollective) -> torch.Tensor:
        tensor = torch.full((7,), parts[me], dtype=dtype)
        member.all_reduce(tensor).wait()
        return tensor

    with World(one_size(schedule_of([[1, 1], [1, 1]]))) as world:
        for result in world.each(run):
            assert result.dtype == dtype
            assert torch.equal(result, torch.full((7,), 2052.0).to(dtype))


def test_any_shape_and_layout_is_summed_in_place() -> None:
    def run(_: int, member: ScheduledCollective) -> list[torch.Tensor]:
        whole = torch.ones(4, 6)
        tensors = [
            whole[:, ::2],
            torch.ones(3, 5).t(),
            torch.tensor(1.0),
            torch.ones(0, 3),
        ]
        for exchange in [member.all_reduce(tensor) for tensor in tensors]:
            exchange.wait()
        return [*tensors, whole]

    with World(one_size(schedule_of([[1, 2], [1]], num_chunks=2))) as world:
        for strided, transposed, scalar, empty, whole in world.each(run):
            assert torch.equal(strided, torch.full((4, 3), 4.0))
            assert torch.equal(transposed, torch.full((5, 3), 4.0))
            assert scalar.item() == 4.0
            assert empty.shape == (0, 3)
            assert whole[:, 1].tolist() == [1.0] * 4


def test_parts_are_weighted_and_a_part_of_weight_zero_is_not_read() -> None:
    weights = [0.5, 0.25, 0.0]

    def run(me: int, member: ScheduledCollective) -> torch.Tensor:
        tensor = torch.full((9,), math.nan if me == 2 else 8.0)
        member.all_reduce(tensor, weights[me]).wait()
        return tensor

    with World(one_size(schedule_of([[1, 1], [1]], num_chunks=2))) as world:
        for result in world.each(run):
            assert result.tolist() == [6.0] * 9


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("algorithm", ["hierarchical", "leader"])
def test_what_is_not_finite_reaches_every_member(bad: float, algorithm: Algorithm) -> None:
    def run(me: int, member: ScheduledCollective) -> torch.Tensor:
        tensor = torch.ones(10)
        if me == 1:
            tensor[3] = bad
        member.all_reduce(tensor).wait()
        return tensor

    with World(one_size(schedule_of([[1, 1], [1, 1]], algorithm, num_chunks=2))) as world:
        for result in world.each(run):
            assert torch.isfinite(result).tolist() == [i != 3 for i in range(10)]


def test_sizes_take_the_schedules_of_their_class() -> None:
    small = schedule_of([[1, 1], [1]], "leader", num_bytes=64, predicted_s=0.25)
    large = schedule_of([[1, 1], [1]], num_chunks=2, num_bytes=4096, predicted_s=1.0)
    book = ScheduleBook(up_to_bytes=(64, 4096), schedules=(small, large))

    def run(_: int, member: ScheduledCollective) -> list[tuple[str, int, float]]:
        for num_elements in (16, 17, 0):
            member.all_reduce(torch.ones(num_elements)).wait()
        assert member.predict_s(32) == 0.25
        assert member.predict_s(8192) == 2.0
        return [(o.algorithm, o.num_bytes, o.predicted_s) for o in member.observations()]

    with World(book) as world:
        for seen in world.each(run):
            assert [entry[:2] for entry in seen] == [("leader", 64), ("hierarchical", 68)]
            assert 0.25 == seen[0][2] < seen[1][2] < 0.26


def test_what_an_exchange_took_is_told_once() -> None:
    def run(_: int, member: ScheduledCollective) -> None:
        for exchange in [member.all_reduce(torch.ones(50), key="a") for _ in range(3)]:
            exchange.wait()
        seen = member.observations()
        assert [o.index for o in seen] == [0, 1, 2]
        assert member.observations() == ()
        for observation in seen:
            assert observation.key == "a"
            assert 0 <= observation.observed_s <= sum(observation.stage_s.values()) + 30
            assert set(observation.stage_s) == {
                "host sum",
                "rack sum",
                "slow hop",
                "hand out",
                "publish",
            }
        starts = [o.started_at_s for o in seen]
        assert starts == sorted(starts)
        assert all(b.started_at_s >= a.done_at_s for a, b in itertools.pairwise(seen))

    with World(one_size(schedule_of([[1, 1], [1]], num_chunks=2))) as world:
        world.each(run)


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64])
def test_what_cannot_be_weighted_is_refused(dtype: torch.dtype) -> None:
    with (
        World(one_size(schedule_of([[1], [1]]))) as world,
        pytest.raises(ConfigError, match=r"cannot sum torch\..* only float64.*convert"),
    ):
        world.members[0].all_reduce(torch.ones(3, dtype=dtype))


def test_a_book_for_other_members_is_refused() -> None:
    with World(one_size(schedule_of([[1], [1]]))) as world:
        member = world.members[0]
        with pytest.raises(ConfigError, match="for 3 members, the epoch has 2"):
            ScheduledCollective(
                member._links.transport,
                world.groups[0],
                one_size(schedule_of([[1], [1, 1]])),
                ["a", "b"],
            )
        with pytest.raises(ConfigError, match="codes with int8 but no codecs"):
            ScheduledCollective(
                member._links.transport,
                world.groups[0],
                one_size(schedule_of([[1], [1]], codecs=["int8", "none"])),
                ["a", "b"],
            )


def test_calling_does_not_wait_for_anybody() -> None:
    def first_only(me: int, member: ScheduledCollective) -> list[float]:
        tensors = [torch.ones(100) for _ in range(40)]
        if me == 1:
            return []
        pending = [member.all_reduce(tensor) for tensor in tensors]
        assert not any(exchange.is_done for exchange in pending)
        return []

    with World(one_size(schedule_of([[1], [1]], num_chunks=4))) as world:
        world.each(first_only)  # 40 buckets are queued while nobody else has come

    with pytest.raises(CommunicationError, match="stopped: it was closed"):
        world.members[0].all_reduce(torch.ones(1))
