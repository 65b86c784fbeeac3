"""Facts of a host are read from what the kernel shows, and their absence has a reason."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from fabric_hosts import (
    GPU,
    NIC,
    NVIDIA,
    FakeHost,
    dgx_like,
    laptop,
    limits,
    right_roce,
    wrong_roce,
)
from geartrain.telemetry.documents import decode_document, encode_document
from geartrain.topology.fabric.affinity import nearest_nics, pci_distance
from geartrain.topology.fabric.facts import FabricFacts, PciDevice
from geartrain.topology.fabric.flow_control import parse_mlnx_qos
from geartrain.topology.fabric.read import read_fabric


def test_every_gpu_of_a_large_host_has_a_card_below_its_switch(tmp_path: Path) -> None:
    facts = dgx_like(tmp_path).read()

    near = nearest_nics(facts)

    assert [one.nearest for one in near] == [(f"mlx5_{index}",) for index in range(8)]
    assert {one.distance for one in near} == {"PIX"}


def test_cards_on_the_other_cpu_are_farthest(tmp_path: Path) -> None:
    first = nearest_nics(dgx_like(tmp_path).read())[0]

    assert first.distances["mlx5_3"] == "NODE"
    assert first.distances["mlx5_4"] == "SYS"


def test_rdma_port_tells_state_rate_and_layer(tmp_path: Path) -> None:
    device = dgx_like(tmp_path).read().rdma_devices[0]

    (port,) = device.active_ports
    assert (device.name, port.link_layer, port.bytes_per_s) == (
        "mlx5_0",
        "InfiniBand",
        50e9,
    )


def test_pcie_link_is_compared_with_its_best(tmp_path: Path) -> None:
    facts = wrong_roce(tmp_path).read()

    link = next(one.link for one in facts.pci_devices if one.kind == "ethernet")

    assert link is not None
    assert (link.num_lanes, link.max_num_lanes) == (4, 16)
    assert link.bytes_per_s == pytest.approx(7.88e9, rel=0.01)
    assert (link.transfers_per_s, link.max_transfers_per_s) == (16e9, 32e9)


def test_flow_control_comes_from_sysfs_and_tools(tmp_path: Path) -> None:
    (flow,) = {one.flow_control for one in right_roce(tmp_path).read().interfaces}

    only_three = tuple(priority == 3 for priority in range(8))
    assert (flow.pfc, flow.ecn_notification, flow.ecn_reaction) == (only_three,) * 3
    assert flow.trust == "dscp"


def test_pfc_table_of_mlnx_qos_is_read() -> None:
    text = (
        "DCBX mode: OS controlled\nPriority trust state: dscp\n"
        "dscp2prio mapping:\n\tprio:0 dscp:07,06,05,04,03,02,01,00,\n"
        "PFC configuration:\n\tpriority    0   1   2   3   4   5   6   7\n"
        "\tenabled     0   0   0   1   0   0   0   0   \n"
        "tc: 0 ratelimit: unlimited, tsa: vendor\n"
    )

    pfc, trust = parse_mlnx_qos(text)

    assert pfc == tuple(priority == 3 for priority in range(8))
    assert trust == "dscp"


def test_absent_tool_is_an_absent_fact_with_its_reason(tmp_path: Path) -> None:
    facts = laptop(tmp_path).read()

    reasons = {absent.what: absent.reason for absent in facts.absent}
    wireless = facts.interface("wlan0")
    assert wireless is not None
    assert wireless.flow_control.pfc is None
    assert "mlnx_qos is not installed" in reasons["PFC of wlan0"]
    assert reasons["NVLink"].startswith("NVML does not start")
    assert "does not exist" in reasons["RDMA devices"]


def test_unknown_speed_is_none_and_not_a_number(tmp_path: Path) -> None:
    facts = laptop(tmp_path).read()

    speeds = {one.name: one.bytes_per_s for one in facts.interfaces}
    assert speeds == {"wlan0": None, "eth0": None, "docker0": 1.25e9}


def test_bridge_is_not_physical_and_unplugged_port_not_up(tmp_path: Path) -> None:
    facts = laptop(tmp_path).read()

    states = {one.name: (one.is_physical, one.is_up) for one in facts.interfaces}
    assert states == {
        "wlan0": (True, True),
        "eth0": (True, False),
        "docker0": (False, True),
    }


def test_interface_finds_its_pci_device_below_a_bus_of_its_own(tmp_path: Path) -> None:
    host = FakeHost(tmp_path)
    host.pci("pci0000:00", "0000:00:03.0", code=NIC, vendor="0x1af4")
    virtio = host.sys / "devices/pci0000:00/0000:00:03.0/virtio2"
    virtio.mkdir()
    host.interface("eth0", virtio)

    (interface,) = host.read().interfaces

    assert interface.pci_address == "0000:00:03.0"


def test_console_graphics_of_a_server_is_no_gpu(tmp_path: Path) -> None:
    host = FakeHost(tmp_path)
    host.pci("pci0000:00", "0000:00:05.0", code="0x030000", vendor="0x1a03")
    host.pci("pci0000:00", "0000:00:06.0", code=GPU, vendor=NVIDIA)

    assert [one.address for one in host.read().accelerators] == ["0000:00:06.0"]


def test_bond_tells_mode_hash_and_members(tmp_path: Path) -> None:
    host = FakeHost(tmp_path)
    host.interface(
        "bond0",
        megabits=50_000,
        bonding__mode="802.3ad 4",
        bonding__xmit_hash_policy="layer3+4 1",
        bonding__slaves="ens1 ens2",
        bonding__miimon=100,
    )

    (interface,) = host.read().interfaces

    assert interface.bond is not None
    assert (interface.bond.mode, interface.bond.transmit_hash) == ("802.3ad", "layer3+4")
    assert interface.bond.member_names == ("ens1", "ens2")
    assert interface.bond.monitor_interval_s == pytest.approx(0.1)


def test_ipv6_default_route_counts_as_one(tmp_path: Path) -> None:
    host = FakeHost(tmp_path)
    host.interface("eth0", routed=False)
    zero = "0" * 32
    fields = (zero, "00", zero, "00", "fe80" + "0" * 28, "400", "1", "0", "00000003")
    host.write(host.proc / "net/ipv6_route", " ".join((*fields, "eth0")))

    (interface,) = host.read().interfaces

    assert interface.is_default_route
    assert interface.has_address


@pytest.mark.parametrize(
    ("locked", "expected"), [("unlimited", (True, None)), ("65536", (False, 65536))]
)
def test_limit_of_pinned_memory_is_read(
    tmp_path: Path, locked: str, expected: tuple[bool, int | None]
) -> None:
    host = FakeHost(tmp_path)
    host.write(host.proc / "self/limits", limits(locked))

    facts = host.read()

    found = (facts.is_locked_memory_unlimited, facts.locked_memory_limit_bytes)
    assert found == expected


def test_empty_root_gives_facts_without_any(tmp_path: Path) -> None:
    host = FakeHost(tmp_path / "host")

    facts = read_fabric(tmp_path / "no", tmp_path / "such", ask=host.ask, host="bare")

    assert facts.interfaces == ()
    assert facts.pci_devices == ()
    assert facts.is_locked_memory_unlimited is None


@pytest.mark.parametrize("tree", [dgx_like, wrong_roce, right_roce, laptop])
def test_facts_read_back_equal_from_json(
    tmp_path: Path, tree: Callable[[Path], FakeHost]
) -> None:
    facts = tree(tmp_path).read()

    assert decode_document(encode_document(facts), FabricFacts) == facts


def test_this_host_can_be_read() -> None:
    facts = read_fabric()

    names = {entry.name for entry in Path("/sys/class/net").iterdir()}
    assert {one.name for one in facts.interfaces} <= names - {"lo"}
    assert json.loads(encode_document(facts))["host"]
    assert all(absent.reason for absent in facts.absent)


def device(*path: str, numa: int | None = None) -> PciDevice:
    return PciDevice(
        address=path[-1],
        kind="gpu",
        vendor_id="",
        device_id="",
        path=path,
        numa_node=numa,
    )


SWITCH = ("pci0000:10", "0000:10:01.0", "0000:11:00.0")
SECOND_SWITCH = ("0000:12:02.0", "0000:15:00.0", "0000:16:00.0")


@pytest.mark.parametrize(
    ("other", "expected"),
    [
        (device(*SWITCH, "0000:12:01.0", "0000:14:00.0"), "PIX"),
        (device(*SWITCH, "0000:12:00.0", "0000:13:00.1"), "PIX"),
        (device(*SWITCH, *SECOND_SWITCH, "0000:17:00.0"), "PXB"),
        (device("pci0000:10", "0000:10:02.0", "0000:18:00.0"), "PHB"),
        (device("pci0000:20", "0000:20:01.0", "0000:21:00.0", numa=0), "NODE"),
        (device("pci0000:80", "0000:80:01.0", "0000:81:00.0", numa=1), "SYS"),
    ],
)
def test_distance_is_named_as_nccl_names_it(other: PciDevice, expected: str) -> None:
    gpu = device(*SWITCH, "0000:12:00.0", "0000:13:00.0", numa=0)

    assert pci_distance(gpu, other) == expected
    assert pci_distance(other, gpu) == expected
