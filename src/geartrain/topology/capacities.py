"""How much hosts and racks carry in all, each direction: by several flows at once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain

from geartrain.topology.arrivals import RateReading, joint_rate
from geartrain.topology.clustering import Racks
from geartrain.topology.instrument import Survey
from geartrain.topology.limits import group_bytes
from geartrain.topology.readings import typical_reading
from geartrain.topology.rounds import Flow, FlowReading
from geartrain.topology.tournament import disjoint_rounds, tournament_rounds

Link = tuple[int, int]
"""(source, target) positions of hosts."""

_PEERS = 2
_ROSE = 1.2
"""A reading that grows by this with more peers was limited by the peers."""
_NIC_PART = 0.75
_MOST_PEERS = 8
_TRIES = 3
"""A group whose flows hardly ran at the same time is run again."""
_UPLINK_PART = 0.7
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


@dataclass(slots=True)
class _Readings:
    """All readings of one capacity."""

    sends: list[RateReading] = field(default_factory=list)
    receives: list[RateReading] = field(default_factory=list)


def measure_nics(survey: Survey, racks: Racks) -> list[Capacity]:
    """Each host's own link, by the pairs' readings and by several peers at once.

    One flow may not fill a NIC, and a peer may be slower than it. Peers are taken from
    the own rack, so that no uplink is in the way. Where several carry clearly more than
    one, that is measured again with more of them.

    Returns:
        A capacity for each host, in order; unread for a host alone in its rack.
    """
    pairs = [Capacity() for _ in range(survey.num_hosts)]
    for rack in racks:
        for host in rack:
            pairs[host] = _typical_pair(survey, host, rack)
    stars = [_Readings() for _ in pairs]
    owners = [(host,) for host in range(survey.num_hosts)]
    wide = [(host, rack, _PEERS) for rack in racks for host in rack if len(rack) > 1]
    reserve = survey.limits.uplink_reserve(survey.num_hosts) if len(racks) > 1 else 0
    part = _NIC_PART
    while wide:
        groups = []
        for host, rack, num_peers in wide:
            star = _star(host, rack, num_peers)
            links = _both_ways((host, peer) for peer in star[1:])
            groups.append(_Group(links=links, heads=(host,)))
        before = [_settle(pairs[host], stars[host]) for host in range(survey.num_hosts)]
        _measure_groups(survey, groups, stars, owners, _Spending(part=part, keep=reserve))
        part = 1.0
        wide = [
            (host, rack, 2 * num_peers)
            for host, rack, num_peers in wide
            if num_peers <= _MOST_PEERS and _rose(before[host], stars[host])
        ]
    return [_settle(pair, star) for pair, star in zip(pairs, stars, strict=True)]


def _typical_pair(survey: Survey, host: int, rack: Sequence[int]) -> Capacity:
    """The median of what a host's pairs inside its rack read."""
    rates = survey.readings.rates
    sends = [rates[host, peer] for peer in rack if (host, peer) in rates]
    receives = [rates[peer, host] for peer in rack if (peer, host) in rates]
    return Capacity(send=typical_reading(sends), receive=typical_reading(receives))


def _settle(pair: Capacity, star: _Readings) -> Capacity:
    """The pairs' rate, or that of stars where those carry more."""
    return Capacity(
        send=_confirm(pair.send, star.sends), receive=_confirm(pair.receive, star.receives)
    )


def _confirm(pair: RateReading | None, stars: Sequence[RateReading]) -> RateReading | None:
    """A rate much above the pairs' counts once a second star has reached it.

    A burst that a shaper's bucket let pass reads too high, but hardly twice.
    """
    ordered = sorted(stars, key=lambda r: -r.bytes_per_s)
    if pair is not None:
        ordered += [pair]
        if ordered[0].bytes_per_s <= _ROSE * pair.bytes_per_s:
            return _fastest(ordered)
    return ordered[min(1, len(ordered) - 1)] if ordered else None


def _rose(before: Capacity, star: _Readings) -> bool:
    """Whether the last star carried clearly more than what was known."""
    return any(
        known is None or (readings and readings[-1].bytes_per_s > _ROSE * known.bytes_per_s)
        for known, readings in ((before.send, star.sends), (before.receive, star.receives))
    )


def measure_uplinks(survey: Survey, racks: Racks) -> list[Capacity]:
    """Each rack's uplink, with all hosts of two racks at once, in both directions.

    With three or more racks each is then measured against two others at once, since a
    single other rack's uplink may be the slower one.

    Returns:
        A capacity for each rack, in order; unread where there is only one.
    """
    if len(racks) == 1:
        return [Capacity()]
    readings = [_Readings() for _ in racks]
    duels = [pair for pairs in tournament_rounds(len(racks)) for pair in pairs]
    groups = [
        _Group(links=_both_ways(_all_hosts(racks[x], racks[y])), heads=(x, y))
        for x, y in duels
    ]
    _measure_groups(survey, groups, readings, racks, _Spending(part=_UPLINK_PART / 2))
    if len(racks) < _SMALLEST_STAR:  # once more: a busy moment reads too low
        _measure_groups(survey, groups, readings, racks, _Spending(part=_UPLINK_PART))
    else:
        stars = [_star(x, range(len(racks)), _PEERS) for x in range(len(racks))]
        groups = [
            _Group(
                links=_both_ways(
                    chain(*(_all_hosts(racks[s[0]], racks[y]) for y in s[1:]))
                ),
                heads=(s[0],),
            )
            for s in stars
        ]
        _measure_groups(survey, groups, readings, racks, _Spending(part=_UPLINK_PART))
    return [
        Capacity(send=_fastest(r.sends), receive=_fastest(r.receives)) for r in readings
    ]


