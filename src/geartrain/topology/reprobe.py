"""Measures a few links again while all else stays as it is known."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace

from geartrain.errors import ConfigError
from geartrain.topology.agent_protocol import AgentAddress
from geartrain.topology.arrivals import RateReading
from geartrain.topology.capacities import measure_between
from geartrain.topology.instrument import Survey
from geartrain.topology.limits import ProbeLimits
from geartrain.topology.priority import raised_priority
from geartrain.topology.probe import connect_agents
from geartrain.topology.profile import Tier, Topology
from geartrain.topology.rounds import FlowRunner

_MAX_PEERS = 3


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
    # One of a kind has no other to be measured against.
    known = [kind for kind in (topology.hosts, topology.racks) if len(kind) > 1]
    tiers = {tier.tier_id: tier for kind in known for tier in kind}
    if tier_id not in tiers:
        names = ", ".join(tiers) or "none: the topology has one host"
        msg = f"{tier_id!r} has no uplink to measure; expected one of {names}"
        raise ConfigError(msg)
    return tiers[tier_id]


def _with_rates(tier: Tier, send: RateReading | None, receive: RateReading | None) -> Tier:
    return replace(
        tier,
        uplink_send_bytes_per_s=send.bytes_per_s if send else tier.uplink_send_bytes_per_s,
        uplink_receive_bytes_per_s=(
            receive.bytes_per_s if receive else tier.uplink_receive_bytes_per_s
        ),
    )
