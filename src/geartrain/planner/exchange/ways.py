"""The ways to carry an exchange out, each with what it is predicted to take."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from geartrain.planner.exchange.bound import fabric_bound_s
from geartrain.planner.exchange.fabric import Fabric, FabricRack, place
from geartrain.planner.exchange.request import AUTO, AUTO_CODECS, ExchangeRequest
from geartrain.planner.exchange.ring_order import Rates, order_ring
from geartrain.planner.exchange.schedule import (
    EXACT,
    Algorithm,
    CodecProfile,
    CommSchedule,
    RackPart,
)
from geartrain.planner.exchange.shares import Shares, fill_shares
from geartrain.planner.exchange.staged_cost import (
    Prediction,
    StagedLoads,
    choose_num_chunks,
    predict_staged,
    slow_hop_loads,
    staged_loads,
)
from geartrain.planner.exchange.whole_cost import (
    predict_leader,
    predict_local,
    predict_ring,
)

LARGEST_GATHERED_BYTES = 4 * 1024 * 1024
"""A leader holds a tensor of every host of its rack; beyond, shards are faster anyway."""
MOST_HOSTS_IN_ONE_SHOT = 16
"""Messages grow with the hosts squared."""
LEADERS = "rack leaders"
_SAME_TIME = 1.01
_TWO = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One way to carry an exchange out."""

    name: str
    """For people: ``ring``, ``staged, int8``..."""
    schedule: CommSchedule
    refused: str = ""
    """Why it may not be taken; empty where it may."""

    @property
    def predicted_s(self) -> float:
        """Of the schedule."""
        return self.schedule.predicted_s


class Ways:
    """All ways for one set of members; what does not depend on the size is worked out once.

    Args:
        request: Members, links, policy; its size is not looked at.
    """

    def __init__(self, request: ExchangeRequest) -> None:
        self._request = request
        self._fabric = place(request.topology, request.placement)
        # Hosts that have their processor now and then only stretch a single flow's burst:
        # what it reached is no property of the path. The hosts' own rates are sums of many.
        links = request.topology.links if request.core_fraction >= 1 else ()
        self._rates: Rates = {
            (link.source_id, link.target_id): link.bytes_per_s for link in links
        }
        self._ring = order_ring(self._fabric, self._rates)
        codecs = [None, *_allowed_codecs(request)] if len(self._fabric.hosts) > 1 else []
        self._staged = [self._stage(codec) for codec in codecs]

    @property
    def num_racks(self) -> int:
        """Racks with a member."""
        return len(self._fabric.racks)

    @property
    def core_fraction(self) -> float:
        """Processor cores of the host that has least."""
        return self._request.core_fraction

    def candidates(self, num_bytes: int) -> list[Candidate]:
        """Every way for that size, in a fixed order; refused where it cannot be done."""
        if len(self._fabric.hosts) == 1:
            return [self._local(num_bytes)]
        found = [self._leader(num_bytes), self._ring_candidate(num_bytes)]
        if self.num_racks == 1:
            found.append(self._one_shot(num_bytes))
        return found + [self._staged_candidate(way, num_bytes) for way in self._staged]

    def _local(self, num_bytes: int) -> Candidate:
        prediction = predict_local(self._fabric, num_bytes)
        parts = _even_parts(self._fabric)
        return Candidate(
            name="one host", schedule=self._schedule("local", parts, prediction, num_bytes)
        )

    def _leader(self, num_bytes: int) -> Candidate:
        fabric = _fastest_first(self._fabric)
        prediction = predict_leader(fabric, num_bytes, self._request.core_fraction)
        refused = ""
        most_hosts = max(len(rack.hosts) for rack in fabric.racks)
        gathered = num_bytes * max(most_hosts, len(fabric.racks))
        if gathered > LARGEST_GATHERED_BYTES:
            refused = f"leaders would hold {gathered / 2**20:.0f} MiB of whole tensors"
        schedule = self._schedule("leader", _even_parts(fabric), prediction, num_bytes)
        return Candidate(name=LEADERS, schedule=schedule, refused=refused)

    def _one_shot(self, num_bytes: int) -> Candidate:
        fabric = self._fabric.split()
        prediction = predict_leader(fabric, num_bytes, self._request.core_fraction)
        refused = ""
        if len(fabric.racks) > MOST_HOSTS_IN_ONE_SHOT:
            refused = (
                f"{len(fabric.racks)} hosts are too many to send to each other at once"
            )
        elif num_bytes * len(fabric.racks) > LARGEST_GATHERED_BYTES:
            refused = f"every host would hold {len(fabric.racks)} whole tensors"
        schedule = self._schedule("leader", _even_parts(fabric), prediction, num_bytes)
        return Candidate(name="one shot", schedule=schedule, refused=refused)

    def _ring_candidate(self, num_bytes: int) -> Candidate:
        prediction = predict_ring(
            self._fabric, self._ring, num_bytes, self._request.core_fraction, self._rates
        )
        schedule = self._schedule("ring", _even_parts(self._fabric), prediction, num_bytes)
        schedule = dataclasses.replace(schedule, ring_order=self._ring)
        return Candidate(name="ring", schedule=schedule)

    def _schedule(
        self,
        algorithm: Algorithm,
        parts: tuple[RackPart, ...],
        prediction: Prediction,
        num_bytes: int,
    ) -> CommSchedule:
        """A schedule with its prediction."""
        return CommSchedule(
            algorithm=algorithm,
            num_members=self._fabric.num_members,
            racks=parts,
            num_chunks=prediction.num_chunks,
            num_bytes=num_bytes,
            predicted_s=prediction.seconds,
            bound_s=fabric_bound_s(self._fabric, num_bytes),
            reason=f"limited by {prediction.limit}",
            stages=prediction.stages,
        )

    def _staged_candidate(self, way: _Staged, num_bytes: int) -> Candidate:
        num_chunks = choose_num_chunks(way.loads, num_bytes)
        prediction = predict_staged(way.loads, num_bytes, num_chunks)
        name = "staged" if way.codec is None else f"staged, {way.codec.name}"
        schedule = self._schedule("hierarchical", way.parts, prediction, num_bytes)
        return Candidate(name=name, schedule=schedule)

    def _stage(self, codec: CodecProfile | None) -> _Staged:
        fabric = self._fabric
        if codec is not None and len(fabric.racks) == 1:
            fabric = fabric.split()
        every = frozenset(range(len(fabric.racks))) if codec else frozenset[int]()
        staged = _Staged.of(fabric, codec, every, self._request.core_fraction)
        may_differ = self._request.policy == AUTO and len(fabric.racks) > _TWO
        if codec is None or not may_differ:
            return staged
        slow = _slow_racks(fabric, staged)
        fewer = _Staged.of(fabric, codec, slow, self._request.core_fraction)
        return fewer if fewer.s_per_byte <= _SAME_TIME * staged.s_per_byte else staged


