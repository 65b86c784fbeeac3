"""Advice says what is wrong, with the value and where it was read, and what to do."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest

from fabric_hosts import FakeHost, dgx_like, laptop, right_roce, wrong_roce
from geartrain.devices.interconnect.facts import DeviceLink
from geartrain.telemetry.documents import decode_document, encode_document
from geartrain.topology.advice.advise import advise
from geartrain.topology.advice.environment import advise_environment, traffic_class
from geartrain.topology.advice.finding import FabricAdvice, Finding
from geartrain.topology.fabric.facts import FabricFacts
from geartrain.topology.fabric.read import read_fabric


def by_rule(advice: FabricAdvice) -> dict[str, Finding]:
    """The worst finding of each rule."""
    found: dict[str, Finding] = {}
    for finding in advice.findings:
        found.setdefault(finding.rule, finding)
    return found


def environment(facts: FabricFacts) -> dict[str, str]:
    return {setting.name: setting.value for setting in advise_environment(facts)}


@pytest.mark.parametrize(
    ("rule", "severity", "found"),
    [
        ("rdma-mtu", "warning", "MTU 1500, so RDMA packets of 1024 bytes"),
        ("pfc", "error", "PFC on priority: 0, 1, 2, 3, 4, 5, 6, 7"),
        ("ecn", "error", "off: roce_np on priority 3"),
        ("trust", "warning", "priority taken from pcp"),
        ("global-pause", "warning", "global pause on beside PFC"),
        ("roce-v2-gid", "error", "no routable RoCE v2 GID; there are: 0 (IB/RoCE v1)"),
        ("rdma-losses", "warning", "out_of_sequence=1234"),
        ("pci-link", "warning", "16 GT/s x4"),
        ("gpu-nic-distance", "hint", "mlx5_0, mlx5_1 (SYS)"),
        ("gpu-direct", "warning", "no nvidia_peermem module"),
        ("iommu", "warning", "translated: 0000:01:00.0, 0000:02:00.0"),
        ("locked-memory", "error", "a process may pin 65536 bytes"),
        ("mixed-speeds", "warning", "ens1 200 Gbit/s, ens2 100 Gbit/s"),
        ("receive-ring", "hint", "receive ring of 256 of 8192 frames"),
        ("tcp-buffers", "warning", "at most 1.0 MiB"),
        ("congestion-control", "warning", "reno (of reno, cubic)"),
        ("slow-start-after-idle", "hint", "= 1"),
    ],
)
def test_wrongly_set_host_is_told_what_is_wrong(
    tmp_path: Path, rule: str, severity: str, found: str
) -> None:
    finding = by_rule(advise(wrong_roce(tmp_path).read()))[rule]

    assert finding.severity == severity
    assert found in finding.found
    assert finding.action
    assert finding.read_from
    assert finding.source


def test_well_set_host_has_nothing_worse_than_hints(tmp_path: Path) -> None:
    advice = advise(right_roce(tmp_path).read())

    rules = by_rule(advice)
    assert {
        one.rule for one in advice.findings if one.severity in {"error", "warning"}
    } == (set())
    for rule in ("rdma-mtu", "pfc", "ecn", "trust", "roce-v2-gid", "gpu-nic-distance"):
        assert rules[rule].severity == "good"
        assert not rules[rule].action


def test_worst_findings_come_first(tmp_path: Path) -> None:
    severities = [one.severity for one in advise(wrong_roce(tmp_path).read()).findings]

    order = ["error", "warning", "hint", "good"]
    assert severities == sorted(severities, key=order.index)


def test_idle_gpu_at_low_link_speed_is_not_blamed(tmp_path: Path) -> None:
    advice = advise(dgx_like(tmp_path).read())

    links = [one for one in advice.findings if one.rule == "pci-link"]
    gpus = [one for one in links if "(gpu)" in one.subject]
    assert len(gpus) == 8
    assert {one.severity for one in gpus} == {"good"}


def test_narrow_link_that_still_carries_its_port_is_only_a_hint(tmp_path: Path) -> None:
    advice = advise(dgx_like(tmp_path).read())

    (management,) = (one for one in advice.findings if "(eno1)" in one.subject)

    assert (management.rule, management.severity) == ("pci-link", "hint")


def test_infiniband_host_gets_no_rules_for_roce(tmp_path: Path) -> None:
    rules = by_rule(advise(dgx_like(tmp_path).read()))

    assert not {"rdma-mtu", "pfc", "ecn", "trust", "roce-v2-gid"} & set(rules)


def test_absent_facts_are_listed_and_never_judged(tmp_path: Path) -> None:
    host = right_roce(tmp_path)
    host.answers.clear()

    advice = advise(host.read())

    assert "pfc" not in by_rule(advice)
    assert "PFC of ens3" in {absent.what for absent in advice.unchecked}


def test_host_without_rdma_says_so_and_gets_only_what_applies(tmp_path: Path) -> None:
    facts = laptop(tmp_path).read()

    advice = advise(facts)

    assert "no RDMA device" in advice.summary[0]
    assert environment(facts) == {
        "NCCL_SOCKET_IFNAME": "=wlan0",
        "GLOO_SOCKET_IFNAME": "wlan0",
        "UCX_NET_DEVICES": "wlan0",
    }


def test_roce_environment_pins_port_gid_and_traffic_class(tmp_path: Path) -> None:
    assert environment(right_roce(tmp_path).read()) == {
        "NCCL_SOCKET_IFNAME": "=ens3",
        "GLOO_SOCKET_IFNAME": "ens3",
        "NCCL_IB_HCA": "=mlx5_0:1",
        "NCCL_IB_GID_INDEX": "3",
        "NCCL_IB_TC": "106",
        "NCCL_NET_GDR_LEVEL": "PIX",
        "UCX_NET_DEVICES": "mlx5_0:1,ens3",
        "UCX_IB_GID_INDEX": "3",
    }


def test_infiniband_environment_names_all_rails_and_no_gid(tmp_path: Path) -> None:
    found = environment(dgx_like(tmp_path).read())

    rails = ",".join(f"mlx5_{index}:1" for index in range(8))
    assert found["NCCL_IB_HCA"] == f"={rails}"
    assert found["NCCL_SOCKET_IFNAME"] == "=eno1"
    assert not {"NCCL_IB_GID_INDEX", "NCCL_IB_TC", "UCX_IB_GID_INDEX"} & set(found)


def test_slower_rail_is_left_out(tmp_path: Path) -> None:
    assert environment(wrong_roce(tmp_path).read())["NCCL_IB_HCA"] == "=mlx5_0:1"


def test_infiniband_and_roce_are_never_mixed(tmp_path: Path) -> None:
    host = dgx_like(tmp_path)
    slot = "pci0000:b0", "0000:b0:01.0", "0000:b1:00.0"
    card = host.pci(*slot, code="0x020000", vendor="0x15b3")
    host.interface("storage0", card, megabits=400_000)
    gid = ("0000:0000:0000:0000:0000:ffff:0a00:0001", "RoCE v2", "storage0")
    host.rdma("mlx5_8", card, layer="Ethernet", gigabits=400, gids={3: gid})

    rails = environment(host.read())["NCCL_IB_HCA"]

    assert rails.count("mlx5_") == 8
    assert "mlx5_8" not in rails


def test_inactive_port_is_left_out(tmp_path: Path) -> None:
    host = dgx_like(tmp_path)
    port = host.sys / "class/infiniband/mlx5_3/ports/1/state"
    port.write_text("1: DOWN\n")

    facts = host.read()

    assert "mlx5_3" not in environment(facts)["NCCL_IB_HCA"]
    assert by_rule(advise(facts))["port-state"].subject == "mlx5_3 port 1"


def test_traffic_class_follows_the_lossless_priority(tmp_path: Path) -> None:
    host = right_roce(tmp_path)
    pfc = '[{"prio-pfc": [false, false, false, false, false, true, false, false]}]'
    host.answer("dcb --json pfc show dev ens3", pfc)

    assert traffic_class(host.read()) == (40 << 2) | 2


def test_environment_takes_the_interface_that_was_named(tmp_path: Path) -> None:
    settings = advise_environment(laptop(tmp_path).read(), interface="docker0")

    assert {s.value for s in settings if s.library == "Gloo"} == {"docker0"}


@pytest.mark.parametrize(
    ("mode", "policy", "severity", "text"),
    [
        ("802.3ad 4", "layer3+4 1", "good", "2 members"),
        ("802.3ad 4", "layer2 0", "warning", "all flows between two hosts take one member"),
        ("active-backup 1", "layer2 0", "warning", "one member works, the others wait"),
        ("balance-rr 0", "layer2 0", "warning", "frames arrive out of order"),
    ],
)
def test_bond_is_judged_by_mode_and_hash(
    tmp_path: Path, mode: str, policy: str, severity: str, text: str
) -> None:
    host = FakeHost(tmp_path)
    host.interface(
        "bond0",
        bonding__mode=mode,
        bonding__xmit_hash_policy=policy,
        bonding__slaves="a b",
        bonding__miimon=100,
    )

    finding = by_rule(advise(host.read()))["bonding"]

    assert finding.severity == severity
    assert text in finding.found


def test_half_duplex_is_an_error(tmp_path: Path) -> None:
    host = laptop(tmp_path)
    host.write(host.sys / "class/net/wlan0/duplex", "half")

    assert by_rule(advise(host.read()))["duplex"].severity == "error"


def test_dropped_packets_are_a_warning(tmp_path: Path) -> None:
    host = laptop(tmp_path)
    host.write(host.sys / "class/net/wlan0/statistics/rx_dropped", 500)

    finding = by_rule(advise(host.read()))["drops"]

    assert finding.severity == "warning"
    assert finding.found.startswith("500 of 1000000")


def test_fast_ethernet_with_small_frames_gets_a_hint(tmp_path: Path) -> None:
    host = FakeHost(tmp_path)
    card = host.pci("pci0000:00", "0000:00:01.0", code="0x020000", vendor="0x8086")
    host.interface("eth0", card, megabits=100_000, mtu=1500, default=True)

    finding = by_rule(advise(host.read()))["ethernet-mtu"]

    assert (finding.severity, finding.found) == ("hint", "MTU 1500 at 100 Gbit/s")


def test_dead_link_between_gpus_is_a_warning(tmp_path: Path) -> None:
    link = DeviceLink(source="a", target="b", kind="nvlink", num_links=6, num_active=5)
    facts = dataclasses.replace(laptop(tmp_path).read(), device_links=(link,))

    assert by_rule(advise(facts))["device-links"].found.startswith("5 of 6 nvlink")


@pytest.mark.parametrize("tree", [dgx_like, wrong_roce, right_roce, laptop])
def test_advice_reads_back_equal_from_json(
    tmp_path: Path, tree: Callable[[Path], FakeHost]
) -> None:
    advice = advise(tree(tmp_path).read())

    assert decode_document(encode_document(advice), FabricAdvice) == advice


def test_this_host_can_be_advised() -> None:
    facts = read_fabric()

    advice = advise(facts)

    assert advice.summary
    assert all(one.action for one in advice.findings if one.severity != "good")
