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
from geartrain.planner.exchange.schedule import CodecProfile
from geartrain.planner.exchange.staged_cost import ADD_BYTES_PER_S

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


def fill_shares(
    fabric: Fabric,
    codec_fractions: Sequence[float] | None = None,
    codec: CodecProfile | None = None,
    core_fraction: float = 1.0,
) -> Shares:
    """Find the shares of the least time.

    A slower link never gets a larger share than a faster one of its kind. The slowest of
    very unequal links gets nothing: it still sends and receives the whole tensor once.
    Where links have room within the least time, shares are equal: flows of equal size
    share an uplink fairly, and a chunk arrives at all its owners at once.

    Args:
        fabric: Racks and hosts with their rates.
        codec_fractions: Encoded / plain bytes on each rack's uplink; 1 where not given.
        codec: What the codec costs the owners' processors.
        core_fraction: Processor cores of each host.

    Source: own derivation, see the head of this file. Uplinks first and hosts after, as is
    usual, is not optimal where a rack's hosts are slower than its uplink.
    """
    fractions = tuple(codec_fractions or (1.0,) * len(fabric.racks))
    num_racks = len(fabric.racks)
    lines = [
        _lines(rack, fraction, num_racks, codec if fraction < 1 else None, core_fraction)
        for rack, fraction in zip(fabric.racks, fractions, strict=True)
    ]
    least = max(
        _least_s(fabric.racks, fractions),
        _racks_s(lines) if num_racks > _TWO else 0.0,
    )
    room = [_room(rack_lines, least) for rack_lines in lines]
    racks = tuple(part / sum(room) for part in room)
    hosts = []
    for rack, share, fraction in zip(fabric.racks, racks, fractions, strict=True):
        uplink = fraction * (1 + (num_racks - _TWO) * share) if num_racks > 1 else 0.0
        hosts.append(_fill_within(least, [h.bytes_per_s for h in rack.hosts], uplink))
    return Shares(racks=racks, hosts=tuple(hosts), s_per_byte=least)


def _hosts_s(bytes_per_s: Sequence[float], uplink_load: float) -> float:
    """Least seconds per byte of a rack's hosts."""
    num_hosts = len(bytes_per_s)
    if num_hosts == 1:
        return uplink_load / bytes_per_s[0]
    slope = num_hosts - _TWO + uplink_load
    # The slowest host sends and receives the tensor once even if it owns nothing.
    return max(1 / min(bytes_per_s), (slope + num_hosts) / sum(bytes_per_s))


def _fill_within(
    time_s: float, bytes_per_s: Sequence[float], uplink_load: float
) -> tuple[float, ...]:
    """Hosts' shares that stay within that time per byte."""
    num_hosts = len(bytes_per_s)
    slope = num_hosts - _TWO + uplink_load
    if num_hosts == 1 or slope <= 0:
        # Two hosts that swap: each link carries the tensor once, whatever the cut.
        return (1 / num_hosts,) * num_hosts
    room = [max(0.0, min(1.0, (time_s * rate - 1) / slope)) for rate in bytes_per_s]
    return _level(room)


def _level(room: Sequence[float]) -> tuple[float, ...]:
    """Shares as equal as the room for each of them allows; they sum to 1.

    >>> _level([1.0, 1.0, 0.125])
    (0.4375, 0.4375, 0.125)
    """
    left, level = 1.0, 0.0
    for index, least in enumerate(sorted(room)):
        level = left / (len(room) - index)
        if least >= level:
            break
        left -= least
    else:
        level = max(room)  # rounding: there was room for a trifle less than the whole
    shares = [min(level, own) for own in room]
    return tuple(share / sum(shares) for share in shares)


def _least_s(racks: Sequence[FabricRack], fractions: Sequence[float]) -> float:
    """What each rack takes that owns nothing; with up to two racks, what each takes."""
    if len(racks) == 1:
        return _hosts_s([host.bytes_per_s for host in racks[0].hosts], 0.0)
    times = []
    for rack, fraction in zip(racks, fractions, strict=True):
        times.append(fraction / rack.bytes_per_s)
        times.append(_hosts_s([host.bytes_per_s for host in rack.hosts], fraction))
    return max(times)


Line = tuple[float, float]
"""Slope and offset: within time T per byte there is room for ``slope T - offset``."""


def _lines(
    rack: FabricRack,
    fraction: float,
    num_racks: int,
    codec: CodecProfile | None,
    core_fraction: float,
) -> tuple[Line, ...]:
    """Room for the rack's share x_r: over its uplink, its hosts' links and processors."""
    extra = num_racks - _TWO
    if extra <= 0:
        return ()
    num_hosts = len(rack.hosts)
    total = sum(host.bytes_per_s for host in rack.hosts)
    loads = [
        (rack.bytes_per_s / fraction, 1.0),
        (total / fraction, 2 * (num_hosts - 1) / fraction + 1.0),
    ]
    lines = [(slope / extra, offset / extra) for slope, offset in loads]
    # What is owned is added up from every rack; coded, it is decoded from each and encoded
    # once, besides the partial sums that all encode and the totals that all decode.
    owned_s, always_s = (num_racks - 1) / ADD_BYTES_PER_S, 0.0
    if codec is not None:
        encode_s, decode_s = 1 / codec.encode_bytes_per_s, 1 / codec.decode_bytes_per_s
        owned_s += encode_s + num_racks * decode_s
        always_s = encode_s + decode_s
    lines.append((num_hosts * core_fraction / owned_s, always_s / owned_s))
    return tuple(lines)


def _racks_s(lines: Sequence[Sequence[Line]]) -> float:
    """Least seconds per byte within which the racks' room adds up to the whole."""
    every = [line for rack_lines in lines for line in rack_lines]
    low = max(offset / slope for slope, offset in every)
    high = max((1 + offset) / slope for slope, offset in every)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if sum(_room(rack_lines, middle) for rack_lines in lines) >= 1:
            high = middle
        else:
            low = middle
    return high


def _room(lines: Sequence[Line], time_s: float) -> float:
    """The share that all lines leave room for; 1 where nothing limits it."""
    return max(0.0, min([1.0, *(slope * time_s - offset for slope, offset in lines)]))
