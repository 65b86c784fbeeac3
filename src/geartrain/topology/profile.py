"""What is known of the links between hosts. Never reaches torch."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from typing import Literal

import msgspec

from geartrain.errors import ConfigError

TierKind = Literal["host", "rack", "fabric"]
TopologySource = Literal["measured", "labels", "assumed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkProfile:
    """One direction of a path, as a single flow sees it."""

    source_id: str
    target_id: str
    bytes_per_s: float
    latency_s: float
    """Of one small message, one way (half a round trip)."""
    backend: str = "tcp"
    """tcp, shared_memory, pcie, nvlink..."""

    def __post_init__(self) -> None:
        _check_rate(f"link {self.source_id} -> {self.target_id}", self.bytes_per_s)
        if not (self.latency_s >= 0 and math.isfinite(self.latency_s)):
            msg = (
                f"link {self.source_id} -> {self.target_id}: latency_s={self.latency_s} "
                "must be >= 0; probe that link again"
            )
            raise ConfigError(msg)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tier:
    """A group of members and its way out.

    A host's members are device ids and its uplink is its NIC; a rack's are host ids and
    its uplink goes to the fabric; the fabric's are rack ids and it has no uplink.
    """

    kind: TierKind
    tier_id: str
    member_ids: tuple[str, ...]
    uplink_send_bytes_per_s: float | None = None
    """None where nothing above it was measured: a single rack, the fabric."""
    uplink_receive_bytes_per_s: float | None = None
    inner_bytes_per_s: float | None = None
    """Between members, where it has a figure of its own: a host's shared memory."""
    address: str | None = None
    """A host's address on the interface that was chosen."""
    interface: str | None = None

    def __post_init__(self) -> None:
        if len(set(self.member_ids)) != len(self.member_ids):
            msg = f"{self.kind} {self.tier_id}: a member is listed twice: {self.member_ids}"
            raise ConfigError(msg)
        for rate in (
            self.uplink_send_bytes_per_s,
            self.uplink_receive_bytes_per_s,
            self.inner_bytes_per_s,
        ):
            if rate is not None:
                _check_rate(f"{self.kind} {self.tier_id}", rate)


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """Hosts, racks and the links between them.

    Args of the constructor are checked: every host is in exactly one rack.
    """

    tiers: tuple[Tier, ...]
    links: tuple[LinkProfile, ...] = ()
    """Between hosts, each direction; and between a host and its devices."""
    source: TopologySource = "measured"
    measured_at_s: float = 0.0
    probe_s: float = 0.0
    """How long the probe took."""
    probe_bytes: int = 0
    """What the probe sent in all."""
    notes: tuple[str, ...] = ()
    """What a reader should know: an overruled label, a NIC that was passed over."""
    schema_version: int = 1

    def __post_init__(self) -> None:
        hosts = [host.tier_id for host in self.hosts]
        placed = [host_id for rack in self.racks for host_id in rack.member_ids]
        if not hosts or sorted(hosts) != sorted(placed) or len(set(hosts)) != len(hosts):
            msg = (
                f"topology: hosts {sorted(hosts)} but racks hold {sorted(placed)}; "
                "expected every host in exactly one rack"
            )
            raise ConfigError(msg)

    @property
    def hosts(self) -> tuple[Tier, ...]:
        """The hosts, in order."""
        return tuple(tier for tier in self.tiers if tier.kind == "host")

    @property
    def racks(self) -> tuple[Tier, ...]:
        """The racks, in order."""
        return tuple(tier for tier in self.tiers if tier.kind == "rack")

    def host(self, host_id: str) -> Tier:
        """The host of that id.

        Raises:
            ConfigError: If there is none.
        """
        for tier in self.hosts:
            if tier.tier_id == host_id:
                return tier
        known = ", ".join(tier.tier_id for tier in self.hosts)
        msg = f"the topology has no host {host_id!r}, only {known}; probe the links again"
        raise ConfigError(msg)

    def rack_of(self, host_id: str) -> Tier:
        """The rack that holds this host."""
        for tier in self.racks:
            if host_id in tier.member_ids:
                return tier
        msg = f"the topology has no host {host_id!r}; probe the links again"
        raise ConfigError(msg)

    def link(self, source_id: str, target_id: str) -> LinkProfile | None:
        """The measured link in this direction, if any."""
        for link in self.links:
            if (link.source_id, link.target_id) == (source_id, target_id):
                return link
        return None

    @property
    def fingerprint(self) -> str:
        """Equal for the same hosts in the same racks, whatever the rates."""
        key = sorted((rack.tier_id, sorted(rack.member_ids)) for rack in self.racks)
        return hashlib.sha256(msgspec.json.encode(key)).hexdigest()[:16]


def _check_rate(name: str, bytes_per_s: float) -> None:
    if not (bytes_per_s > 0 and math.isfinite(bytes_per_s)):
        msg = f"{name}: {bytes_per_s} bytes/s must be > 0 and finite; probe it again"
        raise ConfigError(msg)
