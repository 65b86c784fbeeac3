"""What a network of emulated hosts looks like: frozen facts, and how people write them."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from geartrain.errors import ConfigError
from geartrain.units import format_bits_per_s, parse_bytes_per_s

AddressFamilies = Literal["ipv4", "ipv6", "both"]

MAX_HOSTS = 4094
"""What the smallest of the lab's subnets, a /20, has addresses for."""
_MIN_MTU_BYTES = 1280
"""IPv6 needs that much of every link (RFC 8200, section 5)."""
_INTERFACE = re.compile(r"[A-Za-z0-9_.-]{1,15}\Z")
"""The kernel's IFNAMSIZ is 16, the closing zero included."""
_RACKS_BY_NUMBER = re.compile(r"(?P<racks>\d+)x(?P<hosts>\d+)\Z")
_RACKS_BY_SIZE = re.compile(r"\d+(\+\d+)+\Z")
_SHAPE = "RATE, RATE,RATE,... or RACKSxHOSTS:NIC:UPLINK such as 2x4:500Mbit:50Mbit"


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkRate:
    """Rates of one link, seen from its lower end: a host, or a whole rack."""

    send_bytes_per_s: float
    receive_bytes_per_s: float

    def __post_init__(self) -> None:
        for rate in (self.send_bytes_per_s, self.receive_bytes_per_s):
            if not (rate > 0 and math.isfinite(rate)):
                msg = (
                    f"link rate {rate} bytes/s must be > 0 and finite; "
                    "write one such as 50Mbit"
                )
                raise ConfigError(msg)

    @classmethod
    def both_ways(cls, bytes_per_s: float) -> LinkRate:
        """The same rate in each direction."""
        return cls(send_bytes_per_s=bytes_per_s, receive_bytes_per_s=bytes_per_s)

    @property
    def slower_bytes_per_s(self) -> float:
        """The rate of the slower direction."""
        return min(self.send_bytes_per_s, self.receive_bytes_per_s)

    def __str__(self) -> str:
        send, receive = self.send_bytes_per_s, self.receive_bytes_per_s
        if send == receive:
            return format_bits_per_s(send)
        return f"{format_bits_per_s(send)}~{format_bits_per_s(receive)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExtraNic:
    """One more network card in every host, on a subnet of its own."""

    name: str = "eth1"
    rate: LinkRate | None = None
    """None: not shaped."""
    is_connected: bool = True
    """False: it is up and has an address, but its cable leads nowhere."""

    def __post_init__(self) -> None:
        if not _INTERFACE.match(self.name) or self.name in {"lo", "eth0"}:
            msg = (
                f"extra NIC {self.name!r} must be an interface name of at most 15 "
                "characters other than lo and eth0, such as eth1"
            )
            raise ConfigError(msg)


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkSpec:
    """Racks of hosts. Hosts are counted rack by rack, from 0.

    Args:
        racks: The rate of every host's link, rack by rack.
        uplinks: The rate of every rack's link to the core; None where it is not shaped,
            empty where none is.
        mtu_bytes: Of all links.
        families: Which addresses the hosts have.
        extra_nics: Further cards of every host.
        congestion_control: TCP's, inside the hosts; None keeps the machine's.
    """

    racks: tuple[tuple[LinkRate, ...], ...]
    uplinks: tuple[LinkRate | None, ...] = ()
    mtu_bytes: int = 1500
    families: AddressFamilies = "ipv4"
    extra_nics: tuple[ExtraNic, ...] = ()
    congestion_control: str | None = None

    def __post_init__(self) -> None:
        if not self.racks or not all(self.racks):
            msg = f"racks of {[len(rack) for rack in self.racks]} hosts; each needs a host"
            raise ConfigError(msg)
        if self.uplinks and len(self.uplinks) != len(self.racks):
            msg = (
                f"{len(self.uplinks)} uplinks for {len(self.racks)} racks; "
                "give one rate for all or one a rack"
            )
            raise ConfigError(msg)
        if self.num_hosts > MAX_HOSTS:
            msg = f"{self.num_hosts} hosts; a network has at most {MAX_HOSTS}"
            raise ConfigError(msg)
        if not _MIN_MTU_BYTES <= self.mtu_bytes <= 65535:  # noqa: PLR2004 - IP's largest
            msg = f"mtu_bytes={self.mtu_bytes} must lie in {_MIN_MTU_BYTES}..65535"
            raise ConfigError(msg)
        names = [nic.name for nic in self.extra_nics]
        if len(set(names)) != len(names):
            msg = f"extra NICs {names} have a name twice; give each its own"
            raise ConfigError(msg)

    def __str__(self) -> str:
        """Hosts a rack and the rates, such as ``3+5 of 500Mbit, uplinks 50Mbit``."""
        sizes = "+".join(str(len(rack)) for rack in self.racks)
        text = f"{sizes} of {_listed(self.hosts)}"
        return f"{text}, uplinks {_listed(self.uplinks)}" if self.uplinks else text

    @property
    def num_hosts(self) -> int:
        """Hosts in all racks."""
        return sum(len(rack) for rack in self.racks)

    @property
    def hosts(self) -> tuple[LinkRate, ...]:
        """Every host's link, in host order."""
        return tuple(link for rack in self.racks for link in rack)

    def rack_of(self, host_index: int) -> int:
        """The rack that a host stands in.

        >>> link = LinkRate.both_ways(1e6)
        >>> NetworkSpec(racks=((link,) * 3, (link,) * 5)).rack_of(3)
        1
        """
        start = 0
        for rack_index, rack in enumerate(self.racks):
            start, first = start + len(rack), start
            if first <= host_index < start:
                return rack_index
        msg = f"no host {host_index}; the network has hosts 0..{self.num_hosts - 1}"
        raise ConfigError(msg)

    def uplink(self, rack_index: int) -> LinkRate | None:
        """A rack's link to the core; None where it is not shaped."""
        return self.uplinks[rack_index] if self.uplinks else None


