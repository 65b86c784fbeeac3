"""Choose how an all-reduce is carried out, from what every way is predicted to take."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from geartrain.errors import ConfigError
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
from geartrain.units import format_seconds

LARGEST_GATHERED_BYTES = 4 * 1024 * 1024
"""A leader holds a tensor of every host of its rack; beyond, shards are faster anyway."""
MOST_HOSTS_IN_ONE_SHOT = 16
"""Messages grow with the hosts squared."""
DIRECT_OVER_RING = 0.9
"""In one rack the direct exchange must beat the ring by this: the ring is Gloo's own, in
C++, and takes less processor time than our threads."""
CODEC_OVER_EXACT = 0.95
"""What policy auto wants of a codec before it gives up exactness."""
_SAME_TIME = 1.01


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


@dataclass(frozen=True, slots=True, kw_only=True)
class AutoGain:
    """What policy ``auto`` would change."""

    codec: str
    """``none`` where it would stay exact."""
    exact_s: float
    auto_s: float
    text: str


def choose(request: ExchangeRequest) -> CommSchedule:
    """The fastest way that the policy allows.

    Raises:
        ConfigError: If a member's host is not in the topology, or a link has no rate.
    """
    return ExchangePlanner(request).choose(request.num_bytes)


def candidates(request: ExchangeRequest) -> tuple[Candidate, ...]:
    """All ways, the one that is taken first, refused ones with their reason last."""
    planner = ExchangePlanner(request)
    return planner.ranked(request.num_bytes)


def what_auto_would_gain(request: ExchangeRequest) -> AutoGain:
    """Compare policy ``auto`` with exact, whatever the request's policy is."""
    exact = choose(dataclasses.replace(request, policy=None))
    auto = choose(dataclasses.replace(request, policy=AUTO))
    if auto.codec == EXACT:
        why = (
            "there is no slow hop"
            if exact.algorithm == "local"
            else "no codec that it may use saves 5 % of the time"
        )
        text = f"compression=auto would stay exact: {why}"
        if not request.codecs:
            text = "compression=auto would stay exact: no codec was measured here"
    else:
        text = (
            f"compression=auto would use {auto.codec} and take "
            f"{format_seconds(auto.predicted_s)} instead of "
            f"{format_seconds(exact.predicted_s)} "
            f"({auto.predicted_s / exact.predicted_s:.2f})"
        )
    return AutoGain(
        codec=auto.codec, exact_s=exact.predicted_s, auto_s=auto.predicted_s, text=text
    )


