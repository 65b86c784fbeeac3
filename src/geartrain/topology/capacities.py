"""How much hosts and racks carry in all, each direction: by several flows at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, permutations
from statistics import median

from geartrain.topology.arrivals import RateReading, joint_rate
from geartrain.topology.clustering import Racks
from geartrain.topology.instrument import Survey
from geartrain.topology.limits import Stage, group_bytes
from geartrain.topology.readings import (
    LONG_ENOUGH_S,
    confirmed_reading,
    is_sure,
    middle_reading,
    typical_reading,
)
from geartrain.topology.rounds import Flow, FlowReading

Link = tuple[int, int]
"""(source, target) positions of hosts."""

_PEERS = 2
_MOST_PEERS = 16
_ROSE = 1.2
"""A reading that grows by this with more peers was limited by the peers."""
_LOW = 0.85
"""Of what was expected: a busy moment, or truly slower. Once more, alone."""
_REPEATS = 2
_AGREE = 0.9
_NIC_PART = 0.6
_UPLINK_PART = 0.4
_BETWEEN_PART = 0.4
_SMALLEST_STAR = 3
"""A rack with fewer hosts has no third one to help."""


@dataclass(slots=True)
class Capacity:
    """Readings of one host's or rack's way out and in."""

    send: RateReading | None = None
    """The best reading of the way out."""
    receive: RateReading | None = None
    """The best reading of the way in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Burst:
    """Links that run together in one direction, and whose ways they fill."""

    links: tuple[Link, ...]
    sender: int | None = None
    """Position of the capacity whose way out it measures."""
    receiver: int | None = None
    """Position of the capacity whose way in it measures."""

    @property
    def ways(self) -> tuple[tuple[str, int], ...]:
        """What it measures."""
        ends = (("send", self.sender), ("receive", self.receiver))
        return tuple((way, position) for way, position in ends if position is not None)


@dataclass(slots=True)
class Readings:
    """All readings of some capacities, by (way, position)."""

    by_way: dict[tuple[str, int], list[RateReading]] = field(default_factory=dict)

    def add(self, burst: Burst, reading: RateReading | None) -> None:
        """Keep what a burst read."""
        if reading is not None:
            for key in burst.ways:
                self.by_way.setdefault(key, []).append(reading)

    def best(self, key: tuple[str, int]) -> RateReading | None:
        """What one capacity's agree on, or else their median."""
        found = self.by_way.get(key, [])
        return confirmed_reading(found) or middle_reading(found)

    def is_settled(self, burst: Burst, low: float, high: float) -> bool:
        """Whether a burst need not be repeated.

        Args:
            burst: Of which a first reading was tried.
            low: bytes/s below which a reading counts only once another confirms it.
            high: Likewise above; below ``low`` if all should be confirmed.
        """
        return all(self._is_settled(key, low, high) for key in burst.ways)

    def _is_settled(self, key: tuple[str, int], low: float, high: float) -> bool:
        rates = sorted(r.bytes_per_s for r in self.by_way.get(key, ()) if r.is_steady)
        is_confirmed = len(rates) > 1 and rates[-2] >= _AGREE * rates[-1]
        return is_confirmed or (bool(rates) and low <= rates[-1] <= high)


def measure_nics(survey: Survey, racks: Racks) -> list[Capacity]:
    """Each host's own link, by the pairs' readings and by several peers at once.

    One flow may not fill a NIC, and a peer may be slower than it. Peers are taken from
    the own rack, so that no uplink is in the way. Where several carry clearly more than
    one, that is measured again with more of them.

    Returns:
        A capacity for each host, in order; unread for a host alone in its rack.
    """
    known = Readings()
    for rack in racks:
        for host in rack:
            _note_pairs(survey, known, host, rack)
    reserve = survey.limits.uplink_reserve(survey.num_hosts) if len(racks) > 1 else 0
    wide = [(host, rack, _PEERS) for rack in racks for host in rack if len(rack) > 1]
    stars = Readings()
    while wide:
        before = [_settle(known, stars, host) for host in range(survey.num_hosts)]
        bursts = [b for host, rack, peers in wide for b in _star_bursts(host, rack, peers)]
        budget = int(_NIC_PART * (survey.instrument.left_bytes - reserve))
        size = group_bytes(max(budget, 0), sum(len(burst.links) for burst in bursts))
        _run(survey, bursts, stars, size, "nics")
        _repeat_odd(survey, bursts, known, stars, size, reserve)
        wide = [
            (host, rack, 2 * peers)
            for host, rack, peers in wide
            if 2 * peers <= min(_MOST_PEERS, 2 * (len(rack) - 2))
            and _rose(before[host], _settle(known, stars, host))
        ]
    return [_settle(known, stars, host) for host in range(survey.num_hosts)]


