"""Which pairs of hosts are measured when. Pure."""

from __future__ import annotations

from collections.abc import Iterable

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


def disjoint_rounds(groups: Iterable[tuple[int, ...]]) -> tuple[tuple[int, ...], ...]:
    """Put groups of hosts into rounds in which no host occurs twice.

    Args:
        groups: Each a tuple of hosts that are busy together.

    Returns:
        For each round the positions of its groups, first come, first served.

    >>> disjoint_rounds([(0, 1), (1, 2), (2, 3)])
    ((0, 2), (1,))
    """
    rounds: list[list[int]] = []
    busy: list[set[int]] = []
    for position, group in enumerate(groups):
        members = set(group)
        for index in range(len(rounds)):
            if not busy[index] & members:
                rounds[index].append(position)
                busy[index] |= members
                break
        else:
            rounds.append([position])
            busy.append(members)
    return tuple(tuple(positions) for positions in rounds)
