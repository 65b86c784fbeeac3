"""Who adds up how much, so that no link is the only one still busy at the end.

In units of the tensor, with R racks of H_r hosts, rack shares x_r and host shares s_h, the
staged exchange puts this load on each link, in each direction alike:

    uplink of rack r    f_r = phi_r (1 + (R - 2) x_r)             for R > 1, else 0
    NIC of host h       1 + s_h k_r,  k_r = H_r - 2 + f_r         for H_r > 1, else f_r

where phi_r is the part of the bytes that the rack's codec leaves. Both grow linearly with
a share, so the least time T comes from water-filling: within T a host has room for
``s_h k_r <= T b_h - 1``. Summed over a rack that is ``k_r <= T B_r - H_r``, B_r the sum
of its hosts' rates, which bounds x_r just as the uplink does. So racks and hosts are
solved together and exactly, without a solver for linear programs; the tests compare.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from geartrain.planner.exchange.fabric import Fabric, FabricRack

_HALVINGS = 60
_TWO = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """Shares of a fabric, and the time per byte that they allow."""

    racks: tuple[float, ...]
    """Shape (num_racks,); sum to 1."""
    hosts: tuple[tuple[float, ...], ...]
    """Per rack, shape (num_hosts,); each sums to 1."""
    s_per_byte: float
    """Of the whole exchange as a fluid: no latency, no chunks, no processor."""


def fill_shares(fabric: Fabric, codec_fractions: Sequence[float] | None = None) -> Shares:
    """Find the shares of the least time.

    A slower link never gets a larger share than a faster one of its kind. The slowest of
    very unequal links gets nothing: it still sends and receives the whole tensor once.

    Args:
        fabric: Racks and hosts with their rates.
        codec_fractions: Encoded / plain bytes on each rack's uplink; 1 where not given.

    Source: own derivation, see the head of this file. Uplinks first and hosts after, as is
    usual, is not optimal where a rack's hosts are slower than its uplink.
    """
    fractions = tuple(codec_fractions or (1.0,) * len(fabric.racks))
    racks = _fill_racks(fabric.racks, fractions)
    extra = len(racks) - _TWO
    hosts, times = [], []
    for rack, share, fraction in zip(fabric.racks, racks, fractions, strict=True):
        uplink = fraction * (1 + extra * share) if len(racks) > 1 else 0.0
        if len(racks) > 1:
            times.append(uplink / rack.bytes_per_s)
        shares, s_per_byte = fill_hosts([h.bytes_per_s for h in rack.hosts], uplink)
        hosts.append(shares)
        times.append(s_per_byte)
    return Shares(racks=racks, hosts=tuple(hosts), s_per_byte=max(times))


def fill_hosts(
    bytes_per_s: Sequence[float], uplink_load: float = 0.0
) -> tuple[tuple[float, ...], float]:
    """Shares of the hosts of one rack, and their seconds per byte of the tensor.

    Args:
        bytes_per_s: Rate of each host's link, shape (num_hosts,).
        uplink_load: Bytes that the rack's uplink carries per byte of the tensor.

    >>> fill_hosts([4.0, 4.0, 1.0])
    ((0.5, 0.5, 0.0), 1.0)
    """
    num_hosts = len(bytes_per_s)
    if num_hosts == 1:
        return (1.0,), uplink_load / bytes_per_s[0]
    slope = num_hosts - _TWO + uplink_load
    # The slowest host sends and receives the tensor once even if it owns nothing.
    time_s = max(1 / min(bytes_per_s), (slope + num_hosts) / sum(bytes_per_s))
    if slope <= 0:  # two hosts swap: each link carries the tensor once, whatever the cut
        return (1 / num_hosts,) * num_hosts, time_s
    room = [max(0.0, min(1.0, (time_s * rate - 1) / slope)) for rate in bytes_per_s]
    total = sum(room)
    return tuple(share / total for share in room), time_s


def _fill_racks(
    racks: Sequence[FabricRack], fractions: Sequence[float]
) -> tuple[float, ...]:
    num_racks = len(racks)
    if num_racks <= _TWO:  # one owns all; two swap, each link carries the tensor once
        return (1 / num_racks,) * num_racks
    lines = [line for r, f in zip(racks, fractions, strict=True) for line in _room(r, f)]
    # Each line is room = slope T - offset; within the least T none may be below 0.
    low = max(offset / slope for slope, offset in lines)
    high = max(low, *((num_racks - _TWO + offset) / slope for slope, offset in lines))
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if sum(_rack_room(lines, middle, num_racks)) >= 1:
            high = middle
        else:
            low = middle
    room = _rack_room(lines, high, num_racks)
    return tuple(share / sum(room) for share in room)


def _room(rack: FabricRack, fraction: float) -> tuple[tuple[float, float], ...]:
    """Slope and offset over T of (R - 2) x_r: as the uplink, and as the hosts allow."""
    num_hosts = len(rack.hosts)
    total = sum(host.bytes_per_s for host in rack.hosts)
    return (
        (rack.bytes_per_s / fraction, 1.0),
        (total / fraction, 2 * (num_hosts - 1) / fraction + 1.0),
    )


def _rack_room(
    lines: Sequence[tuple[float, float]], time_s: float, num_racks: int
) -> list[float]:
    room = [slope * time_s - offset for slope, offset in lines]
    return [
        max(0.0, min(1.0, uplink / (num_racks - _TWO), hosts / (num_racks - _TWO)))
        for uplink, hosts in zip(room[::2], room[1::2], strict=True)
    ]
