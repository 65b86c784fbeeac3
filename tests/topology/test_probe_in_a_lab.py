"""The probe against a real network of namespaces with shaped links."""

import signal
from collections.abc import Sequence

import pytest

from geartrain.devices.emulation.network import NetworkLab, NetworkSpec, parse_links
from geartrain.errors import CommunicationError
from geartrain.topology.profile import Topology
from lab_traffic import needs_networks
from probe_lab import GOODPUT, agents_in, probe, racks_of, spinners, true_racks

ORDER = (4, 1, 6, 3, 0, 5, 7, 2)
pytestmark = [pytest.mark.root, needs_networks]


def survey(links: str, hosts: Sequence[int] = ORDER) -> tuple[NetworkSpec, Topology]:
    spec = parse_links(links)
    with NetworkLab(spec) as lab, agents_in(lab, hosts):
        return spec, probe(lab, hosts)


def check_rates(
    spec: NetworkSpec, topology: Topology, hosts: Sequence[int] = ORDER
) -> None:
    for tier, host in zip(topology.hosts, hosts, strict=True):
        nic = spec.hosts[host].send_bytes_per_s * GOODPUT
        assert tier.uplink_send_bytes_per_s == pytest.approx(nic, rel=0.25)
        assert tier.uplink_receive_bytes_per_s == pytest.approx(nic, rel=0.25)
    index = {tier.tier_id: host for tier, host in zip(topology.hosts, hosts, strict=True)}
    for rack in topology.racks:
        link = spec.uplink(spec.rack_of(index[rack.member_ids[0]]))
        assert link is not None
        rate = link.send_bytes_per_s * GOODPUT
        assert rack.uplink_send_bytes_per_s == pytest.approx(rate, rel=0.25)
        assert rack.uplink_receive_bytes_per_s == pytest.approx(rate, rel=0.25)


def test_uneven_racks_of_a_real_network_are_found_within_the_budget() -> None:
    spec, topology = survey("3+5:200Mbit:20Mbit")
    assert racks_of(topology, ORDER) == true_racks(spec)
    assert topology.probe_bytes <= 64_000_000


@pytest.mark.slow
@pytest.mark.parametrize(
    "links",
    [
        "2x4:500Mbit:50Mbit",
        "4x2:500Mbit:50Mbit,50Mbit,12Mbit,50Mbit",
        "2x4:200Mbit,200Mbit,25Mbit,200Mbit,200Mbit,200Mbit,200Mbit,200Mbit:50Mbit",
    ],
)
def test_racks_and_rates_of_a_real_network_are_right(links: str) -> None:
    spec, topology = survey(links)
    assert racks_of(topology, ORDER) == true_racks(spec)
    check_rates(spec, topology)


@pytest.mark.slow
def test_racks_are_right_while_all_cores_are_busy() -> None:
    with spinners(2):
        spec, topology = survey("2x4:200Mbit:20Mbit")
    assert racks_of(topology, ORDER) == true_racks(spec)


@pytest.mark.slow
def test_an_unreachable_host_is_named() -> None:
    spec = parse_links("1x3:200Mbit:20Mbit")
    with NetworkLab(spec) as lab, agents_in(lab, [0, 1, 2]):
        lab.cut("host2")
        with pytest.raises(CommunicationError, match=rf"{lab.host(2).address}"):
            probe(lab, [0, 1, 2])


@pytest.mark.slow
def test_a_frozen_agent_is_named_by_the_deadline() -> None:
    spec = parse_links("1x3:200Mbit:20Mbit")
    with NetworkLab(spec) as lab, agents_in(lab, [0, 1, 2]) as agents:
        agents[1].send_signal(signal.SIGSTOP)
        with pytest.raises(CommunicationError, match=rf"{lab.host(1).address}"):
            probe(lab, [0, 1, 2])