def _note_pairs(survey: Survey, known: Readings, host: int, rack: Sequence[int]) -> None:
    """Take what a host's pairs inside its rack typically read as a first reading."""
    rates = survey.readings.rates
    sends = [rates[host, peer] for peer in rack if (host, peer) in rates]
    receives = [rates[peer, host] for peer in rack if (peer, host) in rates]
    longest = max(
        (
            reading.bytes_per_s
            for (a, b), reading in rates.items()
            if a in rack and b in rack and is_sure(reading)
        ),
        default=float("inf"),
    )
    known.add(Burst(links=(), sender=host), typical_reading(_plausible(sends, longest)))
    known.add(
        Burst(links=(), receiver=host), typical_reading(_plausible(receives, longest))
    )


def _plausible(readings: Sequence[RateReading], longest: float) -> Sequence[RateReading]:
    """Without what was read shortly, and higher than anything in the rack for longer.

    It may be a shaper's bucket that was read, unless two read the same.
    """
    kept = [r for r in readings if is_sure(r) or r.bytes_per_s <= _ROSE * longest]
    odd = [r for r in readings if r not in kept]
    return readings if not kept or confirmed_reading(odd) else kept


def _star_bursts(host: int, rack: Sequence[int], num_peers: int) -> Iterator[Burst]:
    _, *peers = _star(host, rack, num_peers)
    yield Burst(links=tuple((host, peer) for peer in peers), sender=host)
    yield Burst(links=tuple((peer, host) for peer in peers), receiver=host)