@dataclass(frozen=True, slots=True, kw_only=True)
class _Staged:
    """The staged exchange with one codec, or exact."""

    codec: CodecProfile | None
    parts: tuple[RackPart, ...]
    loads: StagedLoads

    @classmethod
    def of(
        cls,
        fabric: Fabric,
        codec: CodecProfile | None,
        coded: frozenset[int],
        core_fraction: float,
    ) -> _Staged:
        fraction = codec.bytes_fraction if codec else 1.0
        fractions = [fraction if i in coded else 1.0 for i in range(len(fabric.racks))]
        names = [
            codec.name if codec and i in coded else EXACT for i in range(len(fabric.racks))
        ]
        parts = _parts(fabric, fill_shares(fabric, fractions, codec, core_fraction), names)
        loads = staged_loads(fabric, parts, codec if coded else None, core_fraction)
        return cls(codec=codec if coded else None, parts=parts, loads=loads)

    @property
    def s_per_byte(self) -> float:
        """Of the busiest link or processor."""
        return max(self.loads.busiest_s, self.loads.cpu_s)


def _slow_racks(fabric: Fabric, staged: _Staged) -> frozenset[int]:
    """Racks whose uplink, exact, would take longer than all do with the codec."""
    hops = slow_hop_loads(_uncoded(staged.parts), 1.0)
    return frozenset(
        index
        for index, (rack, hop) in enumerate(zip(fabric.racks, hops, strict=True))
        if hop.each_way / rack.bytes_per_s > staged.s_per_byte
    )


def _uncoded(parts: Sequence[RackPart]) -> list[RackPart]:
    return [dataclasses.replace(part, codec=EXACT) for part in parts]


def _allowed_codecs(request: ExchangeRequest) -> list[CodecProfile]:
    if request.policy is None:
        return []
    if request.policy == AUTO:
        return [codec for codec in request.codecs if codec.name in AUTO_CODECS]
    return [request.codec(request.policy)]


def _parts(fabric: Fabric, shares: Shares, codecs: Sequence[str]) -> tuple[RackPart, ...]:
    return tuple(
        RackPart(
            rack_id=rack.rack_id,
            hosts=tuple(host.members for host in rack.hosts),
            share=share,
            host_shares=host_shares,
            codec=codec,
        )
        for rack, share, host_shares, codec in zip(
            fabric.racks, shares.racks, shares.hosts, codecs, strict=True
        )
    )


def _even_parts(fabric: Fabric) -> tuple[RackPart, ...]:
    num_racks = len(fabric.racks)
    even = Shares(
        racks=(1 / num_racks,) * num_racks,
        hosts=tuple((1 / len(r.hosts),) * len(r.hosts) for r in fabric.racks),
        s_per_byte=0.0,
    )
    return _parts(fabric, even, [EXACT] * num_racks)


def _fastest_first(fabric: Fabric) -> Fabric:
    """The same racks, each led by its fastest host: a leader's link carries them all."""
    return dataclasses.replace(fabric, racks=tuple(_lead(rack) for rack in fabric.racks))


def _lead(rack: FabricRack) -> FabricRack:
    fastest = max(rack.hosts, key=lambda host: host.bytes_per_s)
    # Probes scatter: the first host leads unless another one is clearly faster.
    if fastest.bytes_per_s < 1.25 * rack.hosts[0].bytes_per_s:
        return rack
    others = tuple(host for host in rack.hosts if host is not fastest)
    return dataclasses.replace(rack, hosts=(fastest, *others))
