"""Shares by water-filling are the optimum of the linear program."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from geartrain.planner.exchange.bound import fabric_bound_s
from geartrain.planner.exchange.fabric import Fabric, place
from geartrain.planner.exchange.shares import fill_shares
from planner.exchange.exchange_cases import MBIT, make_topology, placement_of

rates = st.sampled_from([10.0, 12.5, 25.0, 50.0, 100.0, 200.0, 470.0, 500.0])


def fabric_of(nics: list[list[float]], uplinks: list[float] | None = None) -> Fabric:
    topology = make_topology(nics, uplinks or ())
    return place(topology, placement_of(topology))


@st.composite
def fabrics(draw: st.DrawFn) -> Fabric:
    nics = draw(st.lists(st.lists(rates, min_size=1, max_size=5), min_size=1, max_size=5))
    uplinks = draw(st.lists(rates, min_size=len(nics), max_size=len(nics)))
    return fabric_of(nics, uplinks if len(nics) > 1 else None)


@settings(max_examples=60, deadline=None)
@given(fabrics(), st.sampled_from([1.0, 0.25]))
def test_the_time_is_that_of_the_linear_program(fabric: Fabric, fraction: float) -> None:
    optimize = pytest.importorskip("scipy.optimize", reason="scipy solves the program")
    num_racks = len(fabric.racks)
    sizes = [len(rack.hosts) for rack in fabric.racks]
    num_hosts = sum(sizes)
    # Variables: x_r, then z_h = s_h k_r, then T (in seconds per megabyte).
    upper: list[list[float]] = []
    limits: list[float] = []
    equal = [[1.0] * num_racks + [0.0] * (num_hosts + 1)]
    sums = [1.0]
    first = num_racks
    for index, rack in enumerate(fabric.racks):
        slope = fraction * (num_racks - 2) if num_racks > 1 else 0.0
        base = fraction if num_racks > 1 else 0.0
        row = [0.0] * (num_racks + num_hosts + 1)
        row[index], row[-1] = slope, -rack.bytes_per_s / 1e6
        upper.append(row)
        limits.append(-base)
        held = [0.0] * (num_racks + num_hosts + 1)
        held[index] = slope
        alone = len(rack.hosts) == 1
        for number, host in enumerate(rack.hosts):
            held[first + number] = -1.0
            row = [0.0] * (num_racks + num_hosts + 1)
            row[first + number], row[-1] = 1.0, -host.bytes_per_s / 1e6
            upper.append(row)
            limits.append(0.0 if alone else -1.0)
        equal.append(held)
        sums.append(-(base if alone else len(rack.hosts) - 2 + base))
        first += len(rack.hosts)
    costs = [0.0] * (num_racks + num_hosts) + [1.0]
    bounds = [(0, 1)] * num_racks + [(0, None)] * (num_hosts + 1)
    solved = optimize.linprog(costs, upper, limits, equal, sums, bounds)

    shares = fill_shares(fabric, [fraction] * num_racks)

    assert shares.s_per_byte * 1e6 == pytest.approx(solved.fun, rel=1e-6)


@given(fabrics())
def test_shares_sum_to_one_and_a_slower_host_never_has_more(fabric: Fabric) -> None:
    shares = fill_shares(fabric)

    assert sum(shares.racks) == pytest.approx(1)
    for rack, held in zip(fabric.racks, shares.hosts, strict=True):
        assert sum(held) == pytest.approx(1)
        by_rate = sorted(zip((h.bytes_per_s for h in rack.hosts), held, strict=True))
        assert [share for _, share in by_rate] == sorted(share for _, share in by_rate)


@given(st.lists(rates, min_size=3, max_size=6))
def test_a_slower_uplink_never_has_more(uplinks: list[float]) -> None:
    shares = fill_shares(fabric_of([[1000.0, 1000.0]] * len(uplinks), uplinks)).racks

    by_rate = sorted(zip(uplinks, shares, strict=True))
    assert [share for _, share in by_rate] == sorted(share for _, share in by_rate)


@given(fabrics())
def test_no_shares_beat_the_physical_bound(fabric: Fabric) -> None:
    assert fill_shares(fabric).s_per_byte >= (1 - 1e-9) * fabric_bound_s(fabric, 1)


@pytest.mark.parametrize(
    ("nics", "uplinks", "ratio"),
    [
        ([[500] * 4] * 2, [50, 50], 0.571),
        ([[500] * 2] * 4, [50] * 4, 0.857),
        ([[100] * 7 + [25]], None, 0.571),
        ([[200] * 4, [200, 25, 200, 200]], [50, 50], 0.571),
        ([[500] * 2] * 4, [50, 50, 12, 50], 0.571),
    ],
)
def test_the_fluid_optimum_over_the_best_ring_is_the_known_one(
    nics: list[list[float]], uplinks: list[float] | None, ratio: float
) -> None:
    fabric = fabric_of(nics, uplinks)
    slowest = min([n for rack in nics for n in rack] + (uplinks or [])) * MBIT
    ring_s_per_byte = 2 * 7 / 8 / slowest

    assert fill_shares(fabric).s_per_byte / ring_s_per_byte == pytest.approx(
        ratio, abs=1e-3
    )


def test_the_slowest_of_very_unequal_links_owns_nothing() -> None:
    assert fill_shares(fabric_of([[400, 400, 100]])).hosts == ((0.5, 0.5, 0.0),)
    assert fill_shares(fabric_of([[500]] * 4, [50, 50, 12, 50])).racks[2] == 0


def test_two_racks_swap_halves_whatever_their_uplinks() -> None:
    assert fill_shares(fabric_of([[500], [500]], [50, 12])).racks == (0.5, 0.5)


def test_a_rack_whose_hosts_are_slow_owns_less_than_its_uplink_would_allow() -> None:
    fabric = fabric_of([[1000] * 2, [1000] * 2, [60] * 2], [100] * 3)

    slow = fill_shares(fabric).racks[2]

    assert slow < 0.5 * fill_shares(fabric).racks[0]


def test_the_slower_direction_counts() -> None:
    topology = make_topology([[500]] * 3, [50, 50, 50], receive_uplinks_mbit=[50, 50, 20])

    shares = fill_shares(place(topology, placement_of(topology)))

    assert shares.racks[2] == 0
    assert shares.s_per_byte == pytest.approx(1 / (20 * MBIT))
