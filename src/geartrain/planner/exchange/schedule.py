"""How one all-reduce is carried out. Never reaches torch.

Members of an exchange are numbered 0..n-1 (positions, not global ranks). The processes
of one host form a device group; its first position is the host's leader, and only
leaders exchange between hosts.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Literal

import msgspec

from geartrain.errors import ConfigError

Algorithm = Literal["local", "ring", "leader", "hierarchical"]
# local: one host, its device group alone. ring: Gloo's ring over the leaders, in
# ``ring_order``. leader: rack leaders gather, exchange and hand out, for small messages.
# hierarchical: staged reduce-scatter, slow hop, all-gather in chunks; with a single rack
# this is the direct exchange with unequal shares.

EXACT = "none"
"""The codec's name where nothing is compressed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CodecProfile:
    """What a codec costs on the slowest host, and what it saves."""

    name: str
    bytes_fraction: float
    """Encoded bytes / float32 bytes."""
    encode_bytes_per_s: float
    """Of float32 input, one thread."""
    decode_bytes_per_s: float
    """Of float32 output."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RackPart:
    """One rack in a schedule."""

    rack_id: str
    hosts: tuple[tuple[int, ...], ...]
    """Member positions on each host, its leader first."""
    share: float
    """Part of a tensor that this rack adds up on the slow hop; all racks' sum to 1."""
    host_shares: tuple[float, ...]
    """Part of the rack's sum that each host owns; sum to 1, may be 0."""
    codec: str = EXACT
    """Applied to what this rack sends and receives over its uplink."""

    def __post_init__(self) -> None:
        if len(self.hosts) != len(self.host_shares) or not all(self.hosts):
            msg = (
                f"rack {self.rack_id}: {len(self.hosts)} hosts and {len(self.host_shares)} "
                "shares; expected as many of each, and a member on every host"
            )
            raise ConfigError(msg)

    @property
    def leaders(self) -> tuple[int, ...]:
        """The position that speaks for each host."""
        return tuple(host[0] for host in self.hosts)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTimes:
    """Predicted seconds of each part of an exchange, as if the others took no time.

    The parts overlap, so they do not add up to the whole; they are there to be compared
    with what each part was observed to take.
    """

    device_group_s: float = 0.0
    """Between the processes and devices of a host, in and out."""
    rack_s: float = 0.0
    """Between the hosts of a rack, in and out; the whole of a ring."""
    slow_hop_s: float = 0.0
    """Between racks, partial sums and totals."""
    codec_s: float = 0.0
    """Encoding and decoding on the busiest host."""
    latency_s: float = 0.0
    """What messages cost however small they are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommSchedule:
    """One all-reduce: tiers, algorithm, codec, and what it was predicted to take."""

    algorithm: Algorithm
    num_members: int
    racks: tuple[RackPart, ...]
    ring_order: tuple[int, ...] = ()
    """Leaders in the order of the ring; for ``ring`` only."""
    num_chunks: int = 1
    num_bytes: int = 0
    """The size it was made for."""
    predicted_s: float = 0.0
    bound_s: float = 0.0
    """max(S/b_host, S/u_rack, 2(n-1)S/sum b, 2(R-1)S/sum u)."""
    reason: str = ""
    """Why this one, for people."""
    stages: StageTimes | None = None
    """Predicted, part by part."""
    schema_version: int = 1

    def __post_init__(self) -> None:
        members = sorted(m for rack in self.racks for host in rack.hosts for m in host)
        if members != list(range(self.num_members)):
            msg = (
                f"schedule: racks hold members {members}, expected each of "
                f"0..{self.num_members - 1} once"
            )
            raise ConfigError(msg)
        if self.num_chunks < 1:
            msg = f"schedule: num_chunks={self.num_chunks} must be >= 1"
            raise ConfigError(msg)

    @property
    def codec(self) -> str:
        """The codec on the slow hop; ``none`` where all racks are exact."""
        names = sorted({rack.codec for rack in self.racks} - {EXACT})
        return "+".join(names) if names else EXACT

    @property
    def leaders(self) -> tuple[int, ...]:
        """All hosts' leaders, rack by rack."""
        return tuple(leader for rack in self.racks for leader in rack.leaders)

    @property
    def fingerprint(self) -> str:
        """Equal for schedules that move and add the same numbers in the same order."""
        key = (self.algorithm, self.racks, self.ring_order, self.num_chunks)
        return hashlib.sha256(msgspec.json.encode(key)).hexdigest()[:16]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleBook:
    """The schedule of every message size; rank 0 writes it, all others read it."""

    up_to_bytes: tuple[int, ...]
    """Rising upper ends of the size classes; the last one holds for all above."""
    schedules: tuple[CommSchedule, ...]
    """One a size class, same order."""
    predictions: tuple[tuple[int, float], ...] = ()
    """``(num_bytes, seconds)``, bytes rising: the curve that ``predict_s`` reads."""
    schema_version: int = 1

    def __post_init__(self) -> None:
        rising = list(self.up_to_bytes) == sorted(set(self.up_to_bytes))
        if not self.schedules or len(self.schedules) != len(self.up_to_bytes) or not rising:
            msg = (
                f"schedule book: {len(self.schedules)} schedules for the size classes "
                f"{self.up_to_bytes}; expected one each, sizes rising"
            )
            raise ConfigError(msg)

    def schedule_for(self, num_bytes: int) -> CommSchedule:
        """The schedule of a message of this size (float32 bytes)."""
        for end, schedule in zip(self.up_to_bytes, self.schedules, strict=True):
            if num_bytes <= end:
                return schedule
        return self.schedules[-1]

    def predict_s(self, num_bytes: int) -> float:
        """Predicted seconds of a message of this size (float32 bytes).

        Between the sizes that were worked out the line between them holds, beyond the
        last one its rate.
        """
        curve = self.predictions or tuple(
            (s.num_bytes, s.predicted_s) for s in self.schedules
        )
        below = (0, curve[0][1])
        for point in curve:
            if num_bytes <= point[0]:
                part = (num_bytes - below[0]) / max(1, point[0] - below[0])
                return below[1] + part * (point[1] - below[1])
            below = point
        return below[1] * num_bytes / max(1, below[0])

    @property
    def fingerprint(self) -> str:
        """Equal for books that carry out every size alike."""
        key = (self.up_to_bytes, [schedule.fingerprint for schedule in self.schedules])
        return hashlib.sha256(msgspec.json.encode(key)).hexdigest()[:16]
