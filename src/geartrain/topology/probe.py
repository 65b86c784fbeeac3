"""The coordinator: from the addresses of all hosts' agents to a topology."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace

from geartrain.errors import CommunicationError, ConfigError
from geartrain.topology.agent_client import AgentClient
from geartrain.topology.agent_protocol import AgentAddress, Description
from geartrain.topology.assembly import Findings, assemble
from geartrain.topology.capacities import measure_nics, measure_uplinks
from geartrain.topology.instrument import Instrument, Survey
from geartrain.topology.labels import (
    Labels,
    labels_from_hostnames,
    labels_from_kubernetes,
)
from geartrain.topology.landmarks import survey_by_landmarks
from geartrain.topology.limits import OnProgress, ProbeLimits, ProbeProgress
from geartrain.topology.pair_survey import survey_all_pairs
from geartrain.topology.priority import raised_priority
from geartrain.topology.profile import Topology
from geartrain.topology.rounds import FlowRunner
from geartrain.topology.verification import merge_alike, name_racks, split_by_labels

__all__ = ["ProbeLimits", "ProbeProgress", "probe_topology", "survey_network"]

_MAX_THREADS = 32
_MOST_NAMES = 8


def probe_topology(
    agents: Sequence[AgentAddress],
    token: str,
    labels: Labels | None = None,
    on_progress: OnProgress | None = None,
    limits: ProbeLimits | None = None,
) -> Topology:
    """Measure all links between hosts, and find the racks.

    Args:
        agents: One a host; the topology keeps their order.
        token: What the agents were started with.
        labels: What is said about racks; None reads host names and Kubernetes labels.
        on_progress: Called after every step.
        limits: What the probe may send and how long it waits.

    Returns:
        Hosts, racks, rates in each direction, latencies, and notes on what is uncertain
        or was overruled.

    Raises:
        CommunicationError: If a host cannot be reached, or two cannot reach each other,
            or one falls silent: it names them, their addresses, and what to check.
        ConfigError: If two agents are on one host, or some listen on IPv4 and others on
            IPv6, or there is none.
    """
    limits = limits or ProbeLimits()
    with ExitStack() as stack:
        stack.enter_context(raised_priority())
        clients = connect_agents(agents, token, limits, stack)
        runner = FlowRunner(clients, limits.budget_bytes(len(clients)), limits.timeout_s)
        machines = [client.description.boot_id for client in clients]
        survey = Survey(runner, len(clients), limits, on_progress, machines)
        survey.tell("connect", len(clients), len(clients))
        memory = _measure_memory(clients, limits)
        survey.tell("memory", len(clients), len(clients))
        hosts = [client.description for client in clients]
        return _finish(survey, hosts, memory, labels)


def survey_network(
    instrument: Instrument,
    hosts: Sequence[Description],
    labels: Labels | None = None,
    on_progress: OnProgress | None = None,
    limits: ProbeLimits | None = None,
) -> Topology:
    """Do the same with any instrument: a simulated network, say."""
    machines = [host.boot_id for host in hosts]
    survey = Survey(instrument, len(hosts), limits or ProbeLimits(), on_progress, machines)
    return _finish(survey, hosts, [None] * len(hosts), labels)


def connect_agents(
    agents: Sequence[AgentAddress], token: str, limits: ProbeLimits, stack: ExitStack
) -> list[AgentClient]:
    """Connect to all agents at once; the stack closes the connections.

    Raises:
        CommunicationError: For the first agent, in order, that cannot be reached.
        ConfigError: If two of them are on one host, or some listen on IPv4 and others on
            IPv6, or there is none.
    """
    if not agents:
        msg = "no link agents to probe; start one on each host and give their addresses"
        raise ConfigError(msg)

    def connect(address: AgentAddress) -> AgentClient | CommunicationError:
        try:
            return AgentClient(address, token, limits.timeout_s)
        except CommunicationError as error:
            return error

    with ThreadPoolExecutor(min(len(agents), _MAX_THREADS)) as pool:
        found = list(pool.map(connect, agents))
    clients = []
    for client in found:
        if isinstance(client, AgentClient):
            stack.callback(client.close)
            clients.append(client)
    failures = [f for f in found if isinstance(f, CommunicationError)]
    if failures:
        more = f" ({len(failures)} of {len(agents)} agents failed)" if failures[1:] else ""
        msg = f"{failures[0]}{more}"
        raise CommunicationError(msg) from failures[0]
    host_id, count = Counter(c.description.host_id for c in clients).most_common(1)[0]
    if count > 1:
        twice = [str(c.address) for c in clients if c.description.host_id == host_id]
        msg = (
            f"{' and '.join(twice)} are agents on one host, {host_id}; start one agent a "
            "host (the same boot id and network namespace is the same host)"
        )
        raise ConfigError(msg)
    _refuse_two_families(clients)
    return clients


def _refuse_two_families(clients: Sequence[AgentClient]) -> None:
    """Refuse hosts that could not connect to each other, before anything is sent."""
    named = {
        family: ", ".join(str(c) for c in clients if (":" in c.description.address) is six)
        for family, six in (("IPv4", False), ("IPv6", True))
    }
    if all(named.values()):
        msg = (
            f"{named['IPv4']} listen on IPv4, {named['IPv6']} on IPv6, so they cannot "
            "reach each other; give addresses of one family for all agents"
        )
        raise ConfigError(msg)


def _measure_memory(
    clients: Sequence[AgentClient], limits: ProbeLimits
) -> list[float | None]:
    """Time each machine's memory once: containers of one machine share it."""
    rates: dict[str, float] = {}
    for client in clients if limits.memory_bytes else ():
        boot_id = client.description.boot_id
        if boot_id not in rates:
            rates[boot_id] = client.measure_memory(limits.memory_bytes)
    return [rates.get(client.description.boot_id) for client in clients]


