"""What a scheme must send over each link, whoever carries it out. Pure.

Worked out from the schedule and the lab alone and held against the kernel's counters:
an exchange that shows less has not moved the numbers it claims to have summed.
"""

from __future__ import annotations

from collections.abc import Sequence

from geartrain.bench.comm.rank_order import crossing_edges
from geartrain.devices.emulation.network import NetworkSpec
from geartrain.errors import ConfigError
from geartrain.planner.exchange import CommSchedule

BITS_A_VALUE = {"none": 32, "fp16": 16, "bf16": 16, "fp8": 8, "int8": 8, "int4": 4}
"""Of the values alone; scales and flags come on top."""


def least_ring_bytes(
    hosts_in_ring: Sequence[int], spec: NetworkSpec, num_bytes: int
) -> dict[str, float]:
    """A ring all-reduce: ``2 (n - 1) / n`` tensors over every edge.

    Args:
        hosts_in_ring: The host of each member, in the ring's order.
        spec: The lab.
        num_bytes: Size of the tensor.

    Returns:
        Bytes in each direction by link, as the lab names them: racks where there are
        several, else hosts.

    >>> from geartrain.devices.emulation.network import parse_links
    >>> least_ring_bytes([0, 1], parse_links("2x1:8Mbit:8Mbit"), 1000)
    {'rack0': 1000.0, 'rack1': 1000.0}
    """
    num_members = len(hosts_in_ring)
    edge_bytes = 2 * (num_members - 1) / num_members * num_bytes
    if len(spec.racks) == 1:
        return {f"host{host}": edge_bytes for host in sorted(hosts_in_ring)}
    racks = [spec.rack_of(host) for host in hosts_in_ring]
    edges = crossing_edges(racks, len(spec.racks))
    return {f"rack{i}": count * edge_bytes for i, count in enumerate(edges)}


def least_stock_bytes(spec: NetworkSpec, num_bytes: int) -> dict[str, float]:
    """Torch's reduce-scatter, all-reduce, all-gather: rings of one host a rack."""
    num_racks = len(spec.racks)
    if num_racks == 1:
        return {f"host{host}": float(num_bytes) for host in range(spec.num_hosts)}
    least = 2 * (num_racks - 1) / num_racks * num_bytes
    return {f"rack{i}": least for i in range(num_racks)}


def least_schedule_bytes(
    schedule: CommSchedule,
    host_of_member: Sequence[int],
    spec: NetworkSpec,
    num_bytes: int,
) -> dict[str, float]:
    """What geartrain's own schedule must send, and its codec make of it.

    A rack that owns the part x of a tensor sends ``1 - x`` of it to the owners of the
    rest, and its own part's total to ``R - 1`` racks; it receives as much. A host of a
    single rack owns a part of the sum likewise.

    Args:
        schedule: Of this size.
        host_of_member: The host of each member.
        spec: The lab; where the schedule has other racks, what every cut must pass holds.
        num_bytes: Size of the tensor, as float32.

    Returns:
        Bytes in each direction by link, as ``least_ring_bytes``.

    Raises:
        ConfigError: If the schedule has a codec whose size isn't known here.
    """
    if schedule.algorithm == "ring":
        ring = [host_of_member[member] for member in schedule.ring_order]
        return least_ring_bytes(ring, spec, num_bytes)
    if len(spec.racks) == 1:
        return _least_host_bytes(schedule, host_of_member, num_bytes)
    bits = min(_bits(rack.codec) for rack in schedule.racks)
    coded_bytes = num_bytes * bits / 32
    least = {f"rack{i}": coded_bytes for i in range(len(spec.racks))}
    if schedule.algorithm != "hierarchical":
        return least
    others = len(spec.racks) - 2
    for part in schedule.racks:
        hosts = {host_of_member[leader] for leader in part.leaders}
        rack = spec.rack_of(min(hosts))
        if len(schedule.racks) == len(spec.racks) and hosts == _hosts_of(spec, rack):
            least[f"rack{rack}"] = coded_bytes * (1 + others * part.share)
    return least


def short_links(
    least: dict[str, float], sent: dict[str, int], received: dict[str, int]
) -> list[str]:
    """Links that carried less than they must have, in words."""
    found = []
    for link, least_bytes in least.items():
        for way, counted in (("sent", sent[link]), ("received", received[link])):
            if counted < least_bytes:
                found.append(
                    f"{link} {way} {counted} bytes by the kernel's counters, but the "
                    f"scheme needs {least_bytes:.0f} at least"
                )
    return found


def _least_host_bytes(
    schedule: CommSchedule, host_of_member: Sequence[int], num_bytes: int
) -> dict[str, float]:
    """One rack: everything out once, and what a host owns to all others."""
    (part,) = schedule.racks if len(schedule.racks) == 1 else (None,)
    hosts = [host_of_member[leader] for leader in schedule.leaders]
    if part is None or schedule.algorithm != "hierarchical":
        return {f"host{host}": float(num_bytes) for host in hosts}
    return {
        f"host{host}": num_bytes * (1 + share * (len(hosts) - 2))
        for host, share in zip(hosts, part.host_shares, strict=True)
    }


def _hosts_of(spec: NetworkSpec, rack_index: int) -> set[int]:
    return {h for h in range(spec.num_hosts) if spec.rack_of(h) == rack_index}


def _bits(codec: str) -> int:
    if codec not in BITS_A_VALUE:
        msg = (
            f"codec {codec!r} has no known size; expected one of {', '.join(BITS_A_VALUE)}"
        )
        raise ConfigError(msg)
    return BITS_A_VALUE[codec]
