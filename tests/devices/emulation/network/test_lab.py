"""Emulated networks on the real kernel: rates, counters, cables, and no leftovers."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from geartrain.devices.emulation.network import (
    HUB,
    ExtraNic,
    LinkRate,
    NetworkLab,
    NetworkSpec,
    kernel,
    parse_links,
    processes_in,
    sweep_networks,
)
from geartrain.devices.emulation.network.addresses import extra_addresses_of
from geartrain.errors import ConfigError, DeviceError
from lab_traffic import connect, measure_bytes_per_s, needs_networks, send_through

pytestmark = [pytest.mark.root, needs_networks]

MBIT = 1e6 / 8
TCP_PAYLOAD_FRACTION = 0.954
"""1448 bytes of payload in a frame that counts as 1514."""
OWNER_CODE = """
import subprocess, sys
from geartrain.devices.emulation.network import NetworkLab, parse_links
with NetworkLab(parse_links("8Mbit", 2)) as lab:
    inside = subprocess.Popen(lab.command(0, ["sleep", "600"]))
    print(lab.host(0).namespace, inside.pid, flush=True)
    inside.wait()
"""


def made_by(process_id: int) -> list[str]:
    return [p.name for p in Path("/run/netns").glob(f"geartrain-{process_id}-*")]


def test_links_carry_their_rates_in_each_direction() -> None:
    spec = parse_links("2+1:80Mbit~40Mbit:20Mbit~10Mbit,80Mbit")
    with NetworkLab(spec) as lab:
        measured = {
            "into a host": measure_bytes_per_s(lab, 0, 1, 2_000_000),
            "out of a rack": measure_bytes_per_s(lab, 0, 2, 1_000_000),
            "into a rack": measure_bytes_per_s(lab, 2, 0, 500_000),
        }
    expected = {"into a host": 40, "out of a rack": 20, "into a rack": 10}
    ratios = {
        name: rate / (expected[name] * MBIT * TCP_PAYLOAD_FRACTION)
        for name, rate in measured.items()
    }

    assert all(0.85 < ratio < 1.15 for ratio in ratios.values()), ratios


def test_running_link_takes_another_rate() -> None:
    with NetworkLab(parse_links("80Mbit", 2)) as lab:
        near, far = connect(lab, 0, 1)
        with near, far:
            before_s = send_through(near, far, 2_000_000)
            lab.set_rate("host0", LinkRate.both_ways(20 * MBIT))
            after_s = send_through(near, far, 2_000_000)

    assert 3.0 < after_s / before_s < 5.0


def test_counters_say_which_links_were_used_in_which_direction() -> None:
    num_bytes = 1_000_000
    with NetworkLab(parse_links("2x2:400Mbit:100Mbit")) as lab:
        before = lab.bytes()
        measure_bytes_per_s(lab, 0, 2, num_bytes)
        after = lab.bytes()
    used = {link: after[link] - before[link] for link in lab.links}

    assert {link for link in used if used[link].send_bytes >= num_bytes} == {
        "host0",
        "rack0",
    }
    assert {link for link in used if used[link].receive_bytes >= num_bytes} == {
        "host2",
        "rack1",
    }
    assert max(max(u.send_bytes, u.receive_bytes) for u in used.values()) < 1.2 * num_bytes
    quiet = used["host1"].send_bytes + used["host3"].send_bytes
    assert quiet < 1000  # an answer to a broadcast at most


def test_pulled_cable_passes_nothing_until_it_is_back() -> None:
    with NetworkLab(parse_links("80Mbit", 2)) as lab:
        near, far = connect(lab, 0, 1)
        with near, far:
            lab.cut("host1")
            near.sendall(b"hello")
            far.settimeout(0.5)
            with pytest.raises(TimeoutError):
                far.recv(5)
            lab.restore("host1")
            far.settimeout(20)
            assert far.recv(5) == b"hello"


def test_hub_is_reached_by_all_hosts_and_by_nobody_outside() -> None:
    with NetworkLab(parse_links("1+1:80Mbit:80Mbit")) as lab:
        for host in lab.hosts:
            near, far = connect(lab, host.index, HUB)
            with near, far:
                near.sendall(b"x")
                assert far.recv(1) == b"x"
        with lab.entered(HUB):
            listener = socket.create_server((lab.host(HUB).address, 0))
        with listener, pytest.raises(OSError, match=r"unreachable|refused|timed out"):
            socket.create_connection(listener.getsockname(), timeout=0.3)


def test_labs_side_by_side_do_not_meet() -> None:
    spec = parse_links("80Mbit", 2)
    with NetworkLab(spec) as one, NetworkLab(spec) as other:
        assert one.host(1).address == other.host(1).address
        assert one.host(1).namespace != other.host(1).namespace
        with one.entered(1):
            listener = socket.create_server((one.host(1).address, 0))
        with listener:
            address = listener.getsockname()
            with other.entered(0), pytest.raises(ConnectionRefusedError):
                socket.create_connection(address, timeout=5)
            with one.entered(0):
                socket.create_connection(address, timeout=5).close()


def test_process_on_a_host_keeps_its_id_and_sees_the_machines_cgroups() -> None:
    code = "import os; print(os.getpid(), os.path.isdir('/sys/fs/cgroup/cpu'))"
    with NetworkLab(parse_links("80Mbit", 1)) as lab:
        process = subprocess.Popen(
            lab.command(0, [sys.executable, "-c", code]), stdout=subprocess.PIPE, text=True
        )
        printed, _ = process.communicate(timeout=20)

    expected = f"{process.pid} {Path('/sys/fs/cgroup/cpu').is_dir()}"
    assert printed.strip() == expected


def test_nothing_is_left_of_a_lab_not_even_what_ran_inside() -> None:
    with NetworkLab(parse_links("80Mbit", 2)) as lab:
        inside = subprocess.Popen(
            lab.command(1, ["sh", "-c", "echo in; exec sleep 600"]), stdout=subprocess.PIPE
        )
        assert inside.stdout is not None
        with inside.stdout:
            inside.stdout.readline()
        assert processes_in(lab.host(1).namespace) == [inside.pid]
        assert len(made_by(os.getpid())) == 4

    assert inside.wait(10) == -signal.SIGKILL
    assert made_by(os.getpid()) == []


def test_lab_of_a_killed_owner_is_swept_and_that_of_a_living_one_stays() -> None:
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER_CODE], stdout=subprocess.PIPE, text=True
    )
    assert owner.stdout is not None
    with owner.stdout:
        namespace, inside_id = owner.stdout.readline().split()
    sweep_networks()
    kept = made_by(owner.pid)
    owner.kill()
    owner.wait()

    removed = sweep_networks()

    assert namespace in kept
    assert set(removed) >= set(kept)
    assert made_by(owner.pid) == []
    assert not Path(f"/proc/{inside_id}/ns/net").exists() or _is_zombie(inside_id)


def _is_zombie(process_id: str) -> bool:
    return " Z " in Path(f"/proc/{process_id}/stat").read_text()


def test_lab_that_cannot_be_made_leaves_nothing() -> None:
    rack = (LinkRate.both_ways(MBIT),)
    spec = NetworkSpec(racks=(rack,), congestion_control="nonsense")

    with pytest.raises(DeviceError, match="this kernel has"), NetworkLab(spec):
        pass

    assert made_by(os.getpid()) == []


def test_extra_cards_are_on_subnets_of_their_own() -> None:
    rack = (LinkRate.both_ways(80 * MBIT),) * 2
    slow = ExtraNic(name="slow0", rate=LinkRate.both_ways(8 * MBIT))
    loose = ExtraNic(name="aloose", is_connected=False)
    spec = NetworkSpec(racks=(rack,), extra_nics=(slow, loose))
    addresses = [extra_addresses_of(nic, 1, "ipv4")[0].ip for nic in range(2)]
    with NetworkLab(spec) as lab:
        near, far = connect(lab, 0, 1, addresses[0])
        with near, far:
            rate = 500_000 / send_through(near, far, 500_000)
        with lab.entered(1):
            listener = socket.create_server((addresses[1], 0))
        with listener, lab.entered(0), pytest.raises(OSError, match=r"timed out|No route"):
            socket.create_connection(listener.getsockname(), timeout=0.3)

    assert 0.85 < rate / (8 * MBIT * TCP_PAYLOAD_FRACTION) < 1.15


@pytest.mark.skipif(not Path("/proc/net/if_inet6").exists(), reason="needs IPv6")
def test_hosts_may_have_ipv6_addresses_only() -> None:
    rack = (LinkRate.both_ways(80 * MBIT),) * 2
    with NetworkLab(NetworkSpec(racks=(rack,), families="ipv6", mtu_bytes=9000)) as lab:
        address = lab.host(1).address
        near, far = connect(lab, 0, 1, address)
        with near, far:
            send_through(near, far, 100_000)

    assert ":" in address


def test_link_that_does_not_exist_is_named() -> None:
    with NetworkLab(parse_links("80Mbit", 1)) as lab:
        with pytest.raises(ConfigError, match="no link 'host1'; the network has host0"):
            lab.cut("host1")
        with pytest.raises(ConfigError, match="no host 1"):
            lab.command(1, ["true"])


def test_what_is_missing_for_a_network_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    lab = NetworkLab(parse_links("80Mbit", 1))
    without = tmp_path / "status"
    without.write_text("CapEff:\t0000000000000000\n")
    with monkeypatch.context() as patch:
        patch.setattr(os, "geteuid", lambda: 1000)
        with pytest.raises(DeviceError, match="need root"), lab:
            pass
    with monkeypatch.context() as patch:
        patch.setattr(kernel, "_STATUS", without)
        with pytest.raises(DeviceError, match="CAP_NET_ADMIN, CAP_SYS_ADMIN"), lab:
            pass
    monkeypatch.setattr(kernel, "_find", lambda name: None if name == "tc" else name)
    with pytest.raises(DeviceError, match="the programs tc"), lab:
        pass
