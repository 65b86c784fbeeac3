"""A fluid simulation of the staged exchange: flows that share links fairly.

Written from what the executor does, not from the cost model: every host has a thread per
stage that takes the chunks in order; a host sends a chunk on as soon as it has it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field

from geartrain.planner.exchange.fabric import Fabric
from geartrain.planner.exchange.ownership import Piece, pieces
from geartrain.planner.exchange.schedule import CommSchedule

Task = tuple[int, int, int]
"""(stage, chunk, host leader)."""


@dataclass(slots=True)
class _Flow:
    left_bytes: float
    links: tuple[Hashable, ...]
    source_task: Task
    target_task: Task


@dataclass(slots=True)
class _Network:
    capacity: dict[Hashable, float]
    flows: list[_Flow] = field(default_factory=list)

    def rates(self) -> list[float]:
        """Max-min fair: the fullest link's flows get equal parts of it, then the next."""
        left = dict(self.capacity)
        users: dict[Hashable, set[int]] = defaultdict(set)
        for index, flow in enumerate(self.flows):
            for link in flow.links:
                users[link].add(index)
        rate = [0.0] * len(self.flows)
        while users:
            link = min(users, key=lambda key: left[key] / len(users[key]))
            fair = left[link] / len(users[link])
            for index in list(users[link]):
                rate[index] = fair
                for other in self.flows[index].links:
                    left[other] = max(0.0, left[other] - fair)
                    users[other].discard(index)
            users = defaultdict(set, {key: value for key, value in users.items() if value})
        return rate


def simulate_s(fabric: Fabric, schedule: CommSchedule, num_bytes: int) -> float:
    """Seconds of one staged exchange among lone processes, without latency."""
    chunk_bytes = num_bytes / schedule.num_chunks
    rack_of = {h.members[0]: r for r, rack in enumerate(fabric.racks) for h in rack.hosts}
    network = _Network(_capacities(fabric))
    waiting: dict[Task, int] = defaultdict(int)
    flows: dict[Task, list[_Flow]] = defaultdict(list)
    cut = pieces(schedule, 0, 10_000)
    stages = sorted({stage for stage, *_ in _transfers(schedule, cut)})
    for chunk in range(schedule.num_chunks):
        for stage, source, target, part in _transfers(schedule, cut):
            links: list[Hashable] = [("out", source), ("in", target)]
            if rack_of[source] != rack_of[target]:
                links += [("up", rack_of[source]), ("down", rack_of[target])]
            flow = _Flow(
                part * chunk_bytes,
                tuple(links),
                (stage, chunk, source),
                (stage, chunk, target),
            )
            flows[flow.source_task].append(flow)
            for task in (flow.source_task, flow.target_task):
                waiting[task] += 1
    return _run(network, schedule, stages, list(rack_of), flows, waiting)


def _run(
    network: _Network,
    schedule: CommSchedule,
    stages: list[int],
    hosts: list[int],
    flows: dict[Task, list[_Flow]],
    waiting: dict[Task, int],
) -> float:
    done: set[Task] = set()
    started: set[Task] = set()
    tasks = [(s, c, h) for s in stages for c in range(schedule.num_chunks) for h in hosts]
    now = 0.0
    while len(done) < len(tasks):
        for task in tasks:
            stage, chunk, host = task
            before = stages.index(stage) - 1
            ready = (chunk == 0 or (stage, chunk - 1, host) in done) and (
                before < 0 or (stages[before], chunk, host) in done
            )
            if ready and task not in started:
                started.add(task)
                network.flows += flows[task]
            if task in started and waiting[task] == 0:
                done.add(task)
        if not network.flows:
            continue
        rates = network.rates()
        step = min(f.left_bytes / r for f, r in zip(network.flows, rates, strict=True))
        now += step
        for flow, rate in zip(network.flows, rates, strict=True):
            flow.left_bytes -= step * rate
            if flow.left_bytes <= 1e-6 * rate:
                waiting[flow.source_task] -= 1
                waiting[flow.target_task] -= 1
                flow.left_bytes = 0.0
        network.flows = [flow for flow in network.flows if flow.left_bytes > 0]
    return now


def _capacities(fabric: Fabric) -> dict[Hashable, float]:
    capacity: dict[Hashable, float] = {}
    for index, rack in enumerate(fabric.racks):
        capacity["up", index] = rack.send_bytes_per_s
        capacity["down", index] = rack.receive_bytes_per_s
        for host in rack.hosts:
            capacity["out", host.members[0]] = host.send_bytes_per_s
            capacity["in", host.members[0]] = host.receive_bytes_per_s
    return capacity


def _transfers(
    schedule: CommSchedule, cut: tuple[Piece, ...]
) -> Iterator[tuple[int, int, int, float]]:
    """(stage, source, target, part of the chunk), each pair and stage once."""
    total = cut[-1].stop
    sums: dict[tuple[int, int, int], float] = defaultdict(float)
    for piece in cut:
        part = piece.num_elements / total
        for index, rack in enumerate(schedule.racks):
            holder = piece.holders[index]
            for leader in rack.leaders:
                if leader != holder:
                    sums[0, leader, holder] += part
                    sums[3, holder, leader] += part
        for index, holder in enumerate(piece.holders):
            if len(schedule.racks) == 2:
                sums[1, holder, piece.holders[1 - index]] += part
            elif holder != piece.owner:
                sums[1, holder, piece.owner] += part
                sums[2, piece.owner, holder] += part
    for (stage, source, target), part in sums.items():
        yield stage, source, target, part
