"""This host's network addresses, and which of them to talk to the others from."""

from __future__ import annotations

import contextlib
import ipaddress
import re
import socket
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import psutil

from geartrain.errors import ConfigError
from geartrain.units import format_bit_rate

_VIRTUAL = re.compile(
    r"docker|br-|virbr|veth|cni|flannel|cali|cilium|lxc|lxd|vnet|tap|kube|podman|ifb|dummy"
)
"""What container and VM runtimes call bridges and their ports. A container's own eth0 is
virtual too, but is its way out; so names decide, not the driver."""
_BITS_PER_BYTE = 8
_ANY_PORT = 9  # of a datagram that is never sent


@dataclass(frozen=True, slots=True, kw_only=True)
class InterfaceAddress:
    """An address of this host."""

    interface: str
    address: str
    """Numeric; IPv6 link-local ones with their scope, ``fe80::1%eth0``."""
    bytes_per_s: float | None = None
    """What the driver says that it can; None where it says nothing."""
    is_up: bool = True

    @property
    def version(self) -> int:
        """4 or 6."""
        return _parse(self.address).version

    @property
    def is_loopback(self) -> bool:
        """Whether only this host can reach it."""
        return _parse(self.address).is_loopback

    @property
    def is_link_local(self) -> bool:
        """Whether it is valid on one wire only."""
        return _parse(self.address).is_link_local

    @property
    def is_virtual(self) -> bool:
        """Whether its name is that of a bridge or port for containers or VMs."""
        return _VIRTUAL.match(self.interface) is not None

    def __str__(self) -> str:
        if self.bytes_per_s is None:
            return f"{self.interface} ({self.address})"
        speed = format_bit_rate(self.bytes_per_s)
        return f"{self.interface} ({self.address}, {speed})"


@dataclass(frozen=True, slots=True, kw_only=True)
class InterfaceChoice:
    """The address to talk from, and why."""

    address: str
    interface: str
    reason: str
    passed_over: tuple[str, ...] = ()
    """Other usable interfaces, for people."""

    @property
    def notes(self) -> tuple[str, ...]:
        """What a reader of the topology should know."""
        if not self.passed_over:
            return ()
        others = ", ".join(self.passed_over)
        return (f"{self.interface} ({self.address}) {self.reason}; passed over {others}",)


def list_addresses() -> tuple[InterfaceAddress, ...]:
    """This host's addresses, in the network namespace of the caller."""
    stats = psutil.net_if_stats()
    found = []
    for interface, addresses in psutil.net_if_addrs().items():
        state = stats.get(interface)
        speed_mbit = state.speed if state is not None else 0
        for entry in addresses:
            if entry.family not in {socket.AF_INET, socket.AF_INET6}:
                continue
            found.append(
                InterfaceAddress(
                    interface=interface,
                    address=entry.address,
                    bytes_per_s=speed_mbit * 1e6 / _BITS_PER_BYTE
                    if speed_mbit > 0
                    else None,
                    is_up=state is None or state.isup,
                )
            )
    return tuple(found)


def interface_of(address: str) -> str | None:
    """The interface that has this numeric address, if any has."""
    try:
        wanted = _parse(address)
    except ValueError:
        return None
    for entry in list_addresses():
        if _parse(entry.address) == wanted:
            return entry.interface
    return None


def choose_interface(
    peers: Sequence[str] = (),
    name: str | None = None,
    addresses: Sequence[InterfaceAddress] | None = None,
    route: Callable[[str], str | None] | None = None,
) -> InterfaceChoice:
    """Choose the address that this host should talk to the others from.

    Args:
        peers: Numeric addresses or names of other hosts, or of the meeting point.
        name: An interface or address that the user insists on.
        addresses: This host's; None reads them.
        route: From a peer to the own address that the system would use for it, None
            where there is no route; None asks the routing table.

    Returns:
        The one the user named; else the one that routes to most peers; else the fastest
        that is no bridge of a container runtime; else loopback.

    Raises:
        ConfigError: If there is no such interface, or no route to any peer.

    >>> eth0 = InterfaceAddress(interface="eth0", address="10.0.0.1", bytes_per_s=1.25e9)
    >>> docker = InterfaceAddress(interface="docker0", address="172.17.0.1")
    >>> choose_interface(addresses=[docker, eth0]).reason
    'is the fastest interface'
    """
    known = list_addresses() if addresses is None else tuple(addresses)
    if name is not None:
        return _named(name, known)
    usable = [a for a in known if a.is_up and not a.is_loopback]
    remote = [peer for peer in peers if not _is_own(peer, known)]
    if remote:
        return _routed(remote, known, usable, route or routed_address)
    preferred = sorted((a for a in usable if not a.is_virtual), key=_preference)
    if preferred:
        return _choice(preferred[0], "is the fastest interface", usable)
    loopback = next((a for a in known if a.is_loopback), None)
    if loopback is None:
        msg = "this host has no network address, not even loopback; bring `lo` up"
        raise ConfigError(msg)
    return _choice(loopback, "is all that this host has", usable)


