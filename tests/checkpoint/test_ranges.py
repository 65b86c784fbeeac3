from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from geartrain.checkpoint.ranges import (
    StateRange,
    check_tiling,
    describe_ranges,
    find_missing,
    intersect_ranges,
    merge_ranges,
    plan_reads,
    split_ownership,
    subtract_ranges,
    whole_ranges,
)
from geartrain.errors import CheckpointError

SIZES = {"w": 12, "b": 5, "empty": 0, "scalar": 1}


def part(name: str, start: int, stop: int) -> StateRange:
    return StateRange(name=name, start=start, stop=stop)


def elements(ranges: object) -> set[tuple[str, int]]:
    return {(p.name, i) for p in ranges for i in range(p.start, p.stop)}  # type: ignore[attr-defined] # any iterable of ranges


@st.composite
def parts(draw: st.DrawFn) -> StateRange:
    name = draw(st.sampled_from(sorted(SIZES)))
    bounds = st.integers(0, SIZES[name])
    start, stop = sorted((draw(bounds), draw(bounds)))
    return part(name, start, stop)


@given(st.lists(parts()), st.lists(parts()))
def test_ranges_behave_as_the_sets_of_their_elements(
    left: list[StateRange], right: list[StateRange]
) -> None:
    for found, expected in (
        (merge_ranges(left), elements(left)),
        (intersect_ranges(left, right), elements(left) & elements(right)),
        (subtract_ranges(left, right), elements(left) - elements(right)),
        (find_missing(left, SIZES), elements(whole_ranges(SIZES)) - elements(left)),
    ):
        assert elements(found) == expected
        assert list(found) == sorted(found)
        assert merge_ranges(found) == found


@given(st.lists(parts()))
def test_a_tiling_is_one_where_every_element_has_one_holder(
    ranges: list[StateRange],
) -> None:
    count = sum(p.num_elements for p in ranges)
    is_tiling = elements(ranges) == elements(whole_ranges(SIZES)) and count == len(
        elements(ranges)
    )

    if is_tiling:
        check_tiling(ranges, SIZES)
    else:
        with pytest.raises(CheckpointError):
            check_tiling(ranges, SIZES)


@given(st.dictionaries(st.text(), st.floats(0, 1e6), min_size=1))
def test_a_split_tiles_whatever_the_weights(weights: dict[str, float]) -> None:
    if sum(weights.values()) <= 0:
        with pytest.raises(CheckpointError, match="positive sum"):
            split_ownership(SIZES, weights)
        return

    owned = split_ownership(SIZES, weights)

    assert list(owned) == list(weights)
    check_tiling((p for held in owned.values() for p in held), SIZES)


@given(st.dictionaries(st.text(), st.lists(parts())), st.lists(parts()))
def test_reads_tile_what_is_wanted_and_ask_only_holders(
    have: dict[str, list[StateRange]], want: list[StateRange]
) -> None:
    held = elements(p for ranges in have.values() for p in ranges)
    if elements(want) - held:
        with pytest.raises(CheckpointError, match="nobody holds"):
            plan_reads(have, want)
        return

    reads = plan_reads(have, want)

    assert elements(read.range for read in reads) == elements(want)
    assert sum(read.range.num_elements for read in reads) == len(elements(want))
    for read in reads:
        assert elements([read.range]) <= elements(have[read.holder_id])


def test_the_first_holder_is_preferred() -> None:
    have = {"near": [part("w", 4, 8)], "far": [part("w", 0, 12)]}

    reads = plan_reads(have, [part("w", 0, 12)])

    assert [(read.holder_id, str(read.range)) for read in reads] == [
        ("far", "w[0:4]"),
        ("near", "w[4:8]"),
        ("far", "w[8:12]"),
    ]


def test_what_nobody_holds_is_named() -> None:
    with pytest.raises(CheckpointError, match=r"nobody holds w\[5:7\]; asked a, b; "):
        plan_reads({"a": [part("w", 0, 5)], "b": [part("w", 7, 12)]}, [part("w", 0, 12)])


@pytest.mark.parametrize(
    ("ranges", "problem"),
    [
        ([part("v", 0, 1)], r"v\[0:1\] does not exist: there is no such tensor"),
        ([part("b", 0, 6)], r"b\[0:6\] does not exist: it has 5 elements"),
        ([part("w", 0, 7), part("w", 6, 12)], r"w\[0:7\] and w\[6:12\] overlap"),
        ([part("w", 0, 12)], r"nobody holds b\[0:5\], scalar\[0:1\]"),
    ],
)
def test_what_does_not_tile_is_named(ranges: list[StateRange], problem: str) -> None:
    with pytest.raises(CheckpointError, match=problem):
        check_tiling(ranges, SIZES)


@pytest.mark.parametrize(("name", "start", "stop"), [("", 0, 1), ("w", -1, 1), ("w", 2, 1)])
def test_a_bad_range_cannot_exist(name: str, start: int, stop: int) -> None:
    with pytest.raises(CheckpointError, match="is none"):
        part(name, start, stop)


def test_many_ranges_are_named_by_the_first_few() -> None:
    text = describe_ranges([part("w", i, i + 1) for i in range(8)])

    assert text == "w[0:1], w[1:2], w[2:3], w[3:4], w[4:5] and 3 more ranges"
