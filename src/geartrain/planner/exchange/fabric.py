"""A topology as one exchange sees it: only its members, with rates that can be had."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from geartrain.errors import ConfigError
from geartrain.topology.profile import LinkProfile, Tier, Topology

TCP_GOODPUT_FRACTION = 0.954
"""Payload in what TCP sends: 1,448 of 1,514 bytes a frame, less acknowledgements; a plain
stream was measured at 95.36 % of a shaped link's rate."""
ASSUMED_LATENCY_S = 1e-4
"""Of a small message where none was measured: a switched network, both kernels included."""
ASSUMED_MEMORY_BYTES_PER_S = 2e9
"""Copy rate between processes of a host where none was measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FabricHost:
    """One host with at least one member."""

    host_id: str
    members: tuple[int, ...]
    """Positions on it, rising; the first one leads."""
    send_bytes_per_s: float
    """Payload over its NIC."""
    receive_bytes_per_s: float
    memory_bytes_per_s: float = ASSUMED_MEMORY_BYTES_PER_S
    """Copying between its processes."""
    to_host_bytes_per_s: float | None = None
    """From its slowest device; None where tensors lie in host memory."""
    from_host_bytes_per_s: float | None = None

    @property
    def bytes_per_s(self) -> float:
        """The slower direction: each exchange loads both alike."""
        return min(self.send_bytes_per_s, self.receive_bytes_per_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class FabricRack:
    """One rack with at least one such host."""

    rack_id: str
    hosts: tuple[FabricHost, ...]
    send_bytes_per_s: float
    """Payload over its uplink."""
    receive_bytes_per_s: float

    @property
    def bytes_per_s(self) -> float:
        """The slower direction of the uplink."""
        return min(self.send_bytes_per_s, self.receive_bytes_per_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fabric:
    """Racks of hosts of members."""

    racks: tuple[FabricRack, ...]
    rack_latency_s: float
    """One way, of a small message inside a rack."""
    fabric_latency_s: float
    """One way, between racks."""

    @property
    def hosts(self) -> tuple[FabricHost, ...]:
        """All hosts, rack by rack."""
        return tuple(host for rack in self.racks for host in rack.hosts)

    @property
    def num_members(self) -> int:
        """Processes that take part."""
        return sum(len(host.members) for host in self.hosts)

    def split(self) -> Fabric:
        """The same hosts, each a rack of its own behind its NIC.

        So that the links between the hosts of a lone rack can be the slow hop.
        """
        racks = tuple(
            FabricRack(
                rack_id=host.host_id,
                hosts=(host,),
                send_bytes_per_s=host.send_bytes_per_s,
                receive_bytes_per_s=host.receive_bytes_per_s,
            )
            for host in self.hosts
        )
        latency_s = self.fabric_latency_s if len(self.racks) > 1 else self.rack_latency_s
        return Fabric(racks=racks, rack_latency_s=latency_s, fabric_latency_s=latency_s)


def place(topology: Topology, placement: Sequence[str]) -> Fabric:
    """Find the racks and hosts of an exchange's members.

    Measured rates are payload rates already. Rates from labels or assumptions are the
    links' own, of which TCP gets ``TCP_GOODPUT_FRACTION``.

    Args:
        topology: All hosts, in racks.
        placement: Host id of each member, shape (num_members,).

    Raises:
        ConfigError: If a host is not in the topology, or its link has no rate.
    """
    members: dict[str, list[int]] = {}
    for position, host_id in enumerate(placement):
        members.setdefault(host_id, []).append(position)
    tiers = {tier.tier_id: tier for tier in topology.hosts}
    unknown = [host_id for host_id in members if host_id not in tiers]
    if unknown or not members:
        msg = (
            f"members lie on {unknown or 'no host'}, the topology has {sorted(tiers)}; "
            "probe the links again"
        )
        raise ConfigError(msg)
    goodput = 1.0 if topology.source == "measured" else TCP_GOODPUT_FRACTION
    links = _Links(topology, tiers)
    lone = len(members) == 1
    racks = [
        _place_rack(
            rack,
            [tiers[i] for i in rack.member_ids if i in members],
            members,
            links,
            goodput,
            lone=lone,
        )
        for rack in topology.racks
        if any(host_id in members for host_id in rack.member_ids)
    ]
    rack_latency_s, fabric_latency_s = links.latencies_s(racks)
    return Fabric(
        racks=tuple(racks), rack_latency_s=rack_latency_s, fabric_latency_s=fabric_latency_s
    )


class _Links:
    """The measured links, by their ends."""

    def __init__(self, topology: Topology, tiers: Mapping[str, Tier]) -> None:
        self._between_hosts: list[LinkProfile] = []
        self._best: dict[str, float] = {}
        self._devices: dict[tuple[str, bool], float] = {}
        self.rack_of = {i: rack.tier_id for rack in topology.racks for i in rack.member_ids}
        for link in topology.links:
            ends = (link.source_id in tiers, link.target_id in tiers)
            if ends == (True, True):
                self._between_hosts.append(link)
                for end in (link.source_id, link.target_id):
                    self._best[end] = max(self._best.get(end, 0.0), link.bytes_per_s)
            elif any(ends):
                host_id = link.source_id if ends[0] else link.target_id
                key = (host_id, ends[1])
                rate = self._devices.get(key, link.bytes_per_s)
                self._devices[key] = min(rate, link.bytes_per_s)

    def best_bytes_per_s(self, host_id: str) -> float | None:
        """Of any link that ends at this host."""
        return self._best.get(host_id)

    def device_bytes_per_s(self, host_id: str, *, to_host: bool) -> float | None:
        """Of the host's slowest device."""
        return self._devices.get((host_id, to_host))

    def latencies_s(self, racks: Iterable[FabricRack]) -> tuple[float, float]:
        """Inside racks and between them: medians, which one bad reading does not move."""
        members = {host.host_id for rack in racks for host in rack.hosts}
        inside: list[float] = []
        between: list[float] = []
        for link in self._between_hosts:
            if link.source_id in members and link.target_id in members:
                same = self.rack_of[link.source_id] == self.rack_of[link.target_id]
                (inside if same else between).append(link.latency_s)
        rack_s = statistics.median(inside) if inside else None
        fabric_s = statistics.median(between) if between else None
        rack_s = ASSUMED_LATENCY_S if rack_s is None else rack_s
        return rack_s, max(rack_s, ASSUMED_LATENCY_S) if fabric_s is None else fabric_s


