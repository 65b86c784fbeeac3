"""Addresses of emulated hosts, from ranges that no real network uses."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass

from geartrain.devices.emulation.network.spec import AddressFamilies

HUB_INDEX = 65_533
"""The hub's place among the hosts' addresses: the last but one of the subnet."""

_FIRST_IPV4 = ipaddress.IPv4Address("198.18.0.0")
"""198.18.0.0/15 is set aside for benchmarks (RFC 2544): the lower half is for eth0, the
upper for extra cards, a /20 each."""
_FIRST_EXTRA_IPV4 = ipaddress.IPv4Address("198.19.0.0")
_EXTRA_SIZE = 2**12
_FIRST_IPV6 = ipaddress.IPv6Address("fd67:7472::")
"""Unique local addresses (RFC 4193); the digits stand for "gtr"."""
_FIRST_EXTRA_IPV6 = ipaddress.IPv6Address("fd67:7472:1::")
_SUBNET_SIZE_IPV6 = 2**64


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """One address with the length of its subnet's prefix."""

    ip: str
    prefix_length: int

    def __str__(self) -> str:
        return f"{self.ip}/{self.prefix_length}"


def addresses_of(host_index: int, families: AddressFamilies) -> tuple[Address, ...]:
    """The addresses of a host's eth0, IPv4 first.

    >>> [str(address) for address in addresses_of(0, "both")]
    ['198.18.0.1/16', 'fd67:7472::1/64']
    >>> addresses_of(HUB_INDEX, "ipv4")[0].ip
    '198.18.255.254'
    """
    return _choose(
        families, str(_FIRST_IPV4 + host_index + 1), 16, str(_FIRST_IPV6 + host_index + 1)
    )


def extra_addresses_of(
    nic_index: int, host_index: int, families: AddressFamilies
) -> tuple[Address, ...]:
    """The addresses of one of a host's extra cards, each card on its own subnet.

    >>> str(extra_addresses_of(1, 0, "ipv4")[0])
    '198.19.16.1/20'
    """
    return _choose(
        families,
        str(_FIRST_EXTRA_IPV4 + nic_index * _EXTRA_SIZE + host_index + 1),
        20,
        str(_FIRST_EXTRA_IPV6 + nic_index * _SUBNET_SIZE_IPV6 + host_index + 1),
    )


def _choose(
    families: AddressFamilies, ipv4: str, ipv4_length: int, ipv6: str
) -> tuple[Address, ...]:
    found = []
    if families != "ipv6":
        found.append(Address(ip=ipv4, prefix_length=ipv4_length))
    if families != "ipv4":
        found.append(Address(ip=ipv6, prefix_length=64))
    return tuple(found)
