"""Rules for the TCP stack, which carries everything that is not RDMA."""

from __future__ import annotations

from collections.abc import Iterator

from geartrain.topology.advice import sources
from geartrain.topology.advice.ethernet import candidates, show_rate
from geartrain.topology.advice.finding import Finding
from geartrain.topology.fabric.facts import FabricFacts
from geartrain.units import format_bytes

_ROUND_TRIP_S = 1e-3
"""Between racks of a data centre with full queues; a window must cover rate x this."""
_LEAST_WINDOW_BYTES = 4 * 2**20
_RATE_OF_UNKNOWN = 10e9 / 8
_MODEL_BASED = ("bbr",)


def check_buffers(facts: FabricFacts) -> Iterator[Finding]:
    """The largest TCP window must hold what is under way."""
    rates = [one.bytes_per_s for one in candidates(facts) if one.bytes_per_s]
    rate = max(rates, default=_RATE_OF_UNKNOWN)
    needed = max(_LEAST_WINDOW_BYTES, rate * _ROUND_TRIP_S)
    for name in ("net.ipv4.tcp_rmem", "net.ipv4.tcp_wmem"):
        values = facts.sysctls.get(name, "").split()
        if len(values) != 3:  # noqa: PLR2004 - least, default, most
            continue
        largest = int(values[2])
        is_good = largest >= needed
        yield Finding(
            rule="tcp-buffers",
            severity="good" if is_good else "warning",
            subject=name,
            found=f"at most {format_bytes(largest)}",
            read_from=f"/proc/sys/{name.replace('.', '/')}",
            expected=f"{format_bytes(needed)} or more, for {show_rate(rate)} over "
            f"{_ROUND_TRIP_S * 1e3:g} ms",
            action=""
            if is_good
            else f"sysctl -w {name}='{values[0]} {values[1]} {round(needed)}'",
            why="a connection sends at most one window in a round trip",
            source=sources.ESNET_TUNING,
        )


def check_congestion_control(facts: FabricFacts) -> Iterator[Finding]:
    """Reno gives a link away at each loss."""
    found = facts.sysctls.get("net.ipv4.tcp_congestion_control")
    if found is None:
        return
    offered = facts.sysctls.get("net.ipv4.tcp_available_congestion_control", "").split()
    is_bad = found == "reno"
    better = next((name for name in ("bbr", "cubic", "dctcp") if name in offered), "cubic")
    yield Finding(
        rule="congestion-control",
        severity="warning" if is_bad else "good",
        subject="host",
        found=f"{found} (of {', '.join(offered) or 'unknown'})",
        read_from="/proc/sys/net/ipv4/tcp_congestion_control",
        expected="cubic or bbr",
        action=f"sysctl -w net.ipv4.tcp_congestion_control={better}" if is_bad else "",
        why="reno halves its rate at each loss and regains it by a packet a round trip; "
        "with it a ring over shaped links took 15 % longer than with bbr",
        source=sources.BBR,
    )
    qdisc = facts.sysctls.get("net.core.default_qdisc")
    if found in _MODEL_BASED and qdisc is not None and qdisc not in {"fq", "fq_codel"}:
        yield Finding(
            rule="pacing",
            severity="hint",
            subject="host",
            found=f"{found} with {qdisc}",
            read_from="/proc/sys/net/core/default_qdisc",
            expected="fq",
            action="sysctl -w net.core.default_qdisc=fq, then set interfaces up again",
            why="bbr paces its packets; fq does that for less CPU time than TCP itself",
            source=sources.BBR,
        )


def check_slow_start(facts: FabricFacts) -> Iterator[Finding]:
    """Between two exchanges a connection is idle, and then starts slowly again."""
    value = facts.sysctls.get("net.ipv4.tcp_slow_start_after_idle")
    if value is None:
        return
    is_good = value == "0"
    yield Finding(
        rule="slow-start-after-idle",
        severity="good" if is_good else "hint",
        subject="host",
        found=f"net.ipv4.tcp_slow_start_after_idle = {value}",
        read_from="/proc/sys/net/ipv4/tcp_slow_start_after_idle",
        expected="0",
        action="" if is_good else "sysctl -w net.ipv4.tcp_slow_start_after_idle=0",
        why="each step computes for longer than a round trip, so every exchange would "
        "begin with a small window",
        source=sources.KERNEL_SYSCTL,
    )


def check_mtu_probing(facts: FabricFacts) -> Iterator[Finding]:
    """With jumbo frames a path with a smaller MTU must not become a black hole."""
    value = facts.sysctls.get("net.ipv4.tcp_mtu_probing")
    jumbo = [one.name for one in candidates(facts) if one.mtu_bytes > 1500]  # noqa: PLR2004
    if value is None or not jumbo:
        return
    is_good = value != "0"
    yield Finding(
        rule="mtu-probing",
        severity="good" if is_good else "hint",
        subject=", ".join(jumbo),
        found=f"net.ipv4.tcp_mtu_probing = {value} with large frames",
        read_from="/proc/sys/net/ipv4/tcp_mtu_probing",
        expected="1",
        action="" if is_good else "sysctl -w net.ipv4.tcp_mtu_probing=1",
        why="where a switch drops large frames silently, connections would hang",
        source=sources.ESNET_TUNING,
    )
