"""Network interfaces from sysfs and procfs."""

from __future__ import annotations

from pathlib import Path

from geartrain.devices.interconnect.facts import AbsentFact
from geartrain.devices.interconnect.tools import AskTool
from geartrain.topology.fabric.facts import Bond, NetworkInterface
from geartrain.topology.fabric.flow_control import read_flow_control, read_rings
from geartrain.topology.fabric.pci import read_driver, read_numa_node
from geartrain.topology.fabric.small_files import list_dir, pci_path, read_int, read_text

_BYTES_PER_MEGABIT = 1e6 / 8
_ETHERNET, _INFINIBAND = 1, 32
"""``ARPHRD_ETHER`` and ``ARPHRD_INFINIBAND`` of the kernel's ``if_arp.h``."""
_MILLISECONDS_PER_S = 1000


def read_interfaces(
    sysfs_root: Path, proc_root: Path, ask: AskTool
) -> tuple[tuple[NetworkInterface, ...], tuple[AbsentFact, ...]]:
    """Read all interfaces that could carry an exchange; the loopback is none.

    Args:
        sysfs_root: Where sysfs is mounted.
        proc_root: Where procfs is mounted.
        ask: Runs a tool.

    Returns:
        The interfaces, and what could not be read of them.
    """
    routed, default = _routes(proc_root)
    found, absent = [], []
    for entry in list_dir(sysfs_root / "class/net"):
        if read_int(entry / "type") not in {_ETHERNET, _INFINIBAND}:
            continue  # loopback, tunnels
        one, missing = _read_interface(entry, routed, default, ask)
        found.append(one)
        absent += missing
    return tuple(found), tuple(absent)


def _read_interface(
    entry: Path, routed: set[str], default: set[str], ask: AskTool
) -> tuple[NetworkInterface, list[AbsentFact]]:
    name, hardware = entry.name, entry / "device"
    path = pci_path(hardware) if hardware.exists() else ()
    is_up = read_text(entry / "operstate") == "up"
    asked = hardware.exists() and is_up  # tools say nothing of a bridge
    flow, flow_absent = read_flow_control(entry, ask if asked else None)
    rings, rings_absent = read_rings(name, ask) if asked else ((None, None), [])
    speed = read_int(entry / "speed")
    duplex = read_text(entry / "duplex")
    statistics = entry / "statistics"
    lost = [read_int(statistics / kind) for kind in ("rx_dropped", "rx_missed_errors")]
    interface = NetworkInterface(
        name=name,
        is_physical=hardware.exists(),
        is_up=is_up,
        has_address=name in routed,
        is_default_route=name in default,
        mtu_bytes=read_int(entry / "mtu") or 0,
        # -1, or 4294967295 from some drivers, where the rate is unknown.
        bytes_per_s=speed * _BYTES_PER_MEGABIT if speed and 0 < speed < 2**31 else None,
        is_full_duplex={"full": True, "half": False}.get(duplex or ""),
        transmit_queue_length=read_int(entry / "tx_queue_len"),
        pci_address=path[-1] if len(path) > 1 else None,
        numa_node=read_numa_node(hardware),
        driver=read_driver(hardware),
        bond=_read_bond(entry),
        master=(entry / "master").resolve().name if (entry / "master").exists() else None,
        flow_control=flow,
        receive_ring=rings[0],
        max_receive_ring=rings[1],
        num_received=read_int(statistics / "rx_packets"),
        num_dropped=sum(count or 0 for count in lost)
        if any(count is not None for count in lost)
        else None,
    )
    return interface, [*flow_absent, *rings_absent]


def _read_bond(entry: Path) -> Bond | None:
    bonding = entry / "bonding"
    mode = read_text(bonding / "mode")
    if mode is None:
        return None
    return Bond(
        mode=mode.split()[0],
        transmit_hash=(read_text(bonding / "xmit_hash_policy") or "unknown").split()[0],
        member_names=tuple((read_text(bonding / "slaves") or "").split()),
        monitor_interval_s=(read_int(bonding / "miimon") or 0) / _MILLISECONDS_PER_S,
    )


def _routes(proc_root: Path) -> tuple[set[str], set[str]]:
    """Find the interfaces that packets are routed over, and those of the default route."""
    routed, default = set(), set()
    ipv4 = read_text(proc_root / "net/route") or ""
    for line in ipv4.splitlines()[1:]:
        name, destination = (*line.split(), "", "")[:2]
        routed.add(name)
        if destination == "00000000":
            default.add(name)
    ipv6 = read_text(proc_root / "net/ipv6_route") or ""
    for fields in (line.split() for line in ipv6.splitlines()):
        if len(fields) < 10 or fields[-1] == "lo":  # noqa: PLR2004 - columns of the table
            continue
        if fields[1] == "00" and int(fields[8], 16) & 0x1:  # a default route that is up
            default.add(fields[-1])
            routed.add(fields[-1])
        elif not fields[0].startswith(("fe80", "ff")):  # link-local says nothing
            routed.add(fields[-1])
    return routed, default
