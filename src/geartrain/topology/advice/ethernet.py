"""Rules for plain network interfaces: MTU, speed, bonding, rings, drops."""

from __future__ import annotations

from collections.abc import Iterator

from geartrain.topology.advice import sources
from geartrain.topology.advice.finding import Finding
from geartrain.topology.advice.roce import JUMBO_BYTES, roce_ports
from geartrain.topology.fabric.facts import FabricFacts, NetworkInterface
from geartrain.units import format_bit_rate

_FAST_BYTES_PER_S = 10e9 / 8
"""From 10 Gbit/s on a core is busy with 1500-byte frames."""
_SHORT_QUEUE = 1000
"""Linux's default for Ethernet; shorter ones drop a burst in the host itself."""
_SMALL_RING = 1024
_DROPPED_FRACTION = 1e-5
"""TCP's rate falls with the square root of the loss; Mathis et al., CCR 1997."""
_LARGE_BYTES = 8800
"""Clouds offer 8896 to 9001; any of them will do."""


def candidates(facts: FabricFacts) -> tuple[NetworkInterface, ...]:
    """Find what could carry an exchange: up, addressed, physical or a bond of such."""
    return tuple(
        one
        for one in facts.interfaces
        if one.is_up and one.has_address and (one.is_physical or one.bond is not None)
    )


def check_jumbo(facts: FabricFacts) -> Iterator[Finding]:
    """Large frames save CPU time from 10 Gbit/s on."""
    of_roce = {one.name for _, _, one in roce_ports(facts) if one is not None}
    for one in candidates(facts):
        if one.name in of_roce or (one.bytes_per_s or 0) < _FAST_BYTES_PER_S:
            continue  # RDMA has a rule of its own, and a slow link needs none
        is_good = one.mtu_bytes >= _LARGE_BYTES
        yield Finding(
            rule="ethernet-mtu",
            severity="good" if is_good else "hint",
            subject=one.name,
            found=f"MTU {one.mtu_bytes} at {show_rate(one.bytes_per_s)}",
            read_from=f"/sys/class/net/{one.name}/mtu",
            expected=f"MTU {JUMBO_BYTES}",
            action=""
            if is_good
            else f"ip link set {one.name} mtu {JUMBO_BYTES}, if every host and switch "
            "port of this network takes it",
            why="a sixth of the packets, and so of the CPU time that TCP takes",
            source=sources.ESNET_TUNING,
        )


def check_duplex(facts: FabricFacts) -> Iterator[Finding]:
    """A half-duplex link halves an exchange, which sends and receives at once."""
    for one in candidates(facts):
        if one.is_full_duplex is False:
            yield Finding(
                rule="duplex",
                severity="error",
                subject=one.name,
                found="half duplex",
                read_from=f"/sys/class/net/{one.name}/duplex",
                expected="full duplex",
                action=f"check cable and autonegotiation at both ends: ethtool {one.name}",
                why="an exchange sends and receives at the same time",
                source=sources.ESNET_TUNING,
            )


def check_speeds(facts: FabricFacts) -> Iterator[Finding]:
    """Interfaces of different speed need a choice; a library's own may be the slow one."""
    rates = {one.name: one.bytes_per_s for one in candidates(facts) if one.bytes_per_s}
    if len(set(rates.values())) <= 1:
        return
    shown = ", ".join(f"{name} {show_rate(rate)}" for name, rate in rates.items())
    best = max(rates, key=lambda name: rates[name] or 0)
    yield Finding(
        rule="mixed-speeds",
        severity="warning",
        subject="host",
        found=shown,
        read_from="/sys/class/net/*/speed",
        expected="one speed, or an explicit choice",
        action=f"name the fast one: --interface {best}, or the environment below",
        why="a library that picks the first interface, or several of them, goes as fast "
        "as the slowest",
        source=sources.NCCL_ENVIRONMENT,
    )


