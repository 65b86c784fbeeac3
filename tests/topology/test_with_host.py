"""Topologies and networks to which a host comes later."""

from __future__ import annotations

from dataclasses import replace

from geartrain.collectives.job_network import JobNetwork, RankFacts, with_ranks
from geartrain.topology.local import local_topology
from geartrain.topology.with_host import with_host
from topologies import make_racks

FACTS = RankFacts(
    host_id="h0",
    address="127.0.0.1",
    interface="lo",
    device_kind="cpu",
    collective_backends=("gloo",),
    core_fraction=None,
)


def test_new_host_has_a_rack_of_its_own_and_links_to_all() -> None:
    topology = make_racks([2, 2])
    before = [host.tier_id for host in topology.hosts]

    grown = with_host(topology, "new")

    assert [host.tier_id for host in grown.hosts] == [*before, "new"]
    slowest = min(link.bytes_per_s for link in topology.links)
    for other in before:
        ends = {(link.source_id, link.target_id): link for link in grown.links}
        assert ends["new", other].bytes_per_s == slowest
        assert ends[other, "new"].bytes_per_s == slowest
    assert any(rack.member_ids == ("new",) for rack in grown.racks)
    assert len(grown.links) == len(topology.links) + 2 * len(before)


def test_device_on_a_known_host_changes_no_link() -> None:
    topology = make_racks([2, 2])
    hosts = [host.tier_id for host in topology.hosts]
    ranks = tuple(replace(FACTS, host_id=host) for host in hosts)
    network = JobNetwork(topology=topology, ranks=ranks)

    grown = with_ranks(network, [ranks[0]], [str(i) for i in range(len(ranks) + 1)])

    assert grown.topology == topology
    assert grown.placement == (*network.placement, hosts[0])


def test_second_host_turns_one_host_into_a_network() -> None:
    network = JobNetwork(topology=local_topology(("a",)), ranks=(FACTS,))

    same = with_ranks(network, [FACTS], ["a", "b"])
    other = with_ranks(network, [replace(FACTS, host_id="h1")], ["a", "b"])

    assert same.is_one_host
    assert not other.is_one_host
    assert {host.tier_id for host in other.topology.hosts} == {"h0", "h1"}
