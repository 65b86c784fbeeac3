"""In which order a ring visits the hosts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from geartrain.planner.exchange.fabric import Fabric, FabricHost

_LARGEST_TO_IMPROVE = 64
"""Hosts of a rack up to which 2-opt runs: its passes cost their number squared."""
_LARGEST_TO_ORDER = 512
_EQUAL_FRACTION = 0.8
"""Rates above this part of what the NICs allow count as alike: a probe reads low by chance,
and a ring should not be rearranged by noise."""

Rates = Mapping[tuple[str, str], float]
"""Bytes per second of one flow, by source and target host id."""


def order_ring(fabric: Fabric, rates: Rates) -> tuple[int, ...]:
    """Order the host leaders: racks one after the other, slow paths avoided inside.

    Each rack's uplink then carries one crossing flow in each direction. Inside a rack,
    nearest neighbours first, improved by 2-opt. Equal inputs give the same order.

    Args:
        fabric: Racks and hosts.
        rates: What single flows reached; pairs may be missing.

    Returns:
        Member positions of the leaders, shape (num_hosts,).

    Source: PCCL orders its ring the same way, as a travelling salesman over 1 / rate.
    """
    order: list[int] = []
    for rack in fabric.racks:
        hosts = _order_rack(rack.hosts, rates) if rates else list(rack.hosts)
        order.extend(host.members[0] for host in hosts)
    return tuple(order)


def edge_bytes_per_s(source: FabricHost, target: FabricHost, rates: Rates) -> float:
    """Rate of one flow inside a rack: what the NICs allow, unless it was far below."""
    if _is_slow(source, target, rates):
        return rates[source.host_id, target.host_id]
    return min(source.send_bytes_per_s, target.receive_bytes_per_s)


def _is_slow(source: FabricHost, target: FabricHost, rates: Rates) -> bool:
    allowed = min(source.send_bytes_per_s, target.receive_bytes_per_s)
    measured = rates.get((source.host_id, target.host_id), allowed)
    return measured < _EQUAL_FRACTION * allowed


def _order_rack(hosts: Sequence[FabricHost], rates: Rates) -> list[FabricHost]:
    num_hosts = len(hosts)
    if num_hosts <= 2 or num_hosts > _LARGEST_TO_ORDER:  # noqa: PLR2004 - one order only
        return list(hosts)
    if not any(_is_slow(a, b, rates) for a in hosts for b in hosts if a is not b):
        return list(hosts)  # every order is as good
    costs = [
        [1 / edge_bytes_per_s(a, b, rates) if a is not b else 0.0 for b in hosts]
        for a in hosts
    ]
    path = _nearest_neighbours(costs)
    if num_hosts <= _LARGEST_TO_IMPROVE:
        path = _two_opt(path, costs)
    return [hosts[i] for i in path]


def _nearest_neighbours(costs: Sequence[Sequence[float]]) -> list[int]:
    path, left = [0], set(range(1, len(costs)))
    while left:
        nearest = min(left, key=lambda i: (costs[path[-1]][i], i))
        path.append(nearest)
        left.remove(nearest)
    return path


def _two_opt(path: list[int], costs: Sequence[Sequence[float]]) -> list[int]:
    """Reverse stretches of the path as long as that makes it cheaper."""
    best = _length(path, costs)
    improved = True
    while improved:
        improved = False
        for start in range(len(path) - 1):
            for stop in range(start + 2, len(path) + 1):
                turned = path[:start] + path[start:stop][::-1] + path[stop:]
                length = _length(turned, costs)
                if length < best * (1 - 1e-9):
                    path, best, improved = turned, length, True
    return path


def _length(path: Sequence[int], costs: Sequence[Sequence[float]]) -> float:
    """Cost of the closed ring, its slowest edge first: that one gates every step."""
    edges = [costs[a][b] for a, b in zip(path, [*path[1:], path[0]], strict=True)]
    return max(edges) * len(edges) + sum(edges)
