"""Predicted time of exchanges that move whole tensors: one host, a ring, rack leaders."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from geartrain.planner.exchange.fabric import Fabric, FabricHost
from geartrain.planner.exchange.ring_order import Rates, edge_bytes_per_s
from geartrain.planner.exchange.schedule import StageTimes
from geartrain.planner.exchange.staged_cost import (
    ADD_BYTES_PER_S,
    MESSAGE_CPU_S,
    Prediction,
    device_group_s,
    turn_s,
)

RING_LOSS = 1.12
"""Measured over fluid time of Gloo's ring: 8.2 s for 7.34 s at 2 and 4 racks. It sends up
to 1.83 tensors a host where 1.75 would do, and a host that is late holds up all others."""
RING_STEP_CPU_S = 20e-6
"""Processor time of one of its steps, in C++."""


def predict_local(fabric: Fabric, num_bytes: int) -> Prediction:
    """One host: its device group alone."""
    group_s = _group_s(fabric) * num_bytes
    latency_s = 2 * MESSAGE_CPU_S if fabric.num_members > 1 else 0.0
    return Prediction(
        seconds=group_s + latency_s,
        stages=StageTimes(device_group_s=group_s, latency_s=latency_s),
        limit="memory",
    )


def predict_ring(
    fabric: Fabric, order: Sequence[int], num_bytes: int, core_fraction: float, rates: Rates
) -> Prediction:
    """Gloo's ring: each of n hosts passes ``2 (n - 1) / n`` tensors to the next one.

    Args:
        fabric: Racks and hosts.
        order: Leaders' positions as the ring visits them.
        num_bytes: Size of the tensor.
        core_fraction: Processor cores of each host.
        rates: What single flows reached.
    """
    slowest, limit = _slowest_edge(fabric, order, rates)
    num_hosts = len(order)
    moved_s = RING_LOSS * 2 * (num_hosts - 1) / num_hosts * num_bytes / slowest
    step_s = fabric.fabric_latency_s if len(fabric.racks) > 1 else fabric.rack_latency_s
    step_s += RING_STEP_CPU_S / core_fraction + turn_s(core_fraction)
    latency_s = 2 * (num_hosts - 1) * step_s
    # Gloo takes whole tensors, so the device groups work before and after, not meanwhile.
    group_s = _group_s(fabric) * num_bytes
    return Prediction(
        seconds=moved_s + latency_s + group_s,
        stages=StageTimes(device_group_s=group_s, rack_s=moved_s, latency_s=latency_s),
        limit=limit,
    )


def predict_leader(fabric: Fabric, num_bytes: int, core_fraction: float) -> Prediction:
    """Rack leaders gather whole tensors, swap the sums, and hand the total out.

    With racks of one host each this is the exchange in one shot: everybody sends
    everything to everybody.
    """
    message_s = MESSAGE_CPU_S / core_fraction
    num_racks = len(fabric.racks)
    gather = hand_out = swap = 0.0
    gather_latency_s = 0.0
    adding = 0.0
    for rack in fabric.racks:
        leader, others = rack.hosts[0], rack.hosts[1:]
        if others:
            count = len(others)
            slowest_send = min(host.send_bytes_per_s for host in others)
            slowest_receive = min(host.receive_bytes_per_s for host in others)
            gather = max(gather, count / leader.receive_bytes_per_s, 1 / slowest_send)
            hand_out = max(hand_out, count / leader.send_bytes_per_s, 1 / slowest_receive)
            waits_s = fabric.rack_latency_s + turn_s(core_fraction) + count * message_s
            gather_latency_s = max(gather_latency_s, waits_s)
            adding = max(adding, count / ADD_BYTES_PER_S)
        if num_racks > 1:
            slowest = min(rack.bytes_per_s, leader.bytes_per_s)
            swap = max(swap, (num_racks - 1) / slowest)
    latency_s = 2 * gather_latency_s
    if num_racks > 1:
        adding += (num_racks - 1) / ADD_BYTES_PER_S
        latency_s += fabric.fabric_latency_s + turn_s(core_fraction)
        latency_s += 2 * (num_racks - 1) * message_s
    group_s = _group_s(fabric) * num_bytes
    rack_s, slow_hop_s = (gather + hand_out) * num_bytes, swap * num_bytes
    adding_s = adding * num_bytes / min(1.0, core_fraction)
    return Prediction(
        seconds=group_s + rack_s + slow_hop_s + latency_s + adding_s,
        stages=StageTimes(
            device_group_s=group_s,
            rack_s=rack_s,
            slow_hop_s=slow_hop_s,
            latency_s=latency_s,
        ),
        limit="the number of messages"
        if latency_s > rack_s + slow_hop_s
        else "the leaders",
    )


def _group_s(fabric: Fabric) -> float:
    """Seconds per byte in and out of the slowest device group."""
    return max(sum(device_group_s(host)) for host in fabric.hosts)


def _slowest_edge(fabric: Fabric, order: Sequence[int], rates: Rates) -> tuple[float, str]:
    rack_of = {host.members[0]: rack for rack in fabric.racks for host in rack.hosts}
    host_of = {host.members[0]: host for host in fabric.hosts}
    crossings: dict[tuple[str, bool], int] = {}
    edges = list(pairwise([*order, order[0]]))
    for source, target in edges:
        if rack_of[source] is not rack_of[target]:
            for key in (
                (rack_of[source].rack_id, True),
                (rack_of[target].rack_id, False),
            ):
                crossings[key] = crossings.get(key, 0) + 1
    slowest, limit = float("inf"), ""
    for source, target in edges:
        a, b = host_of[source], host_of[target]
        if rack_of[source] is rack_of[target]:
            found = _named(edge_bytes_per_s(a, b, rates), f"{a.host_id} -> {b.host_id}")
        else:
            up, down = rack_of[source], rack_of[target]
            found = min(
                _named(_nic(a, b), f"{a.host_id} -> {b.host_id}"),
                _named(
                    up.send_bytes_per_s / crossings[up.rack_id, True],
                    f"the uplink of {up.rack_id}",
                ),
                _named(
                    down.receive_bytes_per_s / crossings[down.rack_id, False],
                    f"the uplink of {down.rack_id}",
                ),
            )
        slowest, limit = min((slowest, limit), found)
    return slowest, limit


def _nic(source: FabricHost, target: FabricHost) -> float:
    return min(source.send_bytes_per_s, target.receive_bytes_per_s)


def _named(bytes_per_s: float, name: str) -> tuple[float, str]:
    return bytes_per_s, name