def _finish(
    survey: Survey,
    hosts: Sequence[Description],
    memory: Sequence[float | None],
    labels: Labels | None,
) -> Topology:
    labels = labels or _own_labels(hosts)
    said = [labels.rack_of((h.host_id, h.name, h.address)) for h in hosts]
    survey.notes += _unmatched(labels, hosts)
    if len(hosts) > survey.limits.landmarks_above:
        racks = survey_by_landmarks(survey, said)
    else:
        racks = survey_all_pairs(survey, said)
    size = survey.test_bytes()
    racks = merge_alike(survey, racks, size)
    racks = split_by_labels(survey, racks, said, labels.source, size)
    nics = measure_nics(survey, racks)
    uplinks = measure_uplinks(survey, racks)
    names = name_racks(survey, racks, said, [h.host_id for h in hosts], labels.source)
    found = Findings(
        racks=racks,
        rack_names=names,
        nics=nics,
        uplinks=uplinks,
        memory_bytes_per_s=memory,
    )
    return assemble(survey, hosts, found)


def _unmatched(labels: Labels, hosts: Sequence[Description]) -> list[str]:
    """A note on labels that name no host of this probe, which may be misspelt."""
    known = {
        part
        for host in hosts
        for name in (host.host_id, host.name, host.address)
        for part in (name, name.partition(".")[0])
    }
    unknown = sorted(set(labels.rack_by_host) - known)
    if not unknown:
        return []
    names = ", ".join(unknown[:_MOST_NAMES]) + (", ..." if unknown[_MOST_NAMES:] else "")
    return [f"{labels.source} names hosts that are not in this probe: {names}"]


def _own_labels(hosts: Sequence[Description]) -> Labels:
    node_labels: Mapping[str, dict[str, str]] = {h.host_id: h.labels for h in hosts}
    from_kubernetes = labels_from_kubernetes(node_labels)
    if from_kubernetes.rack_by_host:
        return from_kubernetes
    from_names = labels_from_hostnames([host.name for host in hosts])
    # By host id: containers may bear the name of the machine they share.
    by_id = {
        host.host_id: rack
        for host in hosts
        if (rack := from_names.rack_of([host.name])) is not None
    }
    return replace(from_names, rack_by_host=by_id)
