"""The whole probe on simulated networks: racks exact, rates right, budget kept."""

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from geartrain.topology import verification
from geartrain.topology.labels import Labels
from geartrain.topology.limits import ProbeLimits
from geartrain.topology.probe import survey_network
from geartrain.topology.profile import Topology
from simulated_network import FakeNetwork, uniform_network

NIC, UPLINK = 62.5e6, 6.25e6


def racks_found(network: FakeNetwork, topology: Topology) -> list[tuple[int, ...]]:
    index = {host.tier_id: i for i, host in enumerate(topology.hosts)}
    return sorted(tuple(sorted(index[m] for m in r.member_ids)) for r in topology.racks)


def survey(network: FakeNetwork, labels: Labels | None = None) -> Topology:
    return survey_network(network, network.descriptions(), labels)


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.integers(2, 5), min_size=1, max_size=6),
    ratio=st.floats(3.0, 40.0),
    seed=st.integers(0, 10**6),
)
def test_racks_of_any_size_are_exact_despite_noise(
    sizes: list[int], ratio: float, seed: int
) -> None:
    network = uniform_network(sizes, NIC, NIC / ratio, noise_fraction=0.15, seed=seed)
    order = list(range(len(network.rack_of)))
    random.Random(seed).shuffle(order)
    network.rack_of = [network.rack_of[i] for i in order]
    # An uplink that carries what all hosts can send at once is no boundary.
    if ratio <= max(sizes):
        return
    assert racks_found(network, survey(network)) == network.racks


@settings(max_examples=40, deadline=None)
@given(
    sizes=st.lists(st.integers(3, 5), min_size=1, max_size=4),
    slowness=st.floats(2.0, 20.0),
    position=st.integers(0, 100),
    seed=st.integers(0, 10**6),
)
def test_a_slow_host_stays_in_its_rack(
    sizes: list[int], slowness: float, position: int, seed: int
) -> None:
    network = uniform_network(sizes, NIC, UPLINK, noise_fraction=0.05, seed=seed)
    slow = position % len(network.rack_of)
    network.nics = list(network.nics)
    network.nics[slow] = (NIC / slowness, NIC / slowness)
    assert racks_found(network, survey(network)) == network.racks


@pytest.mark.parametrize("slow", [0, 3, 7])
@pytest.mark.parametrize("share", [0.9, 0.5, 0.3])
def test_a_host_slower_than_the_uplink_stays_in_its_rack(slow: int, share: float) -> None:
    network = uniform_network([4, 4], NIC, UPLINK, noise_fraction=0.05, seed=slow)
    network.nics = list(network.nics)
    network.nics[slow] = (UPLINK * share, UPLINK * share)
    assert racks_found(network, survey(network)) == network.racks


def test_slow_hosts_of_two_racks_do_not_glue_them() -> None:
    network = uniform_network([3, 3], NIC, UPLINK)
    slow = (UPLINK / 2, UPLINK / 2)
    network.nics = [(NIC, NIC), (NIC, NIC), slow, (NIC, NIC), (NIC, NIC), slow]
    assert racks_found(network, survey(network)) == network.racks


@pytest.mark.parametrize("sizes", [[1, 3, 4], [4, 1, 4], [1, 3, 3, 1]])
def test_a_host_alone_in_its_rack_is_put_into_no_other(sizes: list[int]) -> None:
    network = uniform_network(sizes, NIC, UPLINK, noise_fraction=0.05)
    assert racks_found(network, survey(network)) == network.racks


@pytest.mark.parametrize("num_hosts", [1, 2, 3])
def test_few_hosts_are_one_rack(num_hosts: int) -> None:
    network = uniform_network([num_hosts])
    assert racks_found(network, survey(network)) == [tuple(range(num_hosts))]


def test_rates_are_right_in_each_direction() -> None:
    network = FakeNetwork(
        rack_of=[0, 0, 0, 1, 1, 1, 1, 1],
        nics=[(60e6, 40e6)] * 8,
        uplinks=[(6e6, 9e6), (9e6, 12e6)],
    )
    topology = survey(network)
    for host in topology.hosts:
        assert host.uplink_send_bytes_per_s == pytest.approx(60e6, rel=0.2)
        assert host.uplink_receive_bytes_per_s == pytest.approx(40e6, rel=0.2)
    # What one rack sends is what the other can take, or the other way round.
    assert topology.racks[0].uplink_send_bytes_per_s == pytest.approx(6e6, rel=0.1)
    assert topology.racks[1].uplink_send_bytes_per_s == pytest.approx(9e6, rel=0.1)


def test_a_slow_uplink_is_told_from_the_others() -> None:
    network = uniform_network([2, 2, 2, 2], NIC, UPLINK)
    network.uplinks = [(UPLINK, UPLINK)] * 2 + [(UPLINK / 4,) * 2, (UPLINK, UPLINK)]
    rates = [rack.uplink_send_bytes_per_s for rack in survey(network).racks]
    assert rates == pytest.approx([UPLINK, UPLINK, UPLINK / 4, UPLINK], rel=0.15)


