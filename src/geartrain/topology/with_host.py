"""A topology with a host that came after it was measured. Pure."""

from __future__ import annotations

from dataclasses import replace

from geartrain.topology.profile import LinkProfile, Tier, Topology


def with_host(topology: Topology, host_id: str) -> Topology:
    """Add a host in a rack of its own, with links like the slowest that are known.

    Args:
        topology: With at least one host, and not this one.
        host_id: Of the new host.
    """
    bytes_per_s = min((link.bytes_per_s for link in topology.links), default=125e6)
    latency_s = max((link.latency_s for link in topology.links), default=100e-6)
    links = tuple(
        LinkProfile(
            source_id=source,
            target_id=target,
            bytes_per_s=bytes_per_s,
            latency_s=latency_s,
        )
        for other in topology.hosts
        for source, target in (
            (host_id, other.tier_id),
            (other.tier_id, host_id),
        )
    )
    rack_id = f"rack-{host_id}"
    host = Tier(
        kind="host",
        tier_id=host_id,
        member_ids=(),
        uplink_send_bytes_per_s=bytes_per_s,
        uplink_receive_bytes_per_s=bytes_per_s,
    )
    rack = Tier(kind="rack", tier_id=rack_id, member_ids=(host_id,))
    tiers = tuple(
        replace(tier, member_ids=(*tier.member_ids, rack_id))
        if tier.kind == "fabric"
        else tier
        for tier in topology.tiers
    )
    note = f"{host_id} came later: its links count as the slowest known"
    return replace(
        topology,
        tiers=(*tiers, host, rack),
        links=(*topology.links, *links),
        notes=(*topology.notes, note),
    )
