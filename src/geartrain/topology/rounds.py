"""Runs flows between agents, and keeps to the budget of bytes."""

from __future__ import annotations

import itertools
import secrets
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from geartrain.errors import CommunicationError
from geartrain.topology.agent_client import AgentClient
from geartrain.topology.agent_protocol import (
    FlowFailure,
    FlowsDone,
    FlowsOpened,
    OpenFlows,
    RunFlows,
    SendOrder,
)
from geartrain.topology.arrivals import Arrivals

_LEAD_S = 0.003
"""From the order to the start, so that all hosts have it by then."""
_REPLY_MARGIN_S = 2.0
_LEAST_BURST_BYTES = 4096
_ENOUGH_STAMPS = 6
_SLOWEST_DRAIN_S = 5.0
"""After its time a burst still has what waits in sockets and shapers to deliver."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Flow:
    """One direction of a path to fill, by positions of hosts."""

    source: int
    target: int
    max_bytes: int
    duration_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowReading:
    """What came of a flow."""

    source: int
    target: int
    latency_s: float
    arrivals: Arrivals
    """By the coordinator's clock."""


class FlowRunner:
    """All hosts' agents, as one instrument."""

    def __init__(
        self, clients: Sequence[AgentClient], max_bytes: int, timeout_s: float
    ) -> None:
        self.clients = clients
        self.max_bytes = max_bytes
        self.sent_bytes = 0
        self._timeout_s = timeout_s
        self._ids = (f"{secrets.token_hex(4)}-{i}" for i in itertools.count())

    @property
    def left_bytes(self) -> int:
        """What may still be sent."""
        return max(self.max_bytes - self.sent_bytes, 0)

    def run(self, flows: Sequence[Flow]) -> list[FlowReading]:
        """Run flows at the same time.

        Flows that would exceed the budget are shortened alike; once it is used up,
        nothing is sent and nothing is read.

        Returns:
            A reading for each flow, in order.

        Raises:
            CommunicationError: If an agent falls silent, or two hosts cannot reach each
                other: it names both, their addresses, and what to check.
        """
        asked = sum(flow.max_bytes for flow in flows)
        scale = min(1.0, self.left_bytes / max(asked, 1))
        sizes = [int(flow.max_bytes * scale) for flow in flows]
        if not flows or min(sizes) < _LEAST_BURST_BYTES:
            return []
        ids = [next(self._ids) for _ in flows]
        opened = self._open(flows, sizes, ids)
        failures = [o.failures for o in opened.values()]
        if any(failures):
            self._raise_failures(*self._with_ways_back(flows, ids, failures), "failed")
        done = self._start(flows)
        self._raise_failures(flows, ids, [d.failures for d in done.values()], "broke")
        self.sent_bytes += sum(sum(d.sent_bytes.values()) for d in done.values())
        return [
            FlowReading(
                source=flow.source,
                target=flow.target,
                latency_s=opened[flow.source].latencies_s[flow_id],
                arrivals=self._arrivals(
                    flow, flow_id, opened[flow.source].latencies_s[flow_id], done
                ),
            )
            for flow, flow_id in zip(flows, ids, strict=True)
        ]

    def _open(
        self, flows: Sequence[Flow], sizes: Sequence[int], ids: Sequence[str]
    ) -> dict[int, FlowsOpened]:
        sends: dict[int, list[SendOrder]] = defaultdict(list)
        receives: dict[int, list[str]] = defaultdict(list)
        for flow, size, flow_id in zip(flows, sizes, ids, strict=True):
            target = self.clients[flow.target]
            sends[flow.source].append(
                SendOrder(
                    flow_id=flow_id,
                    target_host=target.description.address,
                    target_port=target.address.port,
                    max_bytes=size,
                    duration_s=flow.duration_s,
                )
            )
            receives[flow.target].append(flow_id)
        hosts = sorted(sends.keys() | receives.keys())
        for host in hosts:
            request = OpenFlows(
                sends=tuple(sends[host]),
                receives=tuple(receives[host]),
                timeout_s=self._timeout_s,
            )
            self.clients[host].tell(request)
        deadline_s = time.monotonic() + self._timeout_s + _REPLY_MARGIN_S
        opened = {}
        silent: CommunicationError | None = None
        for host in hosts:
            left_s = max(deadline_s - time.monotonic(), 0.05)
            try:
                opened[host] = self.clients[host].hear(FlowsOpened, left_s)
            except CommunicationError as error:
                silent = silent or error
        if silent is not None:
            raise silent
        return opened

    def _with_ways_back(
        self,
        flows: Sequence[Flow],
        ids: Sequence[str],
        failures: Sequence[tuple[FlowFailure, ...]],
    ) -> tuple[list[Flow], list[str], list[tuple[FlowFailure, ...]]]:
        """Try the other way round of the first link that failed, to say what is broken."""
        failed = {failure.flow_id for failure in itertools.chain(*failures)}
        first = next(f for f, i in zip(flows, ids, strict=True) if i in failed)
        back = replace(first, source=first.target, target=first.source)
        if any((f.source, f.target) == (back.source, back.target) for f in flows):
            return list(flows), list(ids), list(failures)
        back_id = next(self._ids)
        opened = self._open([back], [back.max_bytes], [back_id])
        return (
            [*flows, back],
            [*ids, back_id],
            [*failures, *(o.failures for o in opened.values())],
        )

    def _start(self, flows: Sequence[Flow]) -> dict[int, FlowsDone]:
        hosts = sorted({host for flow in flows for host in (flow.source, flow.target)})
        longest_s = max(flow.duration_s for flow in flows)
        timeout_s = longest_s + _SLOWEST_DRAIN_S
        start_at_s = time.time() + _LEAD_S
        for host in hosts:
            client = self.clients[host]
            client.tell(
                RunFlows(start_at_s=start_at_s + client.clock_ahead_s, timeout_s=timeout_s)
            )
        deadline_s = time.monotonic() + timeout_s + _REPLY_MARGIN_S
        done = {}
        for host in hosts:
            left_s = max(deadline_s - time.monotonic(), 0.05)
            done[host] = self.clients[host].hear(FlowsDone, left_s)
        return done

    def _arrivals(
        self, flow: Flow, flow_id: str, latency_s: float, done: Mapping[int, FlowsDone]
    ) -> list[tuple[float, int]]:
        """What arrived when, by the coordinator's clock.

        The receiver's account, unless a busy receiver let the kernel merge packets, with
        one stamp for many: then the sender's. Acknowledgements share the way back with
        the other direction's burst and may be held up by it.
        """
        host, points = flow.target, done[flow.target].arrivals[flow_id]
        acknowledged = done[flow.source].acknowledged.get(flow_id, ())
        if len(points) < min(_ENOUGH_STAMPS, len(acknowledged)):
            host, points = flow.source, acknowledged
        ahead_s = self.clients[host].clock_ahead_s
        arrivals = [(at_s - ahead_s, count) for at_s, count in points]
        # Nothing had arrived by the start. Where packets were held up on the way and then
        # came at once, only this tells that they did not come fast.
        start_s = done[flow.source].started_at_s[flow_id]
        start_s += 2 * latency_s - self.clients[flow.source].clock_ahead_s
        return [(start_s, 0), *(p for p in arrivals if p[0] > start_s)]

    def _raise_failures(
        self,
        flows: Sequence[Flow],
        ids: Sequence[str],
        failures: Sequence[tuple[FlowFailure, ...]],
        verb: str,
    ) -> None:
        reasons: dict[str, str] = {}
        for failure in itertools.chain(*failures):
            # Both ends complain; the one that could not connect knows why.
            if (
                failure.flow_id not in reasons
                or "did not connect" in reasons[failure.flow_id]
            ):
                reasons[failure.flow_id] = failure.reason
        if not reasons:
            return
        flow_of = dict(zip(ids, flows, strict=True))
        broken = {(flow_of[i].source, flow_of[i].target) for i in reasons if i in flow_of}
        flow_id = next(i for i in ids if i in reasons)
        flow = flow_of[flow_id]
        source, target = self.clients[flow.source], self.clients[flow.target]
        both = (flow.target, flow.source) in broken
        way = (
            "and neither the other way round"
            if both
            else "though the other way round works"
            if any((f.target, f.source) == (flow.source, flow.target) for f in flows)
            else "the other way round was not tried"
        )
        more = f"; {len(broken)} links {verb} in all" if len(broken) > 1 + both else ""
        msg = (
            f"the link from {source} to {target} {verb}: {reasons[flow_id]}, {way}{more}; "
            f"check firewalls (TCP to port {target.address.port} from "
            f"{source.description.address}) and that both chose an interface of the same "
            f"network ({source.description.interface} and {target.description.interface})"
        )
        raise CommunicationError(msg)
