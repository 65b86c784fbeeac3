"""Labels, interfaces, identities, arrivals and rounds: the pure parts."""

import itertools
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from geartrain.errors import ConfigError
from geartrain.topology.agent_protocol import AgentAddress
from geartrain.topology.arrivals import joint_rate, tail_rate
from geartrain.topology.host_identity import make_host_identity, read_host_identity
from geartrain.topology.interfaces import InterfaceAddress, choose_interface
from geartrain.topology.labels import (
    labels_from_hostnames,
    labels_from_kubernetes,
    labels_from_scontrol,
    read_labels,
)
from geartrain.topology.local import local_topology
from geartrain.topology.tournament import disjoint_rounds, tournament_rounds

TREE = """\
SwitchName=s0 Level=0 LinkSpeed=1 Nodes=tux[0-3]
SwitchName=s1 Level=0 LinkSpeed=1 Nodes=tux[4-7],login
SwitchName=s2 Level=1 LinkSpeed=1 Nodes=tux[0-7] Switches=s[0-1]
"""
BLOCK = """\
BlockName=b1 BlockIndex=0 Nodes=node[01-02] BlockSize=2
BlockName=b2 BlockIndex=1 Nodes=node[03-04] BlockSize=2
AggregatedBlock=b[1-2] BlockIndex=2 Nodes=node[01-04] BlockSize=4
"""
ETH0 = InterfaceAddress(interface="eth0", address="10.0.0.1", bytes_per_s=1.25e8)
ETH1 = InterfaceAddress(interface="eth1", address="10.9.0.1", bytes_per_s=3e9)
DOCKER = InterfaceAddress(interface="docker0", address="172.17.0.1", bytes_per_s=9e9)
LO = InterfaceAddress(interface="lo", address="127.0.0.1")
SIX = InterfaceAddress(interface="eth0", address="fe80::1%eth0", bytes_per_s=1.25e8)


@given(st.integers(1, 40))
def test_a_tournament_holds_every_pair_once_and_no_host_twice_a_round(n: int) -> None:
    rounds = tournament_rounds(n)
    assert sorted(itertools.chain(*rounds)) == list(itertools.combinations(range(n), 2))
    assert len(rounds) == (0 if n == 1 else n - 1 + n % 2)
    for pairs in rounds:
        busy = list(itertools.chain(*pairs))
        assert len(busy) == len(set(busy))


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(10, 19)), max_size=40))
def test_disjoint_rounds_lose_no_group(groups: list[tuple[int, int]]) -> None:
    rounds = disjoint_rounds(groups)
    assert sorted(itertools.chain(*rounds)) == list(range(len(groups)))
    for positions in rounds:
        busy = [host for position in positions for host in groups[position]]
        assert len(busy) == len(set(busy))


def test_a_token_bucket_does_not_raise_the_rate() -> None:
    rate, bucket = 1e6, 40_000
    arrivals = [(1e-5 * i, 4000 * i) for i in range(1, 11)]
    arrivals += [(1e-4 + 4000 * i / rate, bucket + 4000 * i) for i in range(1, 21)]
    reading = tail_rate(arrivals)
    assert reading is not None
    assert reading.bytes_per_s == pytest.approx(rate, rel=0.01)


def test_a_burst_that_came_in_one_lump_gives_no_rate() -> None:
    assert tail_rate([(0.0, 100), (5.0, 90_000)]) is None


def test_flows_that_never_ran_together_give_no_joint_rate() -> None:
    early = [(i * 0.01, i * 1000) for i in range(1, 20)]
    late = [(at_s + 1.0, count) for at_s, count in early]
    assert joint_rate([early, late]) is None


def test_leaf_switches_are_racks() -> None:
    racks = labels_from_scontrol(TREE).rack_by_host
    assert (racks["tux3"], racks["tux4"], racks["login"]) == ("s0", "s1", "s1")


def test_blocks_are_racks() -> None:
    racks = labels_from_scontrol(BLOCK).rack_by_host
    assert racks == {"node01": "b1", "node02": "b1", "node03": "b2", "node04": "b2"}


@pytest.mark.parametrize("text", ["", "slurm_load_topo error", "SwitchName=s0 Nodes=n[1-"])
def test_other_text_is_no_topology(text: str) -> None:
    with pytest.raises(ConfigError, match="expected"):
        labels_from_scontrol(text)