def _place_rack(  # noqa: PLR0913 - one call, in this file
    rack: Tier,
    hosts: Sequence[Tier],
    members: Mapping[str, Sequence[int]],
    links: _Links,
    goodput: float,
    *,
    lone: bool,
) -> FabricRack:
    placed = tuple(
        _place_host(host, tuple(members[host.tier_id]), links, goodput, lone=lone)
        for host in hosts
    )
    # An uplink without a figure was never found to be narrower than its hosts.
    send, receive = rack.uplink_send_bytes_per_s, rack.uplink_receive_bytes_per_s
    return FabricRack(
        rack_id=rack.tier_id,
        hosts=placed,
        send_bytes_per_s=send * goodput
        if send
        else sum(h.send_bytes_per_s for h in placed),
        receive_bytes_per_s=receive * goodput
        if receive
        else sum(h.receive_bytes_per_s for h in placed),
    )


def _place_host(
    host: Tier, members: tuple[int, ...], links: _Links, goodput: float, *, lone: bool
) -> FabricHost:
    send, receive = host.uplink_send_bytes_per_s, host.uplink_receive_bytes_per_s
    best = links.best_bytes_per_s(host.tier_id)
    memory = host.inner_bytes_per_s or ASSUMED_MEMORY_BYTES_PER_S
    send, receive = send or receive or best, receive or send or best
    if send is None or receive is None:
        if not lone:
            msg = (
                f"host {host.tier_id} has no rate for its link and {len(members)} of the "
                "members; probe the links again"
            )
            raise ConfigError(msg)
        send = receive = memory
    return FabricHost(
        host_id=host.tier_id,
        members=members,
        send_bytes_per_s=send * goodput,
        receive_bytes_per_s=receive * goodput,
        memory_bytes_per_s=memory,
        to_host_bytes_per_s=links.device_bytes_per_s(host.tier_id, to_host=True),
        from_host_bytes_per_s=links.device_bytes_per_s(host.tier_id, to_host=False),
    )