def test_a_host_faster_than_any_peer_is_measured_with_several() -> None:
    network = uniform_network([6], NIC / 4)
    network.nics = [(NIC, NIC), *network.nics[1:]]
    assert survey(network).hosts[0].uplink_send_bytes_per_s == pytest.approx(NIC, rel=0.1)


def test_the_budget_is_kept_and_its_end_is_told() -> None:
    network = uniform_network([4, 4], max_bytes=2_000_000)
    limits = ProbeLimits(max_bytes=2_000_000)
    topology = survey_network(network, network.descriptions(), limits=limits)
    assert network.sent_bytes <= 2_000_000
    assert racks_found(network, topology) == network.racks


def test_eight_hosts_cost_at_most_64_mb() -> None:
    network = uniform_network([8], max_bytes=64_000_000)
    assert survey(network).probe_bytes <= 64_000_000


def test_a_lying_label_is_overruled_and_a_note_says_so() -> None:
    network = uniform_network([4, 4])
    said = {f"h{i}": "left" if i % 2 else "right" for i in range(8)}
    topology = survey(network, Labels(rack_by_host=said, source="racks.toml"))
    assert racks_found(network, topology) == network.racks
    assert any("racks.toml" in n and "overruled" in n for n in topology.notes)


def test_a_label_of_no_host_is_told() -> None:
    network = uniform_network([2, 2], NIC, UPLINK)
    labels = Labels(rack_by_host={"nobody": "left"}, source="racks.toml")
    notes = survey(network, labels).notes
    assert "racks.toml names hosts that are not in this probe: nobody" in notes


def test_true_labels_name_the_racks_without_a_note() -> None:
    network = uniform_network([3, 5])
    said = {f"h{i}": "left" if i < 3 else "right" for i in range(8)}
    topology = survey(network, Labels(rack_by_host=said, source="racks.toml"))
    assert [rack.tier_id for rack in topology.racks] == ["left", "right"]
    assert topology.notes == ()


def test_labels_reveal_an_uplink_that_no_pair_of_hosts_fills() -> None:
    network = uniform_network([4, 4], NIC, 2 * NIC)
    said = {f"h{i}": f"rack{i // 4}" for i in range(8)}
    topology = survey(network, Labels(rack_by_host=said, source="Kubernetes"))
    assert racks_found(network, topology) == network.racks


def test_labels_that_divide_one_rack_are_overruled() -> None:
    network = uniform_network([8])
    said = {f"h{i}": f"rack{i // 4}" for i in range(8)}
    topology = survey(network, Labels(rack_by_host=said, source="host names"))
    assert len(topology.racks) == 1
    (note,) = topology.notes
    assert "host names: rack0, rack1 are taken for one rack" in note
    assert "overruled by measurement" in note


def test_labels_of_some_hosts_only_divide_no_rack_and_claim_no_test() -> None:
    network = uniform_network([4])
    said = {"h0": "rack0", "h1": "rack0", "h2": "rack1"}
    topology = survey(network, Labels(rack_by_host=said, source="host names"))
    assert len(topology.racks) == 1
    (note,) = topology.notes
    assert "some of its hosts have no label" in note
    assert "overruled" not in note


def test_a_label_whose_test_could_not_be_read_is_not_called_overruled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    network = uniform_network([8])
    said = {f"h{i}": f"rack{i // 4}" for i in range(8)}
    monkeypatch.setattr(verification, "find_qualities", lambda _: {})
    topology = survey(network, Labels(rack_by_host=said, source="host names"))
    assert len(topology.racks) == 1
    (note,) = topology.notes
    assert "could not be read" in note
    assert "overruled" not in note


@pytest.mark.parametrize("num_racks", [1, 2, 7, 25])
def test_many_hosts_take_n_log_n_pairs(num_racks: int) -> None:
    num_hosts = 300
    sizes = [num_hosts // num_racks] * num_racks
    network = uniform_network(sizes, NIC, UPLINK, noise_fraction=0.1, seed=num_racks)
    order = list(range(sum(sizes)))
    random.Random(num_racks).shuffle(order)
    network.rack_of = [network.rack_of[i] for i in order]
    topology = survey(network)
    assert racks_found(network, topology) == network.racks
    n = len(order)
    pairs = sum(link.source_id < link.target_id for link in topology.links)
    assert pairs <= 6 * n * math.log2(n)


@pytest.mark.slow
def test_a_thousand_hosts_are_put_into_their_racks() -> None:
    sizes = [20 + i % 13 for i in range(40)]
    network = uniform_network(sizes, NIC, UPLINK, noise_fraction=0.1)
    topology = survey(network)
    assert racks_found(network, topology) == network.racks
