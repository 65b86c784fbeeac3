"""How much hosts and racks carry in all, each direction: by several flows at once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain

from geartrain.topology.arrivals import RateReading, joint_rate
from geartrain.topology.clustering import Racks
from geartrain.topology.instrument import Survey
from geartrain.topology.limits import Stage, group_bytes
from geartrain.topology.readings import LONG_ENOUGH_S
from geartrain.topology.rounds import Flow
from geartrain.topology.tournament import disjoint_rounds, tournament_rounds

Link = tuple[int, int]
"""(source, target) positions of hosts."""

_PEERS = 2
_ROSE = 1.2
"""A reading that grows by this with more peers was limited by the peers."""
_NIC_PART = 0.4
_UPLINK_PART = 0.7
_UPLINK_REPEATS = 2
_SMALLEST_STAR = 3
"""A rack with fewer hosts has no third one to help."""


@dataclass(slots=True)
class Capacity:
    """The best readings of one host's or rack's way out and in."""

    send: RateReading | None = None
    receive: RateReading | None = None

    def raise_to(self, send: RateReading | None, receive: RateReading | None) -> bool:
        """Take in a reading; whether either rate rose much."""
        rose = _rose(self.send, send) or _rose(self.receive, receive)
        self.send = _higher(self.send, send)
        self.receive = _higher(self.receive, receive)
        return rose


def measure_nics(survey: Survey, racks: Racks) -> list[Capacity]:
    """Each host's own link, by the pairs' readings and by several peers at once.

    One flow may not fill a NIC, and a peer may be slower than it. Peers are taken from
    the own rack, so that no uplink is in the way.

    Returns:
        A capacity for each host, in order.
    """
    capacities = [_from_pairs(survey, host) for host in range(survey.num_hosts)]
    owners = [(host,) for host in range(survey.num_hosts)]
    wide = [(host, rack, _PEERS) for rack in racks for host in rack if len(rack) > 1]
    while wide:
        stars = [_star(host, rack, num_peers) for host, rack, num_peers in wide]
        groups = [
            _Group(links=_both_ways((s[0], peer) for peer in s[1:]), heads=(s[0],))
            for s in stars
        ]
        rose = _measure_groups(survey, groups, capacities, owners, _NIC_PART)
        wide = [
            (host, rack, 2 * num_peers)
            for (host, rack, num_peers), rises in zip(wide, rose, strict=True)
            if rises and num_peers < len(rack) - 1
        ]
    return capacities


def measure_uplinks(survey: Survey, racks: Racks) -> list[Capacity]:
    """Each rack's uplink, with all hosts of two racks at once, in both directions.

    With three or more racks each is then measured against two others at once, since a
    single other rack's uplink may be the slower one.

    Returns:
        A capacity for each rack, in order; unread where there is only one.
    """
    capacities = [Capacity() for _ in racks]
    if len(racks) == 1:
        return capacities
    duels = [pair for pairs in tournament_rounds(len(racks)) for pair in pairs]
    groups = [
        _Group(links=_both_ways(_all_hosts(racks[x], racks[y])), heads=(x, y))
        for x, y in duels
    ]
    for _ in range(_UPLINK_REPEATS):
        _measure_groups(survey, groups, capacities, racks, _UPLINK_PART / _UPLINK_REPEATS)
    if len(racks) >= _SMALLEST_STAR:
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
        _measure_groups(survey, groups, capacities, racks, _UPLINK_PART)
    return capacities


def measure_between(
    survey: Survey, one: Sequence[int], two: Sequence[int]
) -> tuple[RateReading | None, RateReading | None]:
    """What two groups of hosts carry between them: (one to two, two to one)."""
    capacities = [Capacity()]
    group = _Group(links=_both_ways(_all_hosts(one, two)), heads=(0,))
    _measure_groups(survey, [group], capacities, [one], _UPLINK_PART)
    return capacities[0].send, capacities[0].receive


@dataclass(frozen=True, slots=True, kw_only=True)
class _Group:
    """Links that run together, and whose ways out and in they fill."""

    links: tuple[Link, ...]
    heads: tuple[int, ...]
    """Positions of the capacities that it measures."""


def _measure_groups(
    survey: Survey,
    groups: Sequence[_Group],
    capacities: Sequence[Capacity],
    owners: Sequence[Sequence[int]],
    part: float,
) -> list[bool]:
    """Run groups of links, disjoint ones at once, and take in what they carry.

    Args:
        survey: The probe.
        groups: What to run.
        capacities: Raised in place.
        owners: The hosts behind each capacity.
        part: Of what is left of the budget, for all groups.

    Returns:
        For each group whether it raised a capacity much.
    """
    size = group_bytes(
        int(part * survey.instrument.left_bytes), sum(len(group.links) for group in groups)
    )
    stage: Stage = "nics" if len(owners) == survey.num_hosts else "uplinks"
    shortest_s = survey.limits.group_burst_s / (2 if stage == "nics" else 1)
    duration_s = survey.limits.burst_s(shortest_s, survey.worst_latency_s)
    rose = [False] * len(groups)
    rounds = disjoint_rounds([tuple({*chain(*group.links)}) for group in groups])
    for done, positions in enumerate(rounds):
        readings = survey.run(
            [
                Flow(source=i, target=j, max_bytes=size, duration_s=duration_s)
                for position in positions
                for i, j in groups[position].links
            ]
        )
        for position in positions if readings else ():
            group = groups[position]
            mine = [r for r in readings if (r.source, r.target) in group.links]
            for head in group.heads:
                out = joint_rate([r.arrivals for r in mine if r.source in owners[head]])
                into = joint_rate([r.arrivals for r in mine if r.target in owners[head]])
                rose[position] |= capacities[head].raise_to(out, into)
        survey.tell(stage, done + 1, len(rounds))
    return rose


def _from_pairs(survey: Survey, host: int) -> Capacity:
    """A host's best pair, of slopes long enough to be beyond a shaper's bucket."""
    capacity = Capacity()
    for (source, target), reading in survey.readings.rates.items():
        if host in {source, target} and reading.window_s >= LONG_ENOUGH_S:
            capacity.raise_to(
                reading if source == host else None, reading if target == host else None
            )
    return capacity


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


def _rose(old: RateReading | None, new: RateReading | None) -> bool:
    return new is not None and (old is None or new.bytes_per_s > _ROSE * old.bytes_per_s)


def _higher(old: RateReading | None, new: RateReading | None) -> RateReading | None:
    if old is None or new is None:
        return new if old is None else old
    return new if new.bytes_per_s > old.bytes_per_s else old