def test_the_narrowest_kubernetes_label_that_all_nodes_have_decides() -> None:
    zone, rack = "topology.kubernetes.io/zone", "topology.kubernetes.io/rack"
    nodes = {
        "n1": {zone: "z", rack: "r1"},
        "n2": {zone: "z", rack: "r2"},
        "n3": {zone: "z"},
    }
    assert set(labels_from_kubernetes(nodes).rack_by_host.values()) == {"z"}
    del nodes["n3"]
    assert labels_from_kubernetes(nodes).rack_by_host == {"n1": "r1", "n2": "r2"}


@pytest.mark.parametrize(
    ("names", "racks"),
    [
        (["rack12-node3", "rack13-node3"], {"rack12", "rack13"}),
        (["gpu-r01-n1.example.org", "gpu-r02-n1.example.org"], {"rack1", "rack2"}),
        (["rack1-a", "rack1-b"], set()),
        (["server1", "server2"], set()),
    ],
)
def test_host_names_hold_racks(names: list[str], racks: set[str]) -> None:
    assert set(labels_from_hostnames(names).rack_by_host.values()) == racks


def test_a_file_of_racks_is_read_as_toml_and_json(tmp_path: Path) -> None:
    toml, json = tmp_path / "racks.toml", tmp_path / "racks.json"
    toml.write_text('[racks]\nleft = ["n1"]\nright = ["10.0.0.2"]\n')
    json.write_text('{"racks": {"left": ["n1"], "right": ["10.0.0.2"]}}')
    assert read_labels(toml).rack_by_host == read_labels(json).rack_by_host
    assert read_labels(toml).rack_of(["n1.example.org"]) == "left"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "racks = 3",
        "[racks]\nleft = [3]",
        '[racks]\na = ["n"]\nb = ["n"]',
        "[",
        "[racks]",
    ],
)
def test_a_file_without_racks_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "racks.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"racks\.toml"):
        read_labels(path)


def test_the_interface_that_routes_to_the_peers_is_chosen_and_a_faster_one_told() -> None:
    choice = choose_interface(
        ["10.0.0.7"], addresses=[LO, ETH0, ETH1, DOCKER], route=lambda _: "10.0.0.1"
    )
    assert (choice.interface, choice.address) == ("eth0", "10.0.0.1")
    assert "eth1" in choice.notes[0]
    assert "faster" in choice.notes[0]
    assert "docker" not in choice.notes[0]


def test_without_peers_the_fastest_that_is_no_bridge_is_chosen() -> None:
    assert choose_interface(addresses=[LO, SIX, ETH0, DOCKER]).address == "10.0.0.1"
    assert choose_interface(addresses=[LO, ETH0, ETH1]).interface == "eth1"
    assert choose_interface(addresses=[LO]).interface == "lo"


def test_an_interface_can_be_named_by_name_or_address() -> None:
    for name in ("docker0", "172.17.0.1"):
        assert choose_interface(name=name, addresses=[ETH0, DOCKER]).interface == "docker0"
    with pytest.raises(ConfigError, match=r"no interface 'ib0'.*eth0"):
        choose_interface(name="ib0", addresses=[ETH0])


def test_peers_without_a_route_are_named() -> None:
    with pytest.raises(ConfigError, match=r"no route to 10\.7\.7\.7"):
        choose_interface(["10.7.7.7"], addresses=[LO, ETH0], route=lambda _: None)


def test_one_host_needs_boot_id_and_network_namespace_to_agree() -> None:
    one = make_host_identity("n", "boot1", "net1").host_id
    others = [("boot1", "net2"), ("boot2", "net1")]
    assert one == make_host_identity("other name of it", "boot1", "net1").host_id.replace(
        "other-name-of-it", "n"
    )
    assert all(make_host_identity("n", *other).host_id != one for other in others)


def test_a_system_without_proc_has_an_identity_too(tmp_path: Path) -> None:
    assert read_host_identity(tmp_path) == read_host_identity(tmp_path)


def test_a_single_host_needs_no_network() -> None:
    topology = local_topology(["cpu:0"], measure_memory=True)
    assert topology.hosts[0].member_ids == ("cpu:0",)
    assert (topology.hosts[0].inner_bytes_per_s or 0) > 0
    assert (topology.probe_bytes, topology.links) == (0, ())


@pytest.mark.parametrize("text", ["host", "host:", "::1:77", "a:0", "a:99999", ":80"])
def test_a_malformed_agent_address_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="agent"):
        AgentAddress.parse(text)