class ExchangePlanner:
    """What does not depend on the message size, worked out once.

    Args:
        request: Members, links, policy; its size is not looked at.
    """

    def __init__(self, request: ExchangeRequest) -> None:
        self._request = request
        self._fabric = place(request.topology, request.placement)
        self._rates: Rates = {
            (link.source_id, link.target_id): link.bytes_per_s
            for link in request.topology.links
        }
        self._ring = order_ring(self._fabric, self._rates)
        self._staged = [self._stage(codec) for codec in (None, *self._allowed_codecs())]

    @property
    def is_local(self) -> bool:
        """Whether all members are on one host."""
        return len(self._fabric.hosts) == 1

    def choose(self, num_bytes: int) -> CommSchedule:
        """The schedule of one size, with its reason."""
        ranked = self.ranked(num_bytes)
        best = ranked[0]
        return dataclasses.replace(best.schedule, reason=_reason(best, ranked))

    def ranked(self, num_bytes: int) -> tuple[Candidate, ...]:
        """All candidates of one size: allowed ones first, the one to take at the front."""
        if self.is_local:
            return (self._local(num_bytes),)
        found = [self._leader(num_bytes), self._ring_candidate(num_bytes)]
        if len(self._fabric.racks) == 1:
            found.append(self._one_shot(num_bytes))
        found += [staged.candidate(self, num_bytes) for staged in self._staged]
        found = self._apply_policy(found)
        taken = _pick(
            [c for c in found if not c.refused], num_racks=len(self._fabric.racks)
        )
        others = [c for c in found if c is not taken]
        others.sort(key=lambda c: (bool(c.refused), c.predicted_s))
        return (taken, *others)

    def _allowed_codecs(self) -> list[CodecProfile]:
        policy = self._request.policy
        if policy is None:
            return []
        if policy == AUTO:
            return [codec for codec in self._request.codecs if codec.name in AUTO_CODECS]
        return [self._request.codec(policy)]

    def _apply_policy(self, found: Sequence[Candidate]) -> list[Candidate]:
        policy = self._request.policy
        if policy is None:
            return list(found)
        if policy == AUTO:
            return _refuse_codecs_without_gain(found)
        forced = f"compression={policy!r} is asked for, and this sends whole values"
        # Where latency decides there is nothing to compress: leaders stay allowed.
        return [
            dataclasses.replace(c, refused=c.refused or forced)
            if c.schedule.codec == EXACT and c.schedule.algorithm != "leader"
            else c
            for c in found
        ]

    def _local(self, num_bytes: int) -> Candidate:
        prediction = predict_local(self._fabric, num_bytes)
        parts = _even_parts(self._fabric)
        return Candidate(
            name="one host", schedule=self.schedule("local", parts, prediction, num_bytes)
        )

    def _leader(self, num_bytes: int) -> Candidate:
        fabric = _fastest_first(self._fabric)
        prediction = predict_leader(fabric, num_bytes, self._request.core_fraction)
        refused = ""
        most_hosts = max(len(rack.hosts) for rack in fabric.racks)
        gathered = num_bytes * max(most_hosts, len(fabric.racks))
        if gathered > LARGEST_GATHERED_BYTES:
            refused = f"leaders would hold {gathered / 2**20:.0f} MiB of whole tensors"
        schedule = self.schedule("leader", _even_parts(fabric), prediction, num_bytes)
        return Candidate(name="rack leaders", schedule=schedule, refused=refused)

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
        schedule = self.schedule("leader", _even_parts(fabric), prediction, num_bytes)
        return Candidate(name="one shot", schedule=schedule, refused=refused)

    def _ring_candidate(self, num_bytes: int) -> Candidate:
        prediction = predict_ring(
            self._fabric, self._ring, num_bytes, self._request.core_fraction, self._rates
        )
        schedule = self.schedule("ring", _even_parts(self._fabric), prediction, num_bytes)
        schedule = dataclasses.replace(schedule, ring_order=self._ring)
        return Candidate(name="ring", schedule=schedule)

    def schedule(
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

    def _stage(self, codec: CodecProfile | None) -> _Staged:
        fabric = self._fabric
        if codec is not None and len(fabric.racks) == 1:
            fabric = fabric.split()
        every = frozenset(range(len(fabric.racks))) if codec else frozenset[int]()
        staged = _Staged.of(fabric, codec, every, self._request.core_fraction)
        if codec is None or self._request.policy != AUTO or len(fabric.racks) <= 2:  # noqa: PLR2004 - two racks share what crosses
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
        parts = _parts(fabric, fill_shares(fabric, fractions), names)
        loads = staged_loads(fabric, parts, codec if coded else None, core_fraction)
        return cls(codec=codec if coded else None, parts=parts, loads=loads)

    @property
    def s_per_byte(self) -> float:
        """Of the busiest link or processor."""
        return max(self.loads.busiest_s, self.loads.cpu_s)

    def candidate(self, planner: ExchangePlanner, num_bytes: int) -> Candidate:
        num_chunks = choose_num_chunks(self.loads, num_bytes)
        prediction = predict_staged(self.loads, num_bytes, num_chunks)
        name = "staged" if self.codec is None else f"staged, {self.codec.name}"
        schedule = planner.schedule("hierarchical", self.parts, prediction, num_bytes)
        return Candidate(name=name, schedule=schedule)


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


def _refuse_codecs_without_gain(found: Sequence[Candidate]) -> list[Candidate]:
    exact_s = min(
        c.predicted_s for c in found if c.schedule.codec == EXACT and not c.refused
    )
    return [
        dataclasses.replace(
            c,
            refused=f"saves {1 - c.predicted_s / exact_s:.0%} of the exact time, and "
            f"auto wants {1 - CODEC_OVER_EXACT:.0%}",
        )
        if c.schedule.codec != EXACT and c.predicted_s > CODEC_OVER_EXACT * exact_s
        else c
        for c in found
    ]


def _pick(allowed: Sequence[Candidate], *, num_racks: int) -> Candidate:
    if not allowed:
        msg = (
            "no way to exchange is allowed; take compression=None or probe the links again"
        )
        raise ConfigError(msg)
    best = min(allowed, key=lambda c: c.predicted_s)
    ring = next((c for c in allowed if c.schedule.algorithm == "ring"), None)
    direct = best.schedule.algorithm == "hierarchical" and best.schedule.codec == EXACT
    if ring and direct and num_racks == 1:
        margin = DIRECT_OVER_RING * ring.predicted_s
        return ring if best.predicted_s > margin else best
    return best


def _reason(best: Candidate, ranked: Sequence[Candidate]) -> str:
    schedule = best.schedule
    text = best.name
    if schedule.algorithm == "hierarchical":
        text += f" in {schedule.num_chunks} chunks"
    text += f": {format_seconds(schedule.predicted_s)}, {schedule.reason}"
    rest = [c for c in ranked if c is not best and not c.refused]
    if rest:
        other = rest[0]
        text += f"; next best {other.name} with {format_seconds(other.predicted_s)}"
    return text


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
