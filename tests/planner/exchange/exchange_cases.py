"""Fabrics that the exchange planner's tests share."""

from __future__ import annotations

from collections.abc import Sequence

from geartrain.planner.exchange import CodecProfile
from geartrain.topology.profile import LinkProfile, Tier, Topology, TopologySource

MBIT = 1e6 / 8

INT8 = CodecProfile(
    name="int8", bytes_fraction=0.252, encode_bytes_per_s=5.5e9, decode_bytes_per_s=10e9
)
INT4 = CodecProfile(
    name="int4", bytes_fraction=0.127, encode_bytes_per_s=6.7e9, decode_bytes_per_s=11e9
)
FP16 = CodecProfile(
    name="fp16", bytes_fraction=0.5, encode_bytes_per_s=12e9, decode_bytes_per_s=8e9
)


def make_topology(
    nics_mbit: Sequence[Sequence[float]],
    uplinks_mbit: Sequence[float] = (),
    *,
    receive_uplinks_mbit: Sequence[float] | None = None,
    source: TopologySource = "measured",
    latency_s: float | None = None,
    memory_bytes_per_s: float | None = None,
) -> Topology:
    """A topology from NIC rates by rack and uplink rates; hosts are h0, h1..."""
    tiers: list[Tier] = []
    racks: list[Tier] = []
    for index, nics in enumerate(nics_mbit):
        first = len(tiers)
        for number, nic in enumerate(nics):
            tiers.append(
                Tier(
                    kind="host",
                    tier_id=f"h{first + number}",
                    member_ids=(),
                    uplink_send_bytes_per_s=nic * MBIT,
                    uplink_receive_bytes_per_s=nic * MBIT,
                    inner_bytes_per_s=memory_bytes_per_s,
                )
            )
        receive = (receive_uplinks_mbit or uplinks_mbit)[index] if uplinks_mbit else None
        racks.append(
            Tier(
                kind="rack",
                tier_id=f"rack{index}",
                member_ids=tuple(tier.tier_id for tier in tiers[first:]),
                uplink_send_bytes_per_s=uplinks_mbit[index] * MBIT
                if uplinks_mbit
                else None,
                uplink_receive_bytes_per_s=receive * MBIT if receive else None,
            )
        )
    links: tuple[LinkProfile, ...] = ()
    if latency_s is not None and len(tiers) > 1:
        links = tuple(
            LinkProfile(
                source_id=a.tier_id,
                target_id=b.tier_id,
                bytes_per_s=min(
                    a.uplink_send_bytes_per_s or 1, b.uplink_receive_bytes_per_s or 1
                ),
                latency_s=latency_s,
            )
            for a in tiers
            for b in tiers
            if a is not b
        )
    return Topology(tiers=(*tiers, *racks), links=links, source=source)


def placement_of(topology: Topology, processes: int = 1) -> tuple[str, ...]:
    """So many processes on each host, in order."""
    return tuple(host.tier_id for host in topology.hosts for _ in range(processes))
