"""Which pairs of hosts are measured when. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

Pair = tuple[int, int]


def tournament_rounds(num_hosts: int) -> tuple[tuple[Pair, ...], ...]:
    """Rounds of disjoint pairs that hold every pair once.

    Args:
        num_hosts: At least 1.

    Returns:
        ``num_hosts - 1`` rounds (``num_hosts`` where that is odd: one host has a bye in
        each), so that all n(n-1)/2 pairs take the time of about n.

    Source: the circle method of round-robin tournaments.

    >>> tournament_rounds(4)
    (((0, 3), (1, 2)), ((0, 2), (1, 3)), ((0, 1), (2, 3)))
    """
    seats: list[int | None] = [*range(num_hosts), *([None] if num_hosts % 2 else [])]
    half = len(seats) // 2
    rounds = []
    for _ in range(len(seats) - 1):
        pairs = zip(seats[:half], reversed(seats[half:]), strict=True)
        met = [(a, b) for a, b in pairs if a is not None and b is not None]
        rounds.append(tuple(sorted((min(a, b), max(a, b)) for a, b in met)))
        seats = [seats[0], seats[-1], *seats[1:-1]]
    return tuple(met_in_round for met_in_round in rounds if met_in_round)


def disjoint_rounds(
    groups: Sequence[tuple[int, ...]],
    machines: Sequence[str] = (),
    flows_a_machine: int | None = None,
    num_flows: Sequence[int] = (),
) -> tuple[tuple[int, ...], ...]:
    """Put groups of hosts into rounds in which no host occurs twice.

    Args:
        groups: Each a tuple of hosts that are busy together.
        machines: Of each host, which machine it shares; empty if none is shared.
        flows_a_machine: How many flows a machine should carry in a round. A group is
            never divided: one with more has its machines to itself.
        num_flows: Of each group, by default 1.

    Returns:
        For each round the positions of its groups, first come, first served.

    >>> disjoint_rounds([(0, 1), (1, 2), (2, 3)])
    ((0, 2), (1,))
    >>> disjoint_rounds([(0, 1), (2, 3)], ["m", "m", "m", "m"], flows_a_machine=1)
    ((0,), (1,))
    """
    rounds: list[list[int]] = []
    busy: list[set[int]] = []
    loads: list[Counter[str]] = []
    for position, group in enumerate(groups):
        members = set(group)
        count = num_flows[position] if num_flows else 1
        load = Counter({machines[host]: count for host in members} if machines else {})
        for index in range(len(rounds)):
            if not busy[index] & members and _fits(loads[index], load, flows_a_machine):
                break
        else:
            index = len(rounds)
            rounds.append([])
            busy.append(set())
            loads.append(Counter())
        rounds[index].append(position)
        busy[index] |= members
        loads[index] += load
    return tuple(tuple(positions) for positions in rounds)


def _fits(known: Counter[str], more: Counter[str], limit: int | None) -> bool:
    """Whether no machine gets more flows than it should by joining a round."""
    return limit is None or all(
        not known[machine] or known[machine] + count <= limit
        for machine, count in more.items()
    )