def check_bonds(facts: FabricFacts) -> Iterator[Finding]:
    """A bond must spread the few flows of an exchange over its members."""
    for one in facts.interfaces:
        bond = one.bond
        if bond is None or not one.is_up:
            continue
        where = f"/sys/class/net/{one.name}/bonding"
        spreads = {"802.3ad", "balance-xor", "balance-tlb", "balance-alb"}
        if bond.mode == "balance-rr":
            problem, action = "frames arrive out of order", "mode 802.3ad (LACP)"
        elif bond.mode not in spreads:
            problem, action = "one member works, the others wait", "mode 802.3ad (LACP)"
        elif bond.mode in {"802.3ad", "balance-xor"} and bond.transmit_hash == "layer2":
            problem = "all flows between two hosts take one member"
            action = f"echo layer3+4 > {where}/xmit_hash_policy, and likewise in the switch"
        else:
            problem, action = "", ""
        yield Finding(
            rule="bonding",
            severity="warning" if problem else "good",
            subject=one.name,
            found=f"{bond.mode}, {bond.transmit_hash}, {len(bond.member_names)} members"
            + (f": {problem}" if problem else ""),
            read_from=f"{where}/mode and {where}/xmit_hash_policy",
            expected="802.3ad with layer3+4",
            action=action,
            why="an exchange has few flows; the hash decides whether they share a member",
            source=sources.KERNEL_BONDING,
        )
        yield from _check_monitor(one)


def _check_monitor(one: NetworkInterface) -> Iterator[Finding]:
    assert one.bond is not None
    if one.bond.monitor_interval_s > 0:
        return
    where = f"/sys/class/net/{one.name}/bonding/miimon"
    yield Finding(
        rule="bond-monitor",
        severity="hint",
        subject=one.name,
        found="miimon 0: a dead member is not noticed (unless ARP monitoring is on)",
        read_from=where,
        expected="miimon 100",
        action=f"echo 100 > {where}",
        why="frames sent to a dead member are lost",
        source=sources.KERNEL_BONDING,
    )


def check_queues(facts: FabricFacts) -> Iterator[Finding]:
    """Short queues drop bursts in the host."""
    for one in candidates(facts):
        length = one.transmit_queue_length
        if length is not None and 0 < length < _SHORT_QUEUE:
            yield Finding(
                rule="transmit-queue",
                severity="hint",
                subject=one.name,
                found=f"transmit queue of {length} packets",
                read_from=f"/sys/class/net/{one.name}/tx_queue_len",
                expected=f"{_SHORT_QUEUE} or more",
                action=f"ip link set {one.name} txqueuelen {_SHORT_QUEUE}",
                why="several senders of one host burst at once when a bucket is ready",
                source=sources.ESNET_TUNING,
            )
        ring, largest = one.receive_ring, one.max_receive_ring
        if ring and largest and ring < min(largest, _SMALL_RING):
            yield Finding(
                rule="receive-ring",
                severity="hint",
                subject=one.name,
                found=f"receive ring of {ring} of {largest} frames",
                read_from=f"ethtool -g {one.name}",
                expected=f"{min(largest, _SMALL_RING)} or more",
                action=f"ethtool -G {one.name} rx {min(largest, 4 * _SMALL_RING)}",
                why="a busy core fetches frames late; a small ring drops them meanwhile",
                source=sources.ESNET_TUNING,
            )


def check_drops(facts: FabricFacts) -> Iterator[Finding]:
    """Received packets that were dropped cost TCP its rate."""
    for one in candidates(facts):
        if not one.num_received or one.num_dropped is None:
            continue
        fraction = one.num_dropped / one.num_received
        is_bad = fraction > _DROPPED_FRACTION
        yield Finding(
            rule="drops",
            severity="warning" if is_bad else "good",
            subject=one.name,
            found=f"{one.num_dropped} of {one.num_received} received packets dropped",
            read_from=f"/sys/class/net/{one.name}/statistics/rx_dropped, rx_missed_errors",
            expected=f"less than {_DROPPED_FRACTION:g} of them",
            action=f"watch them during training; larger rings: ethtool -G {one.name}"
            if is_bad
            else "",
            why="TCP takes a loss for congestion and slows down",
            source=sources.ESNET_TUNING,
        )


def show_rate(bytes_per_s: float | None) -> str:
    """Write a link's rate in bits, as link rates are always told.

    >>> show_rate(12.5e9), show_rate(None)
    ('100 Gbit/s', 'unknown rate')
    """
    return "unknown rate" if bytes_per_s is None else format_bit_rate(bytes_per_s)
