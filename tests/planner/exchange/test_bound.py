"""The physical bound counts every cut."""

from __future__ import annotations

import pytest

from geartrain.planner.exchange import bound_s
from planner.exchange.exchange_cases import MBIT, make_topology, placement_of

MB = 1_000_000


@pytest.mark.parametrize(
    ("nics", "uplinks", "per_byte"),
    [
        ([[500] * 4] * 2, [50, 50], 1 / (50 * MBIT)),
        ([[500] * 2] * 4, [50] * 4, 1.5 / (50 * MBIT)),
        ([[100] * 7 + [25]], None, 1 / (25 * MBIT)),
        ([[100] * 8], None, 14 / (800 * MBIT)),
        ([[500] * 2] * 4, [50, 50, 12, 50], 1 / (12 * MBIT)),
    ],
)
def test_the_tightest_cut_gives_the_bound(
    nics: list[list[float]], uplinks: list[float] | None, per_byte: float
) -> None:
    topology = make_topology(nics, uplinks or ())

    found = bound_s(topology, placement_of(topology), 25 * MB)

    assert found == pytest.approx(25 * MB * per_byte)


def test_one_host_has_no_bound_by_links() -> None:
    topology = make_topology([[100, 100]])

    assert bound_s(topology, ("h0", "h0"), MB) == 0


def test_only_the_racks_that_take_part_count() -> None:
    topology = make_topology([[100, 100], [100, 100]], [1, 1])

    assert bound_s(topology, ("h0", "h1"), MB) == pytest.approx(MB / (100 * MBIT))


def test_each_direction_is_bounded_for_itself() -> None:
    topology = make_topology([[500], [500]], [50, 50], receive_uplinks_mbit=[50, 10])

    assert bound_s(topology, ("h0", "h1"), MB) == pytest.approx(MB / (10 * MBIT))
