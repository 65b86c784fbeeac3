"""Topologies for tests: racks of hosts, each with its own rates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from geartrain.topology.profile import LinkProfile, Tier, Topology

MEGABIT = 1e6 / 8


def make_racks(
    sizes: Sequence[int],
    *,
    nic: float = 500 * MEGABIT,
    uplink: float = 50 * MEGABIT,
    uplinks: Mapping[int, tuple[float, float]] | None = None,
    nics: Mapping[int, tuple[float, float]] | None = None,
    notes: tuple[str, ...] = (),
) -> Topology:
    """Racks of the given sizes; uplinks and nics override single ones (send, receive)."""
    hosts: list[Tier] = []
    racks: list[Tier] = []
    place: dict[str, int] = {}
    for rack, size in enumerate(sizes):
        members = tuple(f"node{len(hosts) + i}-{len(hosts) + i:08x}" for i in range(size))
        for host_id in members:
            index = len(hosts)
            send, receive = (nics or {}).get(index, (nic, nic))
            place[host_id] = rack
            hosts.append(
                Tier(
                    kind="host",
                    tier_id=host_id,
                    member_ids=(),
                    uplink_send_bytes_per_s=send,
                    uplink_receive_bytes_per_s=receive,
                    inner_bytes_per_s=5e9,
                    address=f"10.0.{rack}.{index + 1}",
                    interface="eth0",
                )
            )
        send, receive = (uplinks or {}).get(rack, (uplink, uplink))
        has_uplink = len(sizes) > 1
        racks.append(
            Tier(
                kind="rack",
                tier_id=f"rack{rack}",
                member_ids=members,
                uplink_send_bytes_per_s=send if has_uplink else None,
                uplink_receive_bytes_per_s=receive if has_uplink else None,
            )
        )
    links = tuple(
        LinkProfile(
            source_id=one,
            target_id=other,
            bytes_per_s=nic if place[one] == place[other] else uplink,
            latency_s=1e-4,
        )
        for one in place
        for other in place
        if one != other
    )
    return Topology(
        tiers=(*hosts, *racks),
        links=links,
        notes=notes,
        probe_s=1.25,
        probe_bytes=20_000_000,
    )
