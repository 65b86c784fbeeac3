"""Rules for RDMA over Ethernet: it wants a network that loses nothing, and says so."""

from __future__ import annotations

from collections.abc import Iterator

from geartrain.topology.advice import sources
from geartrain.topology.advice.finding import Finding, Severity
from geartrain.topology.fabric.facts import (
    FabricFacts,
    NetworkInterface,
    RdmaDevice,
    RdmaPort,
)

ROCE_HEADERS_BYTES = 96
"""What drivers leave for headers: IPv6 40, UDP 8, BTH 12, XRC 4, atomic 28, ICRC 4.
Source: ``iboe_get_mtu`` in the kernel's ``rdma/ib_addr.h``."""
RDMA_MTUS_BYTES = (4096, 2048, 1024, 512, 256)
JUMBO_BYTES = 9000
DEFAULT_PRIORITY = 3
"""Which priority RDMA has by custom, where nothing says otherwise."""
MAX_LOSSLESS = 2
"""Storage may have a lossless priority of its own; more of them are a mistake."""
_JUMBO_LEAST_BYTES = RDMA_MTUS_BYTES[0] + ROCE_HEADERS_BYTES


def rdma_mtu(interface_mtu_bytes: int) -> int:
    """Find the largest RDMA MTU that fits into an interface's MTU.

    >>> rdma_mtu(1500), rdma_mtu(4191), rdma_mtu(4200), rdma_mtu(9000)
    (1024, 2048, 4096, 4096)
    """
    room = interface_mtu_bytes - ROCE_HEADERS_BYTES
    return next((mtu for mtu in RDMA_MTUS_BYTES if mtu <= room), RDMA_MTUS_BYTES[-1])


def roce_ports(
    facts: FabricFacts,
) -> Iterator[tuple[RdmaDevice, RdmaPort, NetworkInterface | None]]:
    """Yield the active RoCE ports, each with its network interface."""
    for device in facts.rdma_devices:
        for port in device.active_ports:
            if port.link_layer == "Ethernet":
                yield device, port, interface_of(facts, device, port)


def interface_of(
    facts: FabricFacts, device: RdmaDevice, port: RdmaPort
) -> NetworkInterface | None:
    """Find the network interface of a port: by its GIDs, else by its hardware."""
    names = [gid.interface for gid in port.gids if gid.interface]
    for name in (*names, *device.interfaces):
        found = facts.interface(name)
        if found is not None:
            return found
    return None


def lossless_priorities(interface: NetworkInterface) -> tuple[int, ...] | None:
    """Tell the priorities with PFC on; None where that is unknown."""
    pfc = interface.flow_control.pfc
    return None if pfc is None else tuple(i for i, is_on in enumerate(pfc) if is_on)


def _rdma_priorities(interface: NetworkInterface) -> tuple[int, ...]:
    """Tell the priorities that RDMA travels on: the lossless ones, if those are few."""
    lossless = lossless_priorities(interface) or ()
    few = 0 < len(lossless) <= MAX_LOSSLESS
    return lossless if few else (DEFAULT_PRIORITY,)


def check_mtu(facts: FabricFacts) -> Iterator[Finding]:
    """4096-byte RDMA packets need jumbo frames on the Ethernet below."""
    for device, _, interface in roce_ports(facts):
        if interface is None:
            continue
        mtu = interface.mtu_bytes
        fits = rdma_mtu(mtu)
        is_good = mtu >= _JUMBO_LEAST_BYTES
        yield Finding(
            rule="rdma-mtu",
            severity="good" if is_good else "warning",
            subject=f"{device.name} ({interface.name})",
            found=f"MTU {mtu}, so RDMA packets of {fits} bytes",
            read_from=f"/sys/class/net/{interface.name}/mtu",
            expected=f"MTU {JUMBO_BYTES}, so RDMA packets of {RDMA_MTUS_BYTES[0]} bytes",
            action=""
            if is_good
            else f"ip link set {interface.name} mtu {JUMBO_BYTES}, on all hosts and the "
            "switch ports between them",
            why="each packet costs the network card the same work; a path with one "
            "smaller MTU drops the larger packets silently",
            source=sources.INFINIBAND_SPECIFICATION,
        )


def check_pfc(facts: FabricFacts) -> Iterator[Finding]:
    """PFC belongs on the one priority that carries RDMA."""
    for device, _, interface in roce_ports(facts):
        lossless = None if interface is None else lossless_priorities(interface)
        if interface is None or lossless is None:
            continue
        severity, action = _judge_pfc(interface.name, lossless)
        shown = ", ".join(map(str, lossless)) or "none"
        yield Finding(
            rule="pfc",
            severity=severity,
            subject=f"{device.name} ({interface.name})",
            found=f"PFC on priority: {shown}",
            read_from=f"mlnx_qos -i {interface.name} or dcb pfc show dev {interface.name}",
            expected="PFC on exactly one priority, the same on every host and switch port",
            action=action,
            why="without PFC a full switch queue drops RDMA packets and the sender goes "
            "back to the lost one; with PFC on all, one slow receiver pauses all traffic "
            "and pauses can wait for each other in a circle",
            source=sources.ROCE_AT_SCALE,
        )


def _judge_pfc(name: str, lossless: tuple[int, ...]) -> tuple[Severity, str]:
    one = f"mlnx_qos -i {name} --pfc 0,0,0,1,0,0,0,0 (priority 3; use the switch's own)"
    if not lossless:
        return "error", one
    if len(lossless) > MAX_LOSSLESS:
        return "error", one
    if len(lossless) > 1:
        return "hint", f"keep one for RDMA unless the other carries storage: {one}"
    return "good", ""