def _listed(rates: Sequence[LinkRate | None]) -> str:
    """Rates in their order; one of them where all are alike."""
    texts = ["unshaped" if rate is None else str(rate) for rate in rates]
    return texts[0] if len(set(texts)) == 1 else ",".join(texts)


def parse_link_rate(text: str) -> LinkRate:
    """Read the rate of a link: ``50Mbit``, or ``50Mbit~10Mbit`` to send and receive.

    >>> parse_link_rate("8Mbit~4Mbit")
    LinkRate(send_bytes_per_s=1000000.0, receive_bytes_per_s=500000.0)
    """
    send, tilde, receive = text.partition("~")
    send_bytes_per_s = parse_bytes_per_s(send)
    return LinkRate(
        send_bytes_per_s=send_bytes_per_s,
        receive_bytes_per_s=parse_bytes_per_s(receive) if tilde else send_bytes_per_s,
    )


def parse_links(text: str, num_hosts: int | None = None) -> NetworkSpec:
    """Read a network.

    Args:
        text: One rate for all hosts of one rack (``50Mbit``), a rate a host
            (``50Mbit,50Mbit,12Mbit``), or racks (``2x4:500Mbit:50Mbit`` are two racks
            of four, ``3+5:500Mbit:50Mbit`` are three and five): the hosts' rate, then
            the racks' uplinks, each one for all or a list. ``~`` parts the two
            directions of a rate: ``50Mbit~10Mbit`` sends at 50, receives at 10.
        num_hosts: How many hosts there must be; needed where the text has one rate only.

    Raises:
        ConfigError: If it can't be read or has another number of hosts.

    >>> spec = parse_links("3+5:500Mbit:50Mbit,12Mbit")
    >>> spec.num_hosts, str(spec.uplink(1)), str(spec.racks[0][0])
    (8, '12Mbit', '500Mbit')
    """
    head, colon, rest = text.partition(":")
    spec = _parse_racks(text, head, rest) if colon else _parse_one_rack(text, num_hosts)
    if num_hosts is not None and spec.num_hosts != num_hosts:
        msg = (
            f"links {text!r} describe {spec.num_hosts} hosts, but there are {num_hosts} "
            f"devices, a host each; give {num_hosts} rates or one for all"
        )
        raise ConfigError(msg)
    return spec


def _parse_one_rack(text: str, num_hosts: int | None) -> NetworkSpec:
    rates = [parse_link_rate(part) for part in text.split(",")]
    if len(rates) == 1:
        if num_hosts is None:
            msg = f"links {text!r} do not say how many hosts there are; write {_SHAPE}"
            raise ConfigError(msg)
        rates *= num_hosts
    return NetworkSpec(racks=(tuple(rates),))


def _parse_racks(text: str, head: str, rest: str) -> NetworkSpec:
    nics, colon, uplinks = rest.partition(":")
    if not colon:
        msg = f"links {text!r} have no uplinks; write {_SHAPE}"
        raise ConfigError(msg)
    sizes = _rack_sizes(text, head)
    host_rates = _rate_each(text, nics, sum(sizes), "hosts")
    racks = []
    for size in sizes:
        racks.append(tuple(host_rates[:size]))
        host_rates = host_rates[size:]
    rates = tuple(_rate_each(text, uplinks, len(sizes), "racks"))
    return NetworkSpec(racks=tuple(racks), uplinks=rates)


def _rack_sizes(text: str, head: str) -> list[int]:
    if match := _RACKS_BY_NUMBER.match(head):
        sizes = [int(match["hosts"])] * int(match["racks"])
    elif _RACKS_BY_SIZE.match(head):
        sizes = [int(size) for size in head.split("+")]
    else:
        msg = f"links {text!r}: {head!r} is not like 2x4 or 3+5; write {_SHAPE}"
        raise ConfigError(msg)
    if not sizes or min(sizes) < 1 or sum(sizes) > MAX_HOSTS:
        msg = f"links {text!r}: each rack needs a host, and {MAX_HOSTS} at most in all"
        raise ConfigError(msg)
    return sizes


def _rate_each(text: str, rates: str, count: int, what: str) -> list[LinkRate]:
    parsed = [parse_link_rate(part) for part in rates.split(",")]
    if len(parsed) == 1:
        return parsed * count
    if len(parsed) != count:
        msg = f"links {text!r}: {len(parsed)} rates for {count} {what}; give 1 or {count}"
        raise ConfigError(msg)
    return parsed
