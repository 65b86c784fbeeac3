"""Tables of links between hosts, for people."""

from __future__ import annotations

import math
import statistics

import click

from geartrain.cli.tables import print_table
from geartrain.monitoring.link_charts import link_matrix, short_names, show_bit_rate
from geartrain.topology.profile import Tier, Topology
from geartrain.units import format_bytes, format_rate, format_seconds

_ROOM_FOR_MATRIX = 16
"""Hosts whose matrix fits into a wide terminal."""


def print_topology(topology: Topology) -> None:
    """Print hosts, racks, the matrix and notes."""
    if len(topology.hosts) > 1:
        _print_hosts(topology)
        _print_racks(topology)
        _print_matrix(topology)
    for note in topology.notes:
        click.echo(f"note: {note}")
    hosts, racks = len(topology.hosts), len(topology.racks)
    sent = f", {format_bytes(topology.probe_bytes)} sent" if topology.probe_bytes else ""
    click.echo(
        f"{hosts} host{'s' * (hosts > 1)} in {racks} rack{'s' * (racks > 1)}, "
        f"{topology.source} in {format_seconds(topology.probe_s)}{sent}"
    )


def _print_hosts(topology: Topology) -> None:
    head = ("host", "rack", "address", "on", "NIC out", "NIC in", "latency", "memory")
    rows = [
        (
            host.tier_id,
            topology.rack_of(host.tier_id).tier_id,
            host.address or "",
            host.interface or "",
            show_bit_rate(host.uplink_send_bytes_per_s),
            show_bit_rate(host.uplink_receive_bytes_per_s),
            _latency(topology, host),
            ""
            if host.inner_bytes_per_s is None
            else format_rate(host.inner_bytes_per_s, "B/s"),
        )
        for host in topology.hosts
    ]
    print_table(head, rows, num_text_columns=4)
    click.echo("")


def _print_racks(topology: Topology) -> None:
    if len(topology.racks) == 1:
        return
    names = short_names(topology)
    rows = [
        (
            rack.tier_id,
            ", ".join(names[host_id] for host_id in rack.member_ids),
            show_bit_rate(rack.uplink_send_bytes_per_s),
            show_bit_rate(rack.uplink_receive_bytes_per_s),
        )
        for rack in topology.racks
    ]
    print_table(("rack", "hosts", "uplink out", "uplink in"), rows, num_text_columns=2)
    click.echo("")


def _print_matrix(topology: Topology) -> None:
    """Print what one flow reached, from row to column."""
    order = [host_id for rack in topology.racks for host_id in rack.member_ids]
    if len(order) > _ROOM_FOR_MATRIX:
        click.echo(
            f"{len(topology.links)} links measured; -o FILE or --picture FILE has them"
        )
        return
    names = short_names(topology)
    rates = link_matrix(topology, order)
    rows = []
    for row, host_id in enumerate(order):
        cells = [
            "" if math.isnan(rate) else show_bit_rate(rate) for rate in rates[row].tolist()
        ]
        rows.append((names[host_id], *cells))
    print_table(("one flow, from", *(names[host_id] for host_id in order)), rows)
    click.echo("")


def show_latency(latency_s: float) -> str:
    """Write how long a small message takes.

    >>> show_latency(43e-6), show_latency(0.012)
    ('43 us', '12.0 ms')
    """
    if latency_s < 1e-3:  # noqa: PLR2004 - a millisecond
        return f"{latency_s * 1e6:.0f} us"
    return format_seconds(latency_s)


def _latency(topology: Topology, host: Tier) -> str:
    latencies = [
        link.latency_s for link in topology.links if link.source_id == host.tier_id
    ]
    return show_latency(statistics.median(latencies)) if latencies else ""
