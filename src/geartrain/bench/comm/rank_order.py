"""In which order ranks lie on hosts, and how a ring of them crosses racks. Pure."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import pairwise

DEFAULT_SEED = 33
"""Two racks of four hosts: 4 edges of the ring of ranks leave each rack, the most there
can be. Launchers hand ranks out without knowing racks, so this is as good as any."""


def shuffled_hosts(num_hosts: int, seed: int) -> tuple[int, ...]:
    """Which host each rank is on: a seeded random order.

    >>> shuffled_hosts(4, 0)
    (2, 0, 1, 3)
    """
    hosts = list(range(num_hosts))
    random.Random(seed).shuffle(hosts)  # noqa: S311 - no secret
    return tuple(hosts)


def crossing_edges(racks_in_ring: Sequence[int], num_racks: int) -> tuple[int, ...]:
    """How many edges of a ring leave each rack; as many enter it.

    Args:
        racks_in_ring: The rack of each member, in the ring's order.
        num_racks: All racks.

    >>> crossing_edges([0, 0, 1, 1], 2), crossing_edges([0, 1, 0, 1], 2)
    ((1, 1), (2, 2))
    """
    leaving = [0] * num_racks
    for rack, following in pairwise([*racks_in_ring, racks_in_ring[0]]):
        if rack != following:
            leaving[rack] += 1
    return tuple(leaving)
