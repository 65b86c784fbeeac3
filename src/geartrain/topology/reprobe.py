"""Measures a few links again while all else stays as it is known."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace

from geartrain.errors import CommunicationError, ConfigError
from geartrain.topology.agent_protocol import AgentAddress
from geartrain.topology.arrivals import RateReading, flow_rate
from geartrain.topology.capacities import measure_between
from geartrain.topology.instrument import Survey
from geartrain.topology.limits import ProbeLimits
from geartrain.topology.priority import raised_priority
from geartrain.topology.probe import connect_agents
from geartrain.topology.profile import LinkProfile, Tier, Topology
from geartrain.topology.rounds import Flow, FlowRunner

_MAX_PEERS = 3
_LINK_BYTES = 2_000_000


def probe_link(
    source: AgentAddress,
    target: AgentAddress,
    token: str,
    limits: ProbeLimits | None = None,
) -> tuple[LinkProfile, LinkProfile]:
    """Measure the path between two hosts.

    Returns:
        (source to target, target to source).

    Raises:
        CommunicationError: If they cannot be reached, or not each other, or the rate
            could not be read since one of the hosts is too busy.
        ConfigError: If both agents are on one host.
    """
    limits = limits or ProbeLimits()
    with ExitStack() as stack:
        stack.enter_context(raised_priority())
        clients = connect_agents([source, target], token, limits, stack)
        survey = Survey(
            FlowRunner(clients, limits.budget_bytes(2), limits.timeout_s), 2, limits
        )
        size = min(_LINK_BYTES, survey.instrument.left_bytes // 4)
        for _ in range(2):  # a busy moment reads too low
            for a, b in ((0, 1), (1, 0)):
                flow = Flow(
                    source=a, target=b, max_bytes=size, duration_s=limits.group_burst_s
                )
                for r in survey.run([flow]):
                    rate = flow_rate(r.arrivals)
                    survey.readings.record(r.source, r.target, rate, r.latency_s)
        names = [client.description.host_id for client in clients]
        one, two = (
            LinkProfile(
                source_id=names[a],
                target_id=names[b],
                bytes_per_s=survey.readings.rate(a, b) or _unread(names[a], names[b]),
                latency_s=survey.readings.latencies_s[a, b],
            )
            for a, b in ((0, 1), (1, 0))
        )
        return one, two


def reprobe(
    topology: Topology,
    agents: Mapping[str, AgentAddress],
    token: str,
    suspect_ids: Sequence[str],
    limits: ProbeLimits | None = None,
) -> Topology:
    """Measure the uplinks of some hosts or racks again.

    Args:
        topology: What is known.
        agents: An agent's address by host id; of the suspects and their peers at least.
        token: What the agents were started with.
        suspect_ids: Host and rack ids, as :func:`geartrain.topology.watch.observe`
            names them.
        limits: What it may cost.

    Returns:
        The topology with those tiers' rates replaced.

    Raises:
        ConfigError: If an id is unknown, or a host that is needed has no agent.
        CommunicationError: As :func:`geartrain.topology.probe.probe_topology`.
    """
    limits = limits or ProbeLimits()
    suspects = {tier_id: _tier(topology, tier_id) for tier_id in dict.fromkeys(suspect_ids)}
    needed = {
        host
        for tier in suspects.values()
        for host in (*_inside(tier), *_peers(topology, tier))
    }
    hosts = [host.tier_id for host in topology.hosts if host.tier_id in needed]
    missing = [host for host in hosts if host not in agents]
    if missing:
        msg = f"no link agent is known for {', '.join(missing)}; start one there"
        raise ConfigError(msg)
    changed: dict[str, Tier] = {}
    with ExitStack() as stack:
        addresses = [agents[host] for host in hosts]
        stack.enter_context(raised_priority())
        clients = connect_agents(addresses, token, limits, stack)
        runner = FlowRunner(clients, limits.budget_bytes(len(hosts)), limits.timeout_s)
        survey = Survey(runner, len(hosts), limits)
        position = {host: index for index, host in enumerate(hosts)}
        for tier_id, tier in suspects.items():
            inside = [position[h] for h in _inside(tier)]
            peers = [position[h] for h in _peers(topology, tier)]
            readings = measure_between(survey, inside, peers)
            changed[tier_id] = _with_rates(tier, *readings)
        sent = runner.sent_bytes
        probe_s = survey.elapsed_s
    return replace(
        topology,
        tiers=tuple(changed.get(tier.tier_id, tier) for tier in topology.tiers),
        measured_at_s=time.time(),
        probe_s=probe_s,
        probe_bytes=sent,
    )


def _inside(tier: Tier) -> tuple[str, ...]:
    return (tier.tier_id,) if tier.kind == "host" else tier.member_ids


def _peers(topology: Topology, tier: Tier) -> tuple[str, ...]:
    """Who helps: of a host its rack, of a rack the rack with the fastest uplink."""
    if tier.kind == "host":
        rack = [h for h in topology.rack_of(tier.tier_id).member_ids if h != tier.tier_id]
        others = [
            h.tier_id for h in topology.hosts if h.tier_id not in {*rack, tier.tier_id}
        ]
        return tuple((rack or others)[:_MAX_PEERS])
    racks = [rack for rack in topology.racks if rack.tier_id != tier.tier_id]
    best = max(racks, key=lambda r: r.uplink_receive_bytes_per_s or 0.0)
    return best.member_ids


def _tier(topology: Topology, tier_id: str) -> Tier:
    for tier in topology.tiers:
        alone = tier.kind == "rack" and len(topology.racks) == 1
        if tier.tier_id == tier_id and tier.kind != "fabric" and not alone:
            return tier
    known = ", ".join(t.tier_id for t in topology.tiers if t.kind != "fabric")
    msg = f"{tier_id!r} has no uplink to measure; expected one of {known}"
    raise ConfigError(msg)


def _with_rates(tier: Tier, send: RateReading | None, receive: RateReading | None) -> Tier:
    return replace(
        tier,
        uplink_send_bytes_per_s=send.bytes_per_s if send else tier.uplink_send_bytes_per_s,
        uplink_receive_bytes_per_s=(
            receive.bytes_per_s if receive else tier.uplink_receive_bytes_per_s
        ),
    )


def _unread(source: str, target: str) -> float:
    msg = (
        f"the rate from {source} to {target} could not be read: too little arrived, or too "
        "unevenly; probe again when the hosts are less busy"
    )
    raise CommunicationError(msg)