def _named(name: str, known: Sequence[InterfaceAddress]) -> InterfaceChoice:
    found = sorted(
        (a for a in known if name in {a.interface, a.address, a.address.partition("%")[0]}),
        key=_preference,
    )
    if not found:
        names = ", ".join(str(address) for address in known) or "none"
        msg = f"this host has no interface {name!r} with an address; it has {names}"
        raise ConfigError(msg)
    if not found[0].is_up:
        msg = f"the interface {name!r} is down; bring it up or name another"
        raise ConfigError(msg)
    others = [a for a in known if not a.is_loopback]
    return _choice(found[0], "was asked for", others)


def _routed(
    peers: Sequence[str],
    known: Sequence[InterfaceAddress],
    usable: Sequence[InterfaceAddress],
    route: Callable[[str], str | None],
) -> InterfaceChoice:
    votes = Counter(own for own in map(route, peers) if own is not None)
    if not votes:
        names = ", ".join(str(a) for a in known)
        msg = (
            f"no route to {', '.join(peers)} from this host's {names}; check the "
            "addresses, or name an interface"
        )
        raise ConfigError(msg)
    best = min(votes, key=lambda own: (-votes[own], own))
    chosen = next(
        (a for a in known if _parse(a.address) == _parse(best)),
        InterfaceAddress(interface="unknown", address=best),
    )
    return _choice(chosen, "routes to the other hosts", usable)


def _choice(
    chosen: InterfaceAddress, reason: str, usable: Sequence[InterfaceAddress]
) -> InterfaceChoice:
    others = []
    for other in usable:
        if other.interface == chosen.interface or other.is_virtual or not other.is_up:
            continue
        faster = (other.bytes_per_s or 0.0) > (chosen.bytes_per_s or float("inf"))
        others.append(
            f"{other}, which is faster: name it to use it" if faster else str(other)
        )
    return InterfaceChoice(
        address=chosen.address,
        interface=chosen.interface,
        reason=reason,
        passed_over=tuple(dict.fromkeys(others)),
    )


def _preference(address: InterfaceAddress) -> tuple[bool, bool, float, int, str]:
    """Up first, then valid beyond one wire, then fast, then IPv4."""
    return (
        not address.is_up,
        address.is_link_local,
        -(address.bytes_per_s or 0.0),
        address.version,
        address.interface,
    )


def routed_address(peer: str) -> str | None:
    """Which own address the routing table picks for a peer; sends nothing."""
    try:
        found = socket.getaddrinfo(peer, _ANY_PORT, type=socket.SOCK_DGRAM)
    except OSError as error:
        msg = f"cannot resolve the peer {peer!r} ({error}); write a numeric address"
        raise ConfigError(msg) from error
    for family, kind, _, _, target in found:
        with contextlib.suppress(OSError), socket.socket(family, kind) as sock:
            sock.connect(target)
            return str(sock.getsockname()[0])
    return None


def connect_from(own_address: str, host: str, port: int, timeout_s: float) -> socket.socket:
    """Connect to a host from one of this host's addresses.

    Raises:
        OSError: If the connection does not come about in time.
    """
    wanted = _parse(own_address)
    family = socket.AF_INET if wanted.version == 4 else socket.AF_INET6  # noqa: PLR2004
    targets = socket.getaddrinfo(
        localise(host, own_address), port, family=family, type=socket.SOCK_STREAM
    )
    source = socket.getaddrinfo(own_address, 0, family=family, type=socket.SOCK_STREAM)
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.settimeout(timeout_s)
        sock.bind(source[0][4])
        sock.connect(targets[0][4])
    except BaseException:
        sock.close()
        raise
    return sock


def localise(host: str, own_address: str) -> str:
    """Give a link-local peer the scope of this host's own interface.

    A scope (the part after %) names an interface of the host it is used on; the one in
    an address that was copied from elsewhere means nothing here.

    >>> localise("fe80::2%enp3s0", "fe80::1%eth0"), localise("10.0.0.2", "10.0.0.1")
    ('fe80::2%eth0', '10.0.0.2')
    """
    bare, _, _ = host.partition("%")
    _, percent, scope = own_address.partition("%")
    try:
        is_link_local = _parse(bare).is_link_local and _parse(bare).version == 6  # noqa: PLR2004
    except ValueError:
        return host
    return f"{bare}%{scope}" if is_link_local and percent else host


def _is_own(peer: str, known: Sequence[InterfaceAddress]) -> bool:
    try:
        wanted = _parse(peer)
    except ValueError:
        return peer == "localhost"
    return wanted.is_loopback or any(_parse(a.address) == wanted for a in known)


def _parse(address: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    return ipaddress.ip_address(address.partition("%")[0])