def _repeat_odd(  # noqa: PLR0913, PLR0917 - what, what for, and how much
    survey: Survey, bursts: Sequence[Burst], known: Readings, stars: Readings, size: int,
    reserve: int,
) -> None:  # fmt: skip
    """Measure again, each alone, what carried clearly more than the pairs."""
    for _ in range(_REPEATS):
        odd = []
        for burst in bursts:
            pair = known.best(burst.ways[0])
            # Less than a pair carries is a busy moment: the pair's counts.
            if pair is None or not pair.is_steady:
                settled = stars.is_settled(burst, 0.0, -1.0)
            else:
                read = stars.by_way.get(burst.ways[0], [])
                high = _ROSE * pair.bytes_per_s
                settled = not any(r.bytes_per_s > high for r in read)
                settled = settled or stars.is_settled(burst, 0.0, high)
            odd += [] if settled else [burst]
        cost = max((size * len(burst.links) for burst in odd), default=0)
        left = max(survey.instrument.left_bytes - reserve, 0)
        odd = odd[: left // cost if cost else 0]
        _run(survey, odd, stars, size, "nics", quietly=True)


def _settle(pairs: Readings, stars: Readings, host: int) -> Capacity:
    """What the pairs and the stars of a host agree on."""
    return Capacity(
        send=_agreed(pairs, stars, ("send", host)),
        receive=_agreed(pairs, stars, ("receive", host)),
    )


def _agreed(pairs: Readings, stars: Readings, key: tuple[str, int]) -> RateReading | None:
    """The pairs' reading, or that of stars where those carried more, and did so twice."""
    pair, several = pairs.best(key), stars.by_way.get(key, [])
    long = [reading for reading in several if is_sure(reading)]
    if pair is None:
        return stars.best(key)
    if pair.window_s >= LONG_ENOUGH_S or long:  # then a short one read a bucket
        several = long
    found = confirmed_reading(several)
    if not is_sure(pair) and long:
        found = found or middle_reading(long)
        pair = pair if pair.window_s >= LONG_ENOUGH_S else found
    known = [reading for reading in (pair, found) if reading is not None]
    return max(known, key=lambda reading: reading.bytes_per_s)


def _rose(before: Capacity, after: Capacity) -> bool:
    """Whether the last stars carried clearly more than what was known."""
    return any(
        new is not None and (old is None or new.bytes_per_s > _ROSE * old.bytes_per_s)
        for old, new in ((before.send, after.send), (before.receive, after.receive))
    )


def measure_uplinks(survey: Survey, racks: Racks) -> list[Capacity]:
    """Each rack's uplink, each direction, with all hosts of the racks at once.

    Two racks are measured against each other. With three or more each is measured
    against two others at once, since a single other rack's uplink may be the slower one.

    Returns:
        A capacity for each rack, in order; unread where there is only one.
    """
    if len(racks) == 1:
        return [Capacity()]
    if len(racks) < _SMALLEST_STAR:
        bursts = [
            Burst(links=all_hosts(racks[x], racks[y]), sender=x, receiver=y)
            for x, y in permutations(range(len(racks)), 2)
        ]
    else:
        bursts = [b for x in range(len(racks)) for b in _rack_bursts(racks, x, _PEERS)]
    found = Readings()
    budget = int(_UPLINK_PART * survey.instrument.left_bytes)
    size = group_bytes(budget, sum(len(burst.links) for burst in bursts))
    _run(survey, bursts, found, size, "uplinks", both_ways=True)
    for attempt in range(2 * _REPEATS):
        # One that differs from the others may do so, or it was a busy moment.
        rates = [r.bytes_per_s for b in bursts for w in b.ways if (r := found.best(w))]
        low, high = 0.0, -1.0
        if len(racks) >= _SMALLEST_STAR:
            low, high = _LOW * median(rates or [0.0]), _ROSE * median(rates or [0.0])
        odd = [burst for burst in bursts if not found.is_settled(burst, low, high)]
        if attempt >= _REPEATS:  # then only what could not be read at all
            odd = [b for b in odd if any(found.best(way) is None for way in b.ways)]
        if len(racks) >= _SMALLEST_STAR:
            odd = [_against_fastest(racks, burst, found) for burst in odd]
        again = not attempt and len(odd) == len(bursts) < _SMALLEST_STAR
        _run(survey, odd, found, size, "uplinks", quietly=not again, both_ways=again)
    return [
        Capacity(send=found.best(("send", x)), receive=found.best(("receive", x)))
        for x in range(len(racks))
    ]


def _rack_bursts(racks: Racks, rack: int, num_peers: int) -> Iterator[Burst]:
    centre, *others = _star(rack, range(len(racks)), num_peers)
    peers = [all_hosts(racks[centre], racks[other]) for other in others]
    yield Burst(links=tuple(chain(*peers)), sender=centre)
    yield Burst(links=tuple((b, a) for a, b in chain(*peers)), receiver=centre)


def _against_fastest(racks: Racks, burst: Burst, found: Readings) -> Burst:
    """The same rack against the one partner that was seen to carry most.

    A slow partner's queue holds back what has already passed the uplink.
    """
    way, rack = burst.ways[0]
    other_way = "receive" if way == "send" else "send"
    rates = {
        x: reading.bytes_per_s if (reading := found.best((other_way, x))) else 0.0
        for x in range(len(racks))
        if x != rack
    }
    partner = max(rates, key=lambda x: rates[x])
    links = all_hosts(racks[rack], racks[partner])
    if way == "receive":
        links = tuple((b, a) for a, b in links)
    return replace(burst, links=links)


def measure_between(
    survey: Survey, one: Sequence[int], two: Sequence[int]
) -> tuple[RateReading | None, RateReading | None]:
    """What two groups of hosts carry between them: (one to two, two to one).

    Each way is measured until two readings agree, a few times at most, and the higher
    counts: a busy moment reads too low.
    """
    there = Burst(links=all_hosts(one, two), sender=0)
    back = Burst(links=tuple((b, a) for a, b in there.links), receiver=0)
    found = Readings()
    budget = int(_BETWEEN_PART * survey.instrument.left_bytes)
    size = group_bytes(budget, 2 * (_REPEATS + 2) * len(there.links))
    waiting = [there, back]
    for _ in range(_REPEATS + 2):
        _run(survey, waiting, found, size, "uplinks", quietly=True)
        waiting = [b for b in waiting if not found.is_settled(b, 0.0, -1.0)]
    return found.best(("send", 0)), found.best(("receive", 0))


def measure_together(
    survey: Survey, links: Sequence[Link], size: int
) -> RateReading | None:
    """What some links carry together, in one run without others."""
    found = Readings()
    burst = Burst(links=tuple(links), sender=0)
    _run(survey, [burst], found, size, "racks", quietly=True)
    return found.best(("send", 0))


def _run(  # noqa: PLR0913 - one call says what, where to, how much and how
    survey: Survey, bursts: Sequence[Burst], readings: Readings, size: int, stage: Stage,
    *, quietly: bool = False, both_ways: bool = False,
) -> None:  # fmt: skip
    """Run bursts and keep what they read.

    Args:
        survey: The probe.
        bursts: What to run.
        readings: Added to, in place.
        size: The most that each flow sends, bytes.
        stage: For the progress.
        quietly: As for :meth:`geartrain.topology.instrument.Survey.run_groups`.
        both_ways: Whether each burst and the next, which is its way back, run together:
            half the time, where it is surely the link that limits.
    """
    if not bursts or not size:
        return
    duration_s = survey.limits.burst_s(survey.limits.group_burst_s, survey.worst_latency_s)
    flows = [
        [
            Flow(source=a, target=b, max_bytes=size, duration_s=duration_s)
            for a, b in burst.links
        ]
        for burst in bursts
    ]
    step = 2 if both_ways else 1
    groups = [list(chain(*flows[i : i + step])) for i in range(0, len(flows), step)]
    found: list[list[FlowReading]] = survey.run_groups(groups, quietly=quietly)
    for position, burst in enumerate(bursts):
        mine = [r for r in found[position // step] if (r.source, r.target) in burst.links]
        readings.add(burst, joint_rate([reading.arrivals for reading in mine]))
    survey.tell(stage, len(bursts), len(bursts))


def _star(centre: int, rack: Sequence[int], num_peers: int) -> tuple[int, ...]:
    """A member and those that follow it in its rack, round the corner."""
    start = list(rack).index(centre)
    count = min(num_peers, len(rack) - 1)
    return tuple(rack[(start + i) % len(rack)] for i in range(count + 1))


def all_hosts(one: Sequence[int], two: Sequence[int]) -> tuple[Link, ...]:
    """Links that give every host of both groups something to do."""
    count = max(len(one), len(two))
    return tuple((one[i % len(one)], two[i % len(two)]) for i in range(count))
