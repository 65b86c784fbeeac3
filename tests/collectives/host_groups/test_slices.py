import pytest
from hypothesis import given
from hypothesis import strategies as st

from geartrain.collectives.host_groups.slices import (
    SLICE_ELEMENTS,
    cut_pieces,
    cut_slices,
    normalised,
)
from geartrain.errors import ConfigError


@given(st.integers(0, 10_000), st.integers(0, 10_000), st.integers(1, 5_000))
def test_pieces_cover_the_range_without_overlap(start: int, length: int, size: int) -> None:
    pieces = cut_pieces(start, start + length, size)

    assert [p[0] for p in pieces] == [start, *[p[1] for p in pieces[:-1]]]
    assert pieces[-1][1] == start + length
    assert all(0 <= stop - begin <= size for begin, stop in pieces)


@given(
    st.integers(0, 100_000),
    st.lists(st.floats(0, 100), min_size=1, max_size=9).filter(lambda s: sum(s) > 1e-3),
)
def test_slices_cover_a_piece_and_a_share_of_0_adds_nothing(
    num_elements: int, shares: list[float]
) -> None:
    fractions = normalised(shares, len(shares))

    slices = cut_slices(num_elements, fractions)

    assert [s[0] for s in slices] == [0, *[s[1] for s in slices[:-1]]]
    assert slices[-1][1] == num_elements
    for (start, stop), fraction in zip(slices, fractions, strict=True):
        assert start <= stop
        assert start % SLICE_ELEMENTS == 0 or start == num_elements
        if fraction == 0:
            assert start == stop


def test_slices_follow_the_shares() -> None:
    assert cut_slices(1000 * SLICE_ELEMENTS, (0.1, 0.0, 0.9)) == (
        (0, 3200),
        (3200, 3200),
        (3200, 32000),
    )


@pytest.mark.parametrize("shares", [[1.0], [0.0, 0.0], [1.0, -1.0], [1.0, float("nan")]])
def test_shares_that_mean_nothing_are_refused(shares: list[float]) -> None:
    with pytest.raises(ConfigError, match="expected one a process"):
        normalised(shares, 2)