def measure_star(
    survey: Survey, host: int, peers: Sequence[int]
) -> tuple[RateReading | None, RateReading | None]:
    """What one host carries to and from several: (sends, receives)."""
    return measure_between(survey, [host], peers)


def measure_between(
    survey: Survey, one: Sequence[int], two: Sequence[int]
) -> tuple[RateReading | None, RateReading | None]:
    """What two groups of hosts carry between them: (one to two, two to one)."""
    readings = [_Readings()]
    group = _Group(links=_both_ways(_all_hosts(one, two)), heads=(0,))
    _measure_groups(survey, [group], readings, [one], _Spending(part=_BETWEEN_PART))
    return _fastest(readings[0].sends), _fastest(readings[0].receives)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Group:
    """Links that run together, and whose ways out and in they fill."""

    links: tuple[Link, ...]
    heads: tuple[int, ...]
    """Positions of the capacities that it measures."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Spending:
    """How much of the budget a stage may use."""

    part: float
    """Of what is left, for running everything once."""
    keep: int = 0
    """Bytes to leave for others, also when groups are run again."""


def _measure_groups(
    survey: Survey,
    groups: Sequence[_Group],
    readings: Sequence[_Readings],
    owners: Sequence[Sequence[int]],
    spending: _Spending,
) -> None:
    """Run groups of links, disjoint ones at once, and keep what they carry.

    Args:
        survey: The probe.
        groups: What to run.
        readings: Added to, in place.
        owners: The hosts behind each of the readings.
        spending: What it may use.
    """
    left = max(survey.instrument.left_bytes - spending.keep, 0)
    size = group_bytes(int(spending.part * left), sum(len(g.links) for g in groups))
    waiting = list(groups)
    for _ in range(_TRIES):
        rounds = disjoint_rounds([tuple({*chain(*group.links)}) for group in waiting])
        unread: list[_Group] = []
        for done, positions in enumerate(rounds):
            together = [waiting[position] for position in positions]
            cost = size * sum(len(group.links) for group in together)
            if cost > survey.instrument.left_bytes - spending.keep:
                return
            unread += _run_groups(survey, together, size, readings, owners)
            survey.tell(
                "nics" if len(owners) == survey.num_hosts else "uplinks",
                done + 1,
                len(rounds),
            )
        waiting = unread


def _run_groups(
    survey: Survey,
    groups: Sequence[_Group],
    size: int,
    readings: Sequence[_Readings],
    owners: Sequence[Sequence[int]],
) -> list[_Group]:
    """Run disjoint groups at once; returns those that could not be read."""
    duration_s = survey.limits.burst_s(survey.limits.group_burst_s, survey.worst_latency_s)
    found = survey.run(
        [
            Flow(source=i, target=j, max_bytes=size, duration_s=duration_s)
            for group in groups
            for i, j in group.links
        ]
    )
    unread = []
    for group in groups if found else ():
        mine = [r for r in found if (r.source, r.target) in group.links]
        read = [_take_in(mine, readings[head], owners[head]) for head in group.heads]
        unread += [] if all(read) else [group]
    return unread


def _take_in(
    found: Sequence[FlowReading], readings: _Readings, owner: Sequence[int]
) -> bool:
    """Keep what went out of and into a group of hosts; whether both could be read."""
    out = joint_rate([r.arrivals for r in found if r.source in owner])
    into = joint_rate([r.arrivals for r in found if r.target in owner])
    readings.sends += [out] if out is not None else []
    readings.receives += [into] if into is not None else []
    return out is not None and into is not None


def _star(centre: int, rack: Sequence[int], num_peers: int) -> tuple[int, ...]:
    """A member and those that follow it in its rack, round the corner."""
    start = list(rack).index(centre)
    count = min(num_peers, len(rack) - 1)
    return tuple(rack[(start + i) % len(rack)] for i in range(count + 1))


def _all_hosts(one: Sequence[int], two: Sequence[int]) -> list[Link]:
    """Links that give every host of both groups something to do."""
    count = max(len(one), len(two))
    return [(one[i % len(one)], two[i % len(two)]) for i in range(count)]


def _both_ways(links: Iterable[Link]) -> tuple[Link, ...]:
    return tuple(way for a, b in links for way in ((a, b), (b, a)))


def _fastest(readings: Sequence[RateReading]) -> RateReading | None:
    return max(readings, key=lambda r: r.bytes_per_s, default=None)
