"""RDMA devices from ``/sys/class/infiniband``: InfiniBand and RoCE alike."""

from __future__ import annotations

import re
from pathlib import Path

from geartrain.topology.fabric.facts import Gid, LinkLayer, RdmaDevice, RdmaPort
from geartrain.topology.fabric.pci import read_numa_node
from geartrain.topology.fabric.small_files import list_dir, pci_path, read_int, read_text

_NO_GID = "0000:0000:0000:0000:0000:0000:0000:0000"
_RATE = re.compile(r"(?P<number>[\d.]+)\s*Gb/sec")
_BYTES_PER_GIGABIT = 1e9 / 8
_COUNTERS = (
    "counters/port_xmit_discards",
    "counters/symbol_error",
    "counters/link_downed",
    "hw_counters/out_of_sequence",
    "hw_counters/packet_seq_err",
    "hw_counters/local_ack_timeout_err",
    "hw_counters/roce_slow_restart",
    "hw_counters/out_of_buffer",
    "hw_counters/np_cnp_sent",
    "hw_counters/np_ecn_marked_roce_packets",
    "hw_counters/rp_cnp_handled",
)
"""Losses and congestion. Source: the mlx5 driver's documentation of its counters."""


def read_rdma(sysfs_root: Path) -> tuple[RdmaDevice, ...]:
    """Read all RDMA devices.

    Args:
        sysfs_root: Where sysfs is mounted.
    """
    entries = list_dir(sysfs_root / "class/infiniband")
    return tuple(_read_device(entry) for entry in entries)


def _read_device(entry: Path) -> RdmaDevice:
    hardware = entry / "device"
    path = pci_path(hardware)
    return RdmaDevice(
        name=entry.name,
        ports=tuple(_read_port(entry, port) for port in list_dir(entry / "ports")),
        pci_address=path[-1] if len(path) > 1 else None,
        numa_node=read_numa_node(hardware),
        interfaces=tuple(one.name for one in list_dir(hardware / "net")),
        firmware=read_text(entry / "fw_ver"),
    )


def _read_port(device: Path, port: Path) -> RdmaPort:
    state = read_text(port / "state") or "unknown"
    layer = read_text(port / "link_layer")
    layers: dict[str | None, LinkLayer] = {
        "Ethernet": "Ethernet",
        "InfiniBand": "InfiniBand",
    }
    counts = {path.rpartition("/")[2]: read_int(port / path) for path in _COUNTERS}
    return RdmaPort(
        port=int(port.name),
        is_active="ACTIVE" in state,
        state=state,
        link_layer=layers.get(layer, "unknown"),
        bytes_per_s=_bytes_per_s(read_text(port / "rate")),
        gids=_read_gids(port),
        traffic_class=_traffic_class(device / "tc" / port.name / "traffic_class"),
        counters={name: count for name, count in counts.items() if count},
    )


def _read_gids(port: Path) -> tuple[Gid, ...]:
    gids = []
    for entry in list_dir(port / "gids"):
        gid = read_text(entry)
        if gid is None or gid == _NO_GID or not entry.name.isdigit():
            continue
        gids.append(
            Gid(
                index=int(entry.name),
                gid=gid,
                kind=read_text(port / "gid_attrs/types" / entry.name) or "IB",
                interface=read_text(port / "gid_attrs/ndevs" / entry.name),
            )
        )
    return tuple(gids)


def _bytes_per_s(text: str | None) -> float | None:
    """Read "400 Gb/sec (4X NDR)".

    >>> _bytes_per_s("400 Gb/sec (4X NDR)")
    50000000000.0
    """
    match = _RATE.search(text or "")
    return float(match["number"]) * _BYTES_PER_GIGABIT if match else None


def _traffic_class(path: Path) -> int | None:
    """Read the traffic class that the driver forces, written as "Global tclass=106"."""
    match = re.search(r"\d+", read_text(path) or "")
    return int(match[0]) if match else None
