"""Below what no exact all-reduce can go."""

from __future__ import annotations

from collections.abc import Sequence

from geartrain.planner.exchange.fabric import Fabric, place
from geartrain.topology.profile import Topology


def bound_s(topology: Topology, placement: Sequence[str], num_bytes: int) -> float:
    """Least time of an exact all-reduce, whatever the algorithm.

    Each cut of the network must let the tensor out and in once; and reducing and handing
    out send ``2 (n - 1)`` tensors in all, over the links of all n parties.

    Args:
        topology: All hosts, in racks.
        placement: Host id of each member.
        num_bytes: Size of the tensor.

    Source: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms", 2009, applied
    to hosts and to racks.
    """
    return fabric_bound_s(place(topology, placement), num_bytes)


def fabric_bound_s(fabric: Fabric, num_bytes: int) -> float:
    """The bound of members that are already placed; see ``bound_s``."""
    hosts, racks = fabric.hosts, fabric.racks
    if len(hosts) == 1:
        return 0.0
    directions = (
        [host.send_bytes_per_s for host in hosts],
        [host.receive_bytes_per_s for host in hosts],
    )
    least = max(_parties_s(rates) for rates in directions)
    if len(racks) > 1:
        uplinks = (
            [rack.send_bytes_per_s for rack in racks],
            [rack.receive_bytes_per_s for rack in racks],
        )
        least = max(least, *(_parties_s(rates) for rates in uplinks))
    return least * num_bytes


def _parties_s(bytes_per_s: Sequence[float]) -> float:
    """Per byte: the slowest party's tensor, and all tensors over all links."""
    return max(1 / min(bytes_per_s), 2 * (len(bytes_per_s) - 1) / sum(bytes_per_s))
