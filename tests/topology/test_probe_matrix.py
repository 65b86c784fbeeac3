"""The probe in many labs, repeated: racks exact, rates within bounds, the budget kept.

One lab takes about half a minute and needs a machine with little else to do:
``pytest tests/topology/test_probe_matrix.py -m slow --log-cli-level INFO`` shows them.
"""

import logging
import random

import pytest

from geartrain.devices.emulation.network import (
    LinkRate,
    NetworkLab,
    NetworkSpec,
    parse_links,
)
from geartrain.topology.profile import Topology
from lab_traffic import needs_networks
from probe_lab import GOODPUT, agents_in, probe, racks_of, spinners, true_racks

logger = logging.getLogger(__name__)

LABS = {
    "flat": "1x8:500Mbit:50Mbit",
    "flat_slower": "1x8:200Mbit:50Mbit",
    "two_racks": "2x4:500Mbit:50Mbit",
    "four_racks": "4x2:500Mbit:50Mbit",
    "slow_uplink": "4x2:500Mbit:50Mbit,50Mbit,12Mbit,50Mbit",
    "uneven": "3+5:500Mbit:50Mbit",
    "slow_host": "2x4:500Mbit,500Mbit,25Mbit" + 5 * ",500Mbit" + ":50Mbit",
    "directions": "3+5:500Mbit~300Mbit:50Mbit~80Mbit",
    "pair": "1x2:500Mbit:50Mbit",
    "three": "1x3:500Mbit:50Mbit",
    "three_racks": "2+3+3:500Mbit:60Mbit",
}
REPEATS = 5
LONGEST_S = 4.0
pytestmark = [pytest.mark.root, pytest.mark.slow, needs_networks]


def errors(found: float | None, rates: list[float]) -> float:
    """How far a reading is off what its way, or what stands behind it, carries."""
    assert found is not None
    return found / (min(rates) * GOODPUT) - 1


def nic_errors(spec: NetworkSpec, topology: Topology, hosts: list[int]) -> list[float]:
    found = []
    for tier, host in zip(topology.hosts, hosts, strict=True):
        rack = [h for h in true_racks(spec)[spec.rack_of(host)] if h != host]
        nic, peers = spec.hosts[host], [spec.hosts[h] for h in rack]
        take = sum(peer.receive_bytes_per_s for peer in peers)
        give = sum(peer.send_bytes_per_s for peer in peers)
        found.append(errors(tier.uplink_send_bytes_per_s, [nic.send_bytes_per_s, take]))
        found.append(
            errors(tier.uplink_receive_bytes_per_s, [nic.receive_bytes_per_s, give])
        )
    return found


def uplink_errors(spec: NetworkSpec, topology: Topology, hosts: list[int]) -> list[float]:
    if len(topology.racks) == 1:
        return []
    index = {tier.tier_id: host for tier, host in zip(topology.hosts, hosts, strict=True)}
    links = [spec.uplink(rack) for rack in range(len(spec.racks))]
    found = []
    for tier in topology.racks:
        rack = spec.rack_of(index[tier.member_ids[0]])
        own = links[rack]
        others = [link for i, link in enumerate(links) if i != rack]
        assert isinstance(own, LinkRate)
        take = sum(link.receive_bytes_per_s for link in others if link)
        give = sum(link.send_bytes_per_s for link in others if link)
        found.append(errors(tier.uplink_send_bytes_per_s, [own.send_bytes_per_s, take]))
        found.append(
            errors(tier.uplink_receive_bytes_per_s, [own.receive_bytes_per_s, give])
        )
    return found


@pytest.mark.parametrize("load", [0, 2])
@pytest.mark.parametrize("name", LABS)
def test_racks_are_exact_and_rates_right_every_time(name: str, load: int) -> None:
    spec = parse_links(LABS[name])
    hosts = random.Random(len(name)).sample(range(spec.num_hosts), spec.num_hosts)
    with NetworkLab(spec) as lab, agents_in(lab, hosts), spinners(load):
        found = [probe(lab, hosts) for _ in range(REPEATS)]
    right = [
        topology for topology in found if racks_of(topology, hosts) == true_racks(spec)
    ]
    nics = max(abs(e) for topology in found for e in nic_errors(spec, topology, hosts))
    uplinks = max(
        (abs(e) for topology in right for e in uplink_errors(spec, topology, hosts)),
        default=0.0,
    )
    longest_s = max(topology.probe_s for topology in found)
    sent = max(topology.probe_bytes for topology in found)
    logger.info(
        "%s, %d spinning: racks %d of %d, NICs %.0f %%, uplinks %.0f %%, %.1f s, %d B",
        name, load, len(right), REPEATS, 100 * nics, 100 * uplinks, longest_s, sent,
    )  # fmt: skip
    assert len(right) == REPEATS
    assert sent <= 64_000_000
    assert max(nics, uplinks) <= 0.2
    assert longest_s <= LONGEST_S or load
