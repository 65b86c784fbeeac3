"""The lines that make a network, for ``ip`` and ``tc`` to read; and the counters.

In the fabric: ``p3`` is the port of host 3, ``up0`` and ``dn0`` are the two ends of rack
0's uplink (at the rack, at the core). Queues shape what a device sends, so that a host's
sending is shaped at its eth0 and its receiving at its port.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from geartrain.devices.emulation.network.addresses import (
    HUB_INDEX,
    addresses_of,
    extra_addresses_of,
)
from geartrain.devices.emulation.network.spec import ExtraNic, LinkRate, NetworkSpec
from geartrain.errors import DeviceError

INTERFACE = "eth0"
HUB_PORT = "hub"

_MIN_BURST_BYTES = 32 * 1024
_TICK_HZ = 250
"""A bucket refilled at this rate or faster loses nothing: the slowest kernels' HZ. Also,
smaller buckets would cut the trains of segments in which TCP hands its data on."""
_QUEUE_S = 0.08
"""What waits longer is dropped: as much as a cheap switch holds."""
_SYSCTL = Path("/proc/sys/net")


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceBytes:
    """What a network device of the kernel has carried."""

    received_bytes: int
    sent_bytes: int


def port(link: str) -> str:
    """The upper end of a link, in the fabric.

    >>> port("host3"), port("rack0")
    ('p3', 'dn0')
    """
    if link.startswith("rack"):
        return f"dn{link.removeprefix('rack')}"
    return f"p{link.removeprefix('host')}"


def sender(link: str) -> str:
    """The lower end of a link: in the host, or in the fabric for a rack.

    >>> sender("host3"), sender("rack0")
    ('eth0', 'up0')
    """
    return f"up{link.removeprefix('rack')}" if link.startswith("rack") else INTERFACE


def shape_line(device: str, bytes_per_s: float) -> str:
    """Hold what a device sends to a rate; the same line changes it later.

    >>> shape_line("eth0", 12_500_000)
    'qdisc replace dev eth0 root tbf rate 100000000bit burst 50000 latency 80ms'
    """
    burst_bytes = max(_MIN_BURST_BYTES, round(bytes_per_s / _TICK_HZ))
    return (
        f"qdisc replace dev {device} root tbf rate {round(bytes_per_s * 8)}bit "
        f"burst {burst_bytes} latency {_QUEUE_S * 1e3:.0f}ms"
    )


def bridge_lines(spec: NetworkSpec) -> list[str]:
    """Bridges and uplinks, for the fabric."""
    mtu = f"mtu {spec.mtu_bytes}"
    lines = ["link set lo up", *_bridge("core", spec)]
    for rack in range(len(spec.racks)):
        up, down = f"up{rack}", f"dn{rack}"
        lines += [
            *_bridge(f"rack{rack}", spec),
            f"link add {up} {mtu} master rack{rack} type veth peer name {down} {mtu}",
            f"link set {down} master core up",
            f"link set {up} up",
        ]
    for index, nic in enumerate(spec.extra_nics):
        lines += _bridge(_extra_bridge(index), spec) if nic.is_connected else []
    return lines


def port_lines(
    spec: NetworkSpec, host_namespaces: Sequence[str], hub_namespace: str
) -> list[str]:
    """The hosts' cables, for the fabric; the far end comes up in the host's namespace."""
    lines = _cable(HUB_PORT, INTERFACE, hub_namespace, "core", spec)
    for index, namespace in enumerate(host_namespaces):
        rack = f"rack{spec.rack_of(index)}"
        lines += _cable(f"p{index}", INTERFACE, namespace, rack, spec)
        for nic_index, nic in enumerate(spec.extra_nics):
            bridge = _extra_bridge(nic_index) if nic.is_connected else None
            name = _extra_port(nic_index, index)
            lines += _cable(name, nic.name, namespace, bridge, spec)
    return lines


def fabric_shape_lines(spec: NetworkSpec) -> list[str]:
    """Queues of the fabric: into the hosts, and both ends of the uplinks."""
    lines = []
    for index, link in enumerate(spec.hosts):
        lines.append(shape_line(f"p{index}", link.receive_bytes_per_s))
        lines += [
            shape_line(_extra_port(nic_index, index), nic.rate.receive_bytes_per_s)
            for nic_index, nic in enumerate(spec.extra_nics)
            if nic.rate is not None
        ]
    for rack in range(len(spec.racks)):
        uplink: LinkRate | None = spec.uplink(rack)
        if uplink is not None:
            lines.append(shape_line(f"up{rack}", uplink.send_bytes_per_s))
            lines.append(shape_line(f"dn{rack}", uplink.receive_bytes_per_s))
    return lines


def host_lines(spec: NetworkSpec, position: int) -> list[str]:
    """Addresses of a host, or of the hub, for its namespace.

    A neighbour that was asked for while its cable was pulled is asked for again soon, not
    only a second later: how long a link is cut is how long it does not work.
    """
    lines = ["link set lo up", f"link set {INTERFACE} up"]
    if spec.families != "ipv6":
        lines.append(f"ntable change name arp_cache dev {INTERFACE} retrans 100")
    lines += [
        f"address add {address} dev {INTERFACE}"
        for address in addresses_of(position, spec.families)
    ]
    for index, nic in enumerate(_cards(spec, position)):
        lines.append(f"link set {nic.name} up")
        lines += [
            f"address add {address} dev {nic.name}"
            for address in extra_addresses_of(index, position, spec.families)
        ]
    return lines


def host_shape_lines(spec: NetworkSpec, host_index: int) -> list[str]:
    """Queues of a host: what it sends."""
    lines = [shape_line(INTERFACE, spec.hosts[host_index].send_bytes_per_s)]
    lines += [
        shape_line(nic.name, nic.rate.send_bytes_per_s)
        for nic in spec.extra_nics
        if nic.rate is not None
    ]
    return lines


def quiet_namespace(*, has_ipv6: bool) -> None:
    """Keep the kernel from chatting in this thread's namespace; before links are made.

    Neighbour discovery and router solicitation would be counted with the traffic, and
    duplicate address detection would hold an address back for a second.
    """
    _write_if_present("bridge/bridge-nf-call-iptables", "0")
    _write_if_present("bridge/bridge-nf-call-ip6tables", "0")
    _write_if_present("bridge/bridge-nf-call-arptables", "0")
    for scope in ("all", "default"):
        if has_ipv6:
            for name in ("accept_dad", "accept_ra", "router_solicitations"):
                _write_if_present(f"ipv6/conf/{scope}/{name}", "0")
        else:
            _write_if_present(f"ipv6/conf/{scope}/disable_ipv6", "1")


def check_ipv6() -> None:
    """Refuse IPv6 where this thread's namespace has none.

    Raises:
        DeviceError: If the kernel has no IPv6, or it is switched off.
    """
    path = _SYSCTL / "ipv6" / "conf" / "default" / "disable_ipv6"
    if not path.exists() or path.read_text().strip() != "0":
        msg = f"the network asks for IPv6, but {path} is absent or not 0; use IPv4"
        raise DeviceError(msg)


def set_congestion_control(name: str) -> None:
    """Choose TCP's congestion control in this thread's namespace.

    Raises:
        DeviceError: If the kernel has none of that name.
    """
    path = _SYSCTL / "ipv4" / "tcp_congestion_control"
    try:
        path.write_text(name)
    except OSError as error:
        known = (_SYSCTL / "ipv4" / "tcp_available_congestion_control").read_text().split()
        msg = (
            f"congestion control {name!r}: {error.strerror}; this kernel has "
            f"{', '.join(known)}"
        )
        raise DeviceError(msg) from error


def parse_device_bytes(text: str) -> dict[str, DeviceBytes]:
    r"""Read ``/proc/net/dev``.

    >>> parse_device_bytes("h\nh\n eth0: 5 1 0 0 0 0 0 0 7 1 0 0 0 0 0 0\n")
    {'eth0': DeviceBytes(received_bytes=5, sent_bytes=7)}
    """
    found = {}
    for line in text.splitlines()[2:]:
        name, _, numbers = line.partition(":")
        fields = numbers.split()
        found[name.strip()] = DeviceBytes(
            received_bytes=int(fields[0]), sent_bytes=int(fields[8])
        )
    return found


def _bridge(name: str, spec: NetworkSpec) -> list[str]:
    return [
        f"link add {name} mtu {spec.mtu_bytes} type bridge mcast_snooping 0",
        f"link set {name} up",
    ]


def _cable(
    name: str, far_name: str, namespace: str, bridge: str | None, spec: NetworkSpec
) -> list[str]:
    mtu = f"mtu {spec.mtu_bytes}"
    near = f"{name} {mtu}" if bridge is None else f"{name} {mtu} master {bridge}"
    far = f"{far_name} netns {namespace} {mtu}"
    return [f"link add {near} type veth peer name {far}", f"link set {name} up"]


def _cards(spec: NetworkSpec, position: int) -> tuple[ExtraNic, ...]:
    return () if position == HUB_INDEX else spec.extra_nics


def _extra_bridge(nic_index: int) -> str:
    return f"extra{nic_index}"


def _extra_port(nic_index: int, host_index: int) -> str:
    return f"x{nic_index}p{host_index}"


def _write_if_present(name: str, value: str) -> None:
    path = _SYSCTL / name
    if path.exists():
        path.write_text(value)
