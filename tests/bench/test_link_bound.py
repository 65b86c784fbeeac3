"""The bound of a step over known links, on networks small enough to reason about."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from geartrain.bench.link_bound import exchange_bound_s, step_bound
from geartrain.devices.emulation.network import LinkRate, NetworkSpec, parse_links

S = 1e6
rates = st.builds(
    LinkRate,
    send_bytes_per_s=st.floats(1e5, 1e8),
    receive_bytes_per_s=st.floats(1e5, 1e8),
)
networks = st.lists(st.lists(rates, min_size=1, max_size=3), min_size=1, max_size=3)


def test_equal_hosts_are_bound_by_what_a_ring_moves() -> None:
    assert exchange_bound_s(S, parse_links("80Mbit", 8)) == pytest.approx(2 * 7 / 8 * 0.1)


def test_slow_host_must_receive_everything_once() -> None:
    links = parse_links("800Mbit,800Mbit,800Mbit,8Mbit", 4)

    assert exchange_bound_s(S, links) == pytest.approx(1.0)


def test_slower_direction_counts() -> None:
    assert exchange_bound_s(S, parse_links("80Mbit~8Mbit", 2)) == pytest.approx(1.0)


def test_four_racks_are_bound_by_their_uplinks_together() -> None:
    assert exchange_bound_s(S, parse_links("4x2:800Mbit:8Mbit")) == pytest.approx(1.5)


def test_uplinks_of_a_single_rack_and_unshaped_ones_bound_nothing() -> None:
    fast = LinkRate.both_ways(1e8)
    slow = LinkRate.both_ways(1e6)
    single = NetworkSpec(racks=((fast, fast),), uplinks=(slow,))
    unshaped = NetworkSpec(racks=((fast, fast), (fast, fast)))

    assert exchange_bound_s(S, single) == pytest.approx(0.01)
    assert exchange_bound_s(S, unshaped) == pytest.approx(0.015)


def test_device_behind_a_link_that_costs_more_than_it_is_worth_is_left_out() -> None:
    links = parse_links("800Mbit,800Mbit,1Mbit", 3)

    bound = step_bound(100, [100.0, 100.0, 10.0], S, links)

    assert bound.num_devices == 2
    assert bound.step_s == bound.compute_s == pytest.approx(0.5)


def test_many_devices_are_searched_by_speed() -> None:
    links = parse_links(",".join(["800Mbit"] * 19 + ["1kbit"]), 20)

    bound = step_bound(190, [10.0] * 19 + [1.0], S, links)

    assert bound.num_devices == 19
    assert bound.compute_s == pytest.approx(1.0)


@given(networks, st.floats(1.0, 1e8))
def test_bound_of_a_step_is_never_above_that_of_all_devices_or_of_one(
    racks: list[list[LinkRate]], num_bytes: float
) -> None:
    spec = NetworkSpec(racks=tuple(tuple(rack) for rack in racks))
    speeds = [10.0 + index for index in range(spec.num_hosts)]

    bound = step_bound(100, speeds, num_bytes, spec)

    everybody_s = max(100 / sum(speeds), exchange_bound_s(num_bytes, spec))
    assert bound.step_s <= everybody_s * (1 + 1e-9)
    assert bound.step_s <= 100 / max(speeds) * (1 + 1e-9)