def check_ecn(facts: FabricFacts) -> Iterator[Finding]:
    """DCQCN slows senders down before PFC has to pause them."""
    for device, _, interface in roce_ports(facts):
        if interface is None:
            continue
        flow = interface.flow_control
        if flow.ecn_notification is None or flow.ecn_reaction is None:
            continue
        wanted = _rdma_priorities(interface)
        off = [
            f"{kind} on priority {priority}"
            for priority in wanted
            for kind, states in (
                ("roce_np", flow.ecn_notification),
                ("roce_rp", flow.ecn_reaction),
            )
            if not states[priority]
        ]
        where = f"/sys/class/net/{interface.name}/ecn"
        commands = (
            f"echo 1 > {where}/{point}/enable/{priority}"
            for priority in wanted
            for point in ("roce_np", "roce_rp")
        )
        yield Finding(
            rule="ecn",
            severity="error" if off else "good",
            subject=f"{device.name} ({interface.name})",
            found=f"off: {', '.join(off)}" if off else "notification and reaction on",
            read_from=f"{where}/roce_np/enable and {where}/roce_rp/enable",
            expected=f"both on for priority {', '.join(map(str, wanted))}",
            action=f"{'; '.join(commands)}; and ECN marking in the switch" if off else "",
            why="an all-reduce is many senders to one port; without congestion control "
            "every burst ends in pauses that spread through the network",
            source=sources.DCQCN,
        )


def check_trust(facts: FabricFacts) -> Iterator[Finding]:
    """RoCE v2 is routed, so its priority must travel in the IP header."""
    for device, _, interface in roce_ports(facts):
        if interface is None or interface.flow_control.trust is None:
            continue
        trust = interface.flow_control.trust
        is_good = trust == "dscp"
        yield Finding(
            rule="trust",
            severity="good" if is_good else "warning",
            subject=f"{device.name} ({interface.name})",
            found=f"priority taken from {trust}",
            read_from=f"/sys/class/net/{interface.name}/qos/trust or mlnx_qos",
            expected="priority taken from dscp",
            action="" if is_good else f"mlnx_qos -i {interface.name} --trust dscp",
            why="the VLAN tag's priority ends at the first router, and untagged frames "
            "have none: RDMA then travels in the lossy queue, past its PFC",
            source=sources.NVIDIA_ROCE,
        )


def check_pause(facts: FabricFacts) -> Iterator[Finding]:
    """Global pause and PFC exclude each other."""
    for device, _, interface in roce_ports(facts):
        if interface is None:
            continue
        flow = interface.flow_control
        if not lossless_priorities(interface) or flow.pause_receive is None:
            continue
        is_on = bool(flow.pause_receive or flow.pause_transmit)
        yield Finding(
            rule="global-pause",
            severity="warning" if is_on else "good",
            subject=f"{device.name} ({interface.name})",
            found=f"global pause {'on' if is_on else 'off'} beside PFC",
            read_from=f"ethtool -a {interface.name}",
            expected="global pause off where PFC is on",
            action=f"ethtool -A {interface.name} rx off tx off" if is_on else "",
            why="a global pause stops all priorities, also those that PFC keeps apart",
            source=sources.NVIDIA_ROCE,
        )


def check_gids(facts: FabricFacts) -> Iterator[Finding]:
    """A port needs a routable RoCE v2 address."""
    for device, port, _ in roce_ports(facts):
        routable = port.routable_gids
        shown = ", ".join(f"{gid.index} ({gid.kind})" for gid in port.gids) or "none"
        yield Finding(
            rule="roce-v2-gid",
            severity="good" if routable else "error",
            subject=f"{device.name} port {port.port}",
            found=f"GID {routable[0].index} is RoCE v2"
            if routable
            else f"no routable RoCE v2 GID; there are: {shown}",
            read_from=f"/sys/class/infiniband/{device.name}/ports/{port.port}/gid_attrs",
            expected="a RoCE v2 GID of an IP address that all hosts reach",
            action=""
            if routable
            else "give the port's network interface an IP address; its GIDs follow",
            why="RoCE v1 is not routed and carries no DSCP; a link-local address reaches "
            "no other subnet",
            source=sources.INFINIBAND_SPECIFICATION,
        )


def check_losses(facts: FabricFacts) -> Iterator[Finding]:
    """Counters tell whether packets were lost since the driver was loaded."""
    lossy = {
        "port_xmit_discards",
        "symbol_error",
        "link_downed",
        "out_of_sequence",
        "packet_seq_err",
        "local_ack_timeout_err",
        "out_of_buffer",
    }
    for device in facts.rdma_devices:
        for port in device.active_ports:
            bad = {name: n for name, n in port.counters.items() if name in lossy}
            if not bad:
                continue
            shown = ", ".join(f"{name}={count}" for name, count in bad.items())
            yield Finding(
                rule="rdma-losses",
                severity="warning",
                subject=f"{device.name} port {port.port}",
                found=shown,
                read_from=f"/sys/class/infiniband/{device.name}/ports/{port.port}",
                expected="no losses",
                action="read them again during training: if they grow, look at cables "
                "(symbol_error, link_downed) or at PFC and ECN (the others)",
                why="a lost RDMA packet is sent again with all that followed it",
                source=sources.NVIDIA_ROCE,
            )
