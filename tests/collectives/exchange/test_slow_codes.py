"""Codes on the slow hop: the same bits everywhere, nothing lost for good."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from collectives.exchange.memory_network import World, one_size, racks_of
from geartrain.collectives.codecs.error_feedback import ErrorFeedback
from geartrain.collectives.codecs.registry import make_codec
from geartrain.collectives.exchange.scheduled_collective import (
    ExchangeSettings,
    ScheduledCollective,
)
from geartrain.planner.exchange.schedule import CommSchedule, ScheduleBook

_N = 5000


def coded_book(sizes: list[list[int]], codecs: list[str], **fields: Any) -> ScheduleBook:
    return one_size(
        CommSchedule(
            algorithm="hierarchical",
            num_members=sum(map(sum, sizes)),
            racks=racks_of(sizes, codecs=codecs, **fields),
            num_chunks=3,
        )
    )


def settings(_: int) -> ExchangeSettings:
    return ExchangeSettings(make_codec=make_codec)


def with_feedback(_: int) -> ExchangeSettings:
    return ExchangeSettings(
        make_codec=make_codec,
        partial_feedback=ErrorFeedback(),
        total_feedback=ErrorFeedback(),
    )


def part_of(me: int) -> torch.Tensor:
    return torch.randn(_N, generator=torch.Generator().manual_seed(me))


def sum_of_parts(num_members: int) -> torch.Tensor:
    return torch.stack([part_of(me) for me in range(num_members)]).sum(0)


def summed(me: int, member: ScheduledCollective) -> torch.Tensor:
    tensor = part_of(me)
    member.all_reduce(tensor, key="g").wait()
    return tensor


def relative_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got - expected).norm() / expected.norm())


RACKS = {
    "two racks": ([[1, 1], [1]], ["int8", "int8"]),
    "one of two codes": ([[1, 1], [1]], ["int8", "none"]),
    "three racks": ([[1, 1], [1], [1, 1]], ["int8"] * 3),
    "one of three codes": ([[1], [1, 1], [1]], ["none", "int8", "none"]),
    "two codecs": ([[1], [1, 1], [1]], ["fp16", "int8", "none"]),
}


@pytest.mark.parametrize("feedback", [settings, with_feedback])
@pytest.mark.parametrize(("sizes", "codecs"), RACKS.values(), ids=RACKS)
def test_coded_sums_are_close_and_have_the_same_bits_everywhere(
    sizes: list[list[int]], codecs: list[str], feedback: Any
) -> None:
    with World(coded_book(sizes, codecs), settings=feedback) as world:
        results = world.each(summed)

    assert all(torch.equal(results[0], other) for other in results)
    exact = sum_of_parts(len(results))
    assert 0 < relative_error(results[0], exact) < 0.02


@pytest.mark.parametrize(("sizes", "codecs"), RACKS.values(), ids=RACKS)
def test_only_what_crosses_racks_is_coded(
    sizes: list[list[int]], codecs: list[str]
) -> None:
    with World(coded_book(sizes, codecs), settings=settings) as world:
        world.each(summed)
        coded = dict(world.network.num_bytes)
    with World(coded_book(sizes, ["none"] * len(sizes))) as world:
        world.each(summed)
        exact = dict(world.network.num_bytes)

    assert coded.get("rack-in") == exact.get("rack-in")
    assert coded.get("rack-out") == exact.get("rack-out")
    assert coded["across-out"] < exact["across-out"]
    if len(sizes) > 2:
        assert coded["across-back"] < 0.55 * exact["across-back"]


def test_without_a_name_or_in_float64_sums_are_exact() -> None:
    def run(me: int, member: ScheduledCollective) -> None:
        counts = torch.tensor([1 / 3, 1e-9, 1e9]) * (me + 1)
        member.all_reduce(counts).wait()
        assert torch.equal(counts, torch.tensor([1 / 3, 1e-9, 1e9]) * 3)
        double = part_of(me).double()
        member.all_reduce(double, key="g").wait()
        assert torch.equal(double, part_of(0).double() + part_of(1).double())
        codecs = [observation.codec for observation in member.observations()]
        assert codecs == ["none", "none"]

    with World(coded_book([[1], [1]], ["int8", "int8"]), settings=settings) as world:
        world.each(run)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("sizes", [[[1, 1], [1]], [[1], [1], [1]]])
def test_what_is_not_finite_passes_every_code(bad: float, sizes: list[list[int]]) -> None:
    def run(me: int, member: ScheduledCollective) -> torch.Tensor:
        tensor = part_of(me)
        if me == 1:
            tensor[_N // 2] = bad
        member.all_reduce(tensor, key="g").wait()
        return tensor

    codecs = ["int8"] * len(sizes)
    with World(coded_book(sizes, codecs), settings=with_feedback) as world:
        for result in world.each(run):
            assert not math.isfinite(float(result[_N // 2]))


@pytest.mark.parametrize("sizes", [[[1, 1], [1]], [[1], [1], [1, 1]]])
@pytest.mark.parametrize("codec", ["int4", "topk"])
def test_what_a_code_lost_comes_in_later_steps(sizes: list[list[int]], codec: str) -> None:
    num_steps = 20

    def run(me: int, member: ScheduledCollective) -> torch.Tensor:
        total = torch.zeros(_N)
        for _ in range(num_steps):
            tensor = part_of(me)
            member.all_reduce(tensor, key="g").wait()
            total += tensor
        return total

    codecs = [codec] * len(sizes)
    with World(coded_book(sizes, codecs), settings=settings) as world:
        forgetful = world.each(run)[0]
    with World(coded_book(sizes, codecs), settings=with_feedback) as world:
        careful = world.each(run)[0]

    exact = num_steps * sum_of_parts(sum(map(sum, sizes)))
    assert relative_error(careful, exact) < 0.35 * relative_error(forgetful, exact)
