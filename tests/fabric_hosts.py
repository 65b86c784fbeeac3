"""Fake sysfs and procfs trees of hosts, built from public knowledge of real ones."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from geartrain.devices.interconnect.tools import ToolAnswer
from geartrain.topology.fabric.facts import FabricFacts
from geartrain.topology.fabric.read import read_fabric

GPU, NIC = "0x030200", "0x020000"
NVIDIA, MELLANOX, INTEL = "0x10de", "0x15b3", "0x8086"


class FakeHost:
    """A tree under ``root`` that looks like /sys and /proc; tools answer from a table."""

    def __init__(self, root: Path) -> None:
        self.sys = root / "sys"
        self.proc = root / "proc"
        self.answers: dict[tuple[str, ...], str] = {}
        for folder in ("bus/pci/devices", "class/net", "module"):
            (self.sys / folder).mkdir(parents=True)
        self.write(self.proc / "self/limits", limits("unlimited"))
        self.write(self.proc / "net/route", "Iface\tDestination\n")

    def write(self, path: Path, text: object) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")

    def pci(
        self,
        *path: str,
        code: str,
        vendor: str,
        numa: int = 0,
        speed: str = "32.0 GT/s PCIe",
        width: int = 16,
        max_width: int = 16,
        iommu: str | None = None,
    ) -> Path:
        """Add a device below the named root complex and bridges."""
        place = self.sys.joinpath("devices", *path)
        values = {
            "class": code,
            "vendor": vendor,
            "device": "0x1021",
            "numa_node": numa,
            "current_link_speed": speed,
            "max_link_speed": "32.0 GT/s PCIe",
            "current_link_width": width,
            "max_link_width": max_width,
        }
        for name, value in values.items():
            self.write(place / name, value)
        if iommu is not None:
            self.write(place / "iommu_group/type", iommu)
        (self.sys / "bus/pci/devices" / path[-1]).symlink_to(_up(place, self.sys, 3))
        return place

    def interface(
        self,
        name: str,
        hardware: Path | None = None,
        *,
        megabits: int | None = None,
        mtu: int = 1500,
        operstate: str = "up",
        duplex: str = "full",
        routed: bool = True,
        default: bool = False,
        **files: object,
    ) -> Path:
        """Add a network interface; further keywords are files of its directory."""
        parent = hardware or self.sys / "devices/virtual"
        place = parent / "net" / name
        values = {
            "type": 1,
            "mtu": mtu,
            "operstate": operstate,
            "duplex": duplex,
            "tx_queue_len": 1000,
            "statistics/rx_packets": 1_000_000,
            "statistics/rx_dropped": 0,
            "statistics/rx_missed_errors": 0,
        }
        if megabits is not None:
            values["speed"] = megabits
        for file, value in (values | files).items():
            self.write(place / file.replace("__", "/"), value)
        if hardware is not None:
            (place / "device").symlink_to(os.path.relpath(hardware, place))
        (self.sys / "class/net" / name).symlink_to(_up(place, self.sys, 2))
        if routed:
            destination = "00000000" if default else "0000A8C0"
            with (self.proc / "net/route").open("a") as stream:
                stream.write(f"{name}\t{destination}\t00000000\n")
        return place

    def rdma(
        self,
        name: str,
        hardware: Path,
        *,
        layer: str,
        gigabits: int,
        gids: Mapping[int, tuple[str, str, str]],
        state: str = "4: ACTIVE",
        **files: object,
    ) -> Path:
        """Add an RDMA device with one port; gids are index -> (gid, type, interface)."""
        place = hardware / "infiniband" / name
        port = place / "ports/1"
        values = {
            "state": state,
            "link_layer": layer,
            "rate": f"{gigabits} Gb/sec (4X NDR)",
            "gids/9": "0000:0000:0000:0000:0000:0000:0000:0000",
        }
        for file, value in (values | files).items():
            self.write(port / file.replace("__", "/"), value)
        for index, (gid, kind, interface) in gids.items():
            self.write(port / "gids" / str(index), gid)
            self.write(port / "gid_attrs/types" / str(index), kind)
            self.write(port / "gid_attrs/ndevs" / str(index), interface)
        (place / "device").symlink_to(os.path.relpath(hardware, place))
        folder = self.sys / "class/infiniband"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / name).symlink_to(_up(place, self.sys, 2))
        return place

    def sysctl(self, **values: object) -> None:
        """Set kernel settings; a double underscore is a dot."""
        for name, value in values.items():
            self.write(self.proc / "sys" / name.replace("__", "/"), value)

    def answer(self, command: str, text: str) -> None:
        """What a tool prints."""
        self.answers[tuple(command.split())] = text

    def ask(self, command: Sequence[str]) -> ToolAnswer:
        text = self.answers.get(tuple(command))
        if text is None:
            return ToolAnswer(reason=f"{command[0]} is not installed")
        return ToolAnswer(text=text)

    def read(self, nvml: object = None) -> FabricFacts:
        return read_fabric(
            self.sys, self.proc, ask=self.ask, nvml=nvml or NoNvml(), host="fake"
        )


class NoNvml:
    """pynvml on a host without the driver."""

    class NVMLError(Exception):
        pass

    def nvmlInit(self) -> None:  # noqa: N802 - NVML's name
        msg = "NVML Shared Library Not Found"
        raise self.NVMLError(msg)


def limits(locked: str) -> str:
    return (
        f"Limit      Soft Limit  Hard Limit  Units\nMax locked memory  {locked}  x  bytes"
    )


def dgx_like(root: Path) -> FakeHost:
    """Eight GPUs, each below a switch with a 400 Gbit/s InfiniBand card, two CPUs."""
    host = FakeHost(root)
    for index in range(8):
        bus = 0x10 + 0x10 * index
        switch = (
            f"pci0000:{bus:02x}",
            f"0000:{bus:02x}:01.0",
            f"0000:{bus + 1:02x}:00.0",
        )
        numa = index // 4
        host.pci(
            *switch,
            f"0000:{bus + 2:02x}:00.0",
            f"0000:{bus + 3:02x}:00.0",
            code=GPU,
            vendor=NVIDIA,
            numa=numa,
            speed="2.5 GT/s PCIe",
            iommu="identity",
        )
        card = host.pci(
            *switch,
            f"0000:{bus + 2:02x}:01.0",
            f"0000:{bus + 4:02x}:00.0",
            code="0x020700",
            vendor=MELLANOX,
            numa=numa,
            iommu="identity",
        )
        host.rdma(
            f"mlx5_{index}",
            card,
            layer="InfiniBand",
            gigabits=400,
            gids={0: ("fe80:0000:0000:0000:b83f:d203:0000:0001", "IB", "")},
        )
    slot = ("pci0000:a0", "0000:a0:01.0", "0000:a1:00.0")
    management = host.pci(*slot, code=NIC, vendor=INTEL, speed="8.0 GT/s PCIe", width=8)
    host.interface("eno1", management, megabits=10_000, default=True)
    for node, distance in enumerate(("10 21", "21 10")):
        host.write(host.sys / f"devices/system/node/node{node}/distance", distance)
        host.write(host.sys / f"devices/system/node/node{node}/cpulist", f"{node}")
    (host.sys / "module/nvidia_peermem").mkdir()
    return host


def wrong_roce(root: Path) -> FakeHost:
    """Two RoCE cards with nearly everything set wrongly, and a GPU on the other CPU."""
    host = FakeHost(root)
    host.write(host.proc / "self/limits", limits("65536"))
    host.pci("pci0000:80", "0000:80:01.0", "0000:81:00.0", code=GPU, vendor=NVIDIA, numa=1)
    pfc_on_all = (
        "PFC configuration:\n\tpriority 0 1 2 3 4 5 6 7\n\tenabled 1 1 1 1 1 1 1 1\n"
    )
    for index, name in enumerate(("ens1", "ens2")):
        card = host.pci(
            "pci0000:00",
            f"0000:00:0{index + 1}.0",
            f"0000:0{index + 1}:00.0",
            code=NIC,
            vendor=MELLANOX,
            speed="16.0 GT/s PCIe",
            width=4,
            iommu="DMA-FQ",
        )
        place = host.interface(
            name, card, megabits=(200_000, 100_000)[index], default=index == 0
        )
        for priority in range(8):
            host.write(place / f"ecn/roce_np/enable/{priority}", 0)
            host.write(place / f"ecn/roce_rp/enable/{priority}", int(priority == 3))
        host.answer(f"mlnx_qos -i {name}", f"Priority trust state: pcp\n{pfc_on_all}")
        pause = [{"ifname": name, "autonegotiate": False, "rx": True, "tx": True}]
        host.answer(f"ethtool --json -a {name}", json.dumps(pause))
        rings = [{"ifname": name, "rx": 256, "rx-max": 8192}]
        host.answer(f"ethtool --json -g {name}", json.dumps(rings))
        host.rdma(
            f"mlx5_{index}",
            card,
            layer="Ethernet",
            gigabits=(200, 100)[index],
            gids={0: ("fe80:0000:0000:0000:0ac0:ebff:fe00:0001", "IB/RoCE v1", name)},
            hw_counters__out_of_sequence=1234,
        )
    host.sysctl(
        net__ipv4__tcp_rmem="4096 87380 1048576",
        net__ipv4__tcp_wmem="4096 16384 1048576",
        net__ipv4__tcp_congestion_control="reno",
        net__ipv4__tcp_available_congestion_control="reno cubic",
        net__ipv4__tcp_slow_start_after_idle=1,
    )
    return host


def right_roce(root: Path) -> FakeHost:
    """One RoCE card as it should be, beside a GPU below the same switch."""
    host = FakeHost(root)
    switch = ("pci0000:40", "0000:40:01.0", "0000:41:00.0")
    host.pci(*switch, "0000:42:00.0", "0000:43:00.0", code=GPU, vendor=NVIDIA)
    card = host.pci(*switch, "0000:42:01.0", "0000:44:00.0", code=NIC, vendor=MELLANOX)
    place = host.interface("ens3", card, megabits=400_000, mtu=9000, default=True)
    for priority in range(8):
        for point in ("roce_np", "roce_rp"):
            host.write(place / f"ecn/{point}/enable/{priority}", int(priority == 3))
    host.write(place / "qos/trust", "dscp")
    pfc = [{"pfc-cap": 8, "prio-pfc": [priority == 3 for priority in range(8)]}]
    host.answer("dcb --json pfc show dev ens3", json.dumps(pfc))
    host.rdma(
        "mlx5_0",
        card,
        layer="Ethernet",
        gigabits=400,
        gids={
            0: ("fe80:0000:0000:0000:0ac0:ebff:fe00:0001", "IB/RoCE v1", "ens3"),
            2: ("0000:0000:0000:0000:0000:ffff:0a00:0001", "IB/RoCE v1", "ens3"),
            3: ("0000:0000:0000:0000:0000:ffff:0a00:0001", "RoCE v2", "ens3"),
        },
    )
    (host.sys / "module/nvidia_peermem").mkdir()
    return host


def laptop(root: Path) -> FakeHost:
    """Integrated graphics, wireless, a container bridge, an unplugged Ethernet port."""
    host = FakeHost(root)
    host.pci("pci0000:00", "0000:00:02.0", code="0x030000", vendor=INTEL, numa=-1)
    radio = host.pci("pci0000:00", "0000:00:14.3", code="0x028000", vendor=INTEL, numa=-1)
    host.interface("wlan0", radio, default=True)
    wired = host.pci("pci0000:00", "0000:00:1f.6", code=NIC, vendor=INTEL, numa=-1)
    host.interface("eth0", wired, megabits=-1, operstate="down", routed=False)
    host.interface("docker0", megabits=10_000)
    return host


def _up(place: Path, root: Path, num_levels: int) -> Path:
    """A relative link from ``root/class/x`` or ``root/bus/pci/devices`` to a place."""
    return Path(*[".."] * num_levels) / place.relative_to(root)
