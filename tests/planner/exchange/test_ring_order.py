"""A ring visits rack after rack and avoids slow paths."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from geartrain.planner.exchange.fabric import place
from geartrain.planner.exchange.ring_order import order_ring
from planner.exchange.exchange_cases import MBIT, make_topology, placement_of


def test_hosts_of_a_rack_are_adjacent_whatever_the_order_of_members() -> None:
    topology = make_topology([[100] * 3, [100] * 3], [10, 10])
    placement = ("h3", "h0", "h4", "h1", "h5", "h2")

    order = order_ring(place(topology, placement), {})

    racks = [placement[position] in ("h0", "h1", "h2") for position in order]
    assert sum(a != b for a, b in itertools.pairwise([*racks, racks[0]])) == 2


def test_a_slow_path_is_not_in_the_ring() -> None:
    topology = make_topology([[100] * 4])
    slow = {("h0", "h1"), ("h1", "h0"), ("h2", "h3"), ("h3", "h2")}
    rates = {
        (f"h{a}", f"h{b}"): (10 if (f"h{a}", f"h{b}") in slow else 98) * MBIT
        for a in range(4)
        for b in range(4)
        if a != b
    }

    order = order_ring(place(topology, placement_of(topology)), rates)

    edges = {(f"h{a}", f"h{b}") for a, b in itertools.pairwise([*order, order[0]])}
    assert not edges & slow


@given(st.lists(st.floats(0.85, 1.0), min_size=12, max_size=12))
def test_noise_does_not_rearrange_a_ring(noise: list[float]) -> None:
    topology = make_topology([[100] * 4])
    pairs = [(f"h{a}", f"h{b}") for a in range(4) for b in range(4) if a != b]
    rates = {pair: 100 * MBIT * part for pair, part in zip(pairs, noise, strict=True)}

    assert order_ring(place(topology, placement_of(topology)), rates) == (0, 1, 2, 3)
