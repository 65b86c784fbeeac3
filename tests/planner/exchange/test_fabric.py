"""Members are placed on the hosts and racks of a topology."""

from __future__ import annotations

import dataclasses

import pytest

from geartrain.errors import ConfigError
from geartrain.planner.exchange.fabric import (
    ASSUMED_LATENCY_S,
    TCP_GOODPUT_FRACTION,
    place,
)
from geartrain.topology.profile import LinkProfile, Tier, Topology
from planner.exchange.exchange_cases import MBIT, make_topology


def test_members_of_a_host_are_one_host_and_idle_hosts_are_left_out() -> None:
    topology = make_topology([[100, 100], [100, 100]], [10, 10])

    fabric = place(topology, ("h1", "h0", "h1"))

    assert [rack.rack_id for rack in fabric.racks] == ["rack0"]
    assert [host.members for host in fabric.hosts] == [(1,), (0, 2)]


def test_measured_rates_are_payload_already_and_labelled_ones_are_not() -> None:
    measured = place(make_topology([[100, 100]]), ("h0", "h1"))
    labelled = place(make_topology([[100, 100]], source="labels"), ("h0", "h1"))

    assert measured.hosts[0].bytes_per_s == pytest.approx(100 * MBIT)
    assert labelled.hosts[0].bytes_per_s == pytest.approx(TCP_GOODPUT_FRACTION * 100 * MBIT)


def test_latency_is_the_median_inside_racks_and_between_them() -> None:
    topology = make_topology([[100] * 3, [100] * 3], [10, 10], latency_s=1e-3)
    inside = {("h0", "h1"), ("h1", "h2"), ("h2", "h0"), ("h3", "h4"), ("h4", "h5")}
    inside |= {(b, a) for a, b in inside} | {("h3", "h5"), ("h5", "h3")}
    links = tuple(
        dataclasses.replace(link, latency_s=1e-4)
        if (link.source_id, link.target_id) in inside
        else link
        for link in topology.links
    )

    fabric = place(dataclasses.replace(topology, links=links), ("h0", "h1", "h3", "h4"))

    assert (fabric.rack_latency_s, fabric.fabric_latency_s) == (1e-4, 1e-3)


def test_unmeasured_latency_is_assumed_and_measured_zero_is_not() -> None:
    unknown = place(make_topology([[100, 100]]), ("h0", "h1"))
    zero = place(make_topology([[100, 100]], latency_s=0.0), ("h0", "h1"))

    assert unknown.rack_latency_s == ASSUMED_LATENCY_S
    assert zero.rack_latency_s == 0


def test_a_rack_without_an_uplink_figure_has_the_rate_of_its_hosts() -> None:
    topology = make_topology([[100, 100], [50]])

    fabric = place(topology, ("h0", "h1", "h2"))

    assert [rack.bytes_per_s for rack in fabric.racks] == [200 * MBIT, 50 * MBIT]


def test_device_links_give_the_slowest_device_in_each_direction() -> None:
    topology = make_topology([[100, 100]])
    links = (
        LinkProfile(source_id="g0", target_id="h0", bytes_per_s=8e9, latency_s=0),
        LinkProfile(source_id="g1", target_id="h0", bytes_per_s=6e9, latency_s=0),
        LinkProfile(source_id="h0", target_id="g0", bytes_per_s=9e9, latency_s=0),
    )

    host = place(dataclasses.replace(topology, links=links), ("h0", "h1")).hosts[0]

    assert (host.to_host_bytes_per_s, host.from_host_bytes_per_s) == (6e9, 9e9)


def test_a_host_that_is_not_known_is_named() -> None:
    with pytest.raises(ConfigError, match="elsewhere"):
        place(make_topology([[100, 100]]), ("h0", "elsewhere"))


def test_a_host_without_any_rate_is_refused_unless_it_is_alone() -> None:
    hosts = tuple(Tier(kind="host", tier_id=i, member_ids=()) for i in ("a", "b"))
    rack = Tier(kind="rack", tier_id="r", member_ids=("a", "b"))
    topology = Topology(tiers=(*hosts, rack))

    with pytest.raises(ConfigError, match="no rate"):
        place(topology, ("a", "b"))
    assert place(topology, ("a", "a")).num_members == 2


def test_hosts_of_a_lone_rack_can_be_seen_as_racks_of_one() -> None:
    fabric = place(make_topology([[100, 50]]), ("h0", "h1")).split()

    assert [rack.bytes_per_s for rack in fabric.racks] == [100 * MBIT, 50 * MBIT]
    assert [len(rack.hosts) for rack in fabric.racks] == [1, 1]
