"""A simulated network that keeps an instrument's contract: links are shared fairly."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from geartrain.topology.agent_protocol import Description
from geartrain.topology.rounds import Flow, FlowReading

_POINTS = 12


@dataclass
class FakeNetwork:
    """Hosts in racks; rates in bytes/s, (send, receive)."""

    rack_of: Sequence[int]
    nics: Sequence[tuple[float, float]]
    uplinks: Sequence[tuple[float, float]]
    noise_fraction: float = 0.0
    seed: int = 0
    max_bytes: int = 10**12
    sent_bytes: int = 0
    num_flows: int = 0
    num_rounds: int = 0

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)

    @property
    def left_bytes(self) -> int:
        return self.max_bytes - self.sent_bytes

    @property
    def racks(self) -> list[tuple[int, ...]]:
        """The true racks, as a survey orders them."""
        members = defaultdict(list)
        for host, rack in enumerate(self.rack_of):
            members[rack].append(host)
        return sorted(tuple(hosts) for hosts in members.values())

    def descriptions(self, names: Sequence[str] | None = None) -> list[Description]:
        return [
            Description(
                host_id=f"h{i}",
                name=names[i] if names else f"h{i}",
                boot_id=f"boot{i}",
                network_namespace=str(i),
                address=f"10.0.{i // 200}.{i % 200 + 1}",
                interface="eth0",
            )
            for i in range(len(self.rack_of))
        ]

    def run(self, flows: Sequence[Flow]) -> list[FlowReading]:
        if sum(flow.max_bytes for flow in flows) > self.left_bytes:
            return []
        self.num_rounds += 1
        self.num_flows += len(flows)
        return [
            self._reading(flow, rate)
            for flow, rate in zip(flows, self.share(flows), strict=True)
        ]

    def _reading(self, flow: Flow, rate: float) -> FlowReading:
        rate *= 1 + self.noise_fraction * self._random.uniform(-1, 1)
        total = min(flow.max_bytes, int(rate * flow.duration_s))
        self.sent_bytes += total
        steps = range(1, _POINTS + 1)
        return FlowReading(
            source=flow.source,
            target=flow.target,
            latency_s=1e-4,
            arrivals=[(total * i / _POINTS / rate, total * i // _POINTS) for i in steps],
        )

    def share(self, flows: Sequence[Flow]) -> list[float]:
        """Max-min fair rates of flows that run together."""
        capacity: dict[tuple[str, int], float] = {}
        paths = []
        for flow in flows:
            path = [("out", flow.source), ("in", flow.target)]
            capacity["out", flow.source] = self.nics[flow.source][0]
            capacity["in", flow.target] = self.nics[flow.target][1]
            one, two = self.rack_of[flow.source], self.rack_of[flow.target]
            if one != two:
                path += [("up", one), ("down", two)]
                capacity["up", one] = self.uplinks[one][0]
                capacity["down", two] = self.uplinks[two][1]
            paths.append(path)
        rates = [0.0] * len(flows)
        open_flows = set(range(len(flows)))
        while open_flows:
            users: dict[tuple[str, int], list[int]] = defaultdict(list)
            for index in open_flows:
                for link in paths[index]:
                    users[link].append(index)
            link = min(users, key=lambda key: capacity[key] / len(users[key]))
            fair = capacity[link] / len(users[link])
            for index in users[link]:
                rates[index] = fair
                open_flows.remove(index)
                for other in paths[index]:
                    capacity[other] -= fair
        return rates


def uniform_network(
    sizes: Sequence[int], nic: float = 62.5e6, uplink: float = 6.25e6, **options: object
) -> FakeNetwork:
    """Racks of these sizes, all alike."""
    rack_of = [rack for rack, size in enumerate(sizes) for _ in range(size)]
    network = FakeNetwork(
        rack_of=rack_of,
        nics=[(nic, nic)] * len(rack_of),
        uplinks=[(uplink, uplink)] * len(sizes),
    )
    for name, value in options.items():
        setattr(network, name, value)
    network.__post_init__()
    return network
