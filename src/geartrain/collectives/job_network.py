"""Where the ranks of a job are, and how their hosts are connected."""

from __future__ import annotations

import logging
import secrets
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from geartrain.errors import CommunicationError, ConfigError
from geartrain.topology.agent import AgentSettings, LinkAgent
from geartrain.topology.agent_protocol import AgentAddress
from geartrain.topology.fleet_document import read_fleet_document
from geartrain.topology.host_identity import read_host_identity
from geartrain.topology.interfaces import InterfaceChoice, choose_interface, interface_of
from geartrain.topology.local import local_topology
from geartrain.topology.probe import probe_topology
from geartrain.topology.profile import LinkProfile, Tier, Topology
from geartrain.topology.reprobe import reprobe
from geartrain.topology.with_host import with_host

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from geartrain.collectives.rendezvous import Rendezvous
    from geartrain.devices.profile import DeviceProfile

logger = logging.getLogger(__name__)

_NOMINAL_BYTES_PER_S = 125e6
_NOMINAL_LATENCY_S = 100e-6
"""A gigabit Ethernet: only equality matters where links are not measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFacts:
    """What one rank tells the others about where it runs."""

    host_id: str
    address: str
    """Of this host, as the others reach it."""
    interface: str
    device_kind: str
    collective_backends: tuple[str, ...]
    core_fraction: float | None
    """Of an emulated device; None where nothing holds it back."""
    fleet_path: str = ""
    """A fleet file that may hold the links already."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobNetwork:
    """Hosts, links, and who is where; the same on all ranks."""

    topology: Topology
    ranks: tuple[RankFacts, ...]
    """One a rank, shape (world_size,)."""

    @property
    def placement(self) -> tuple[str, ...]:
        """Host id of each rank, shape (world_size,)."""
        return tuple(facts.host_id for facts in self.ranks)

    @property
    def is_one_host(self) -> bool:
        """Whether all ranks share a host."""
        return len(set(self.placement)) == 1


def find_network(  # noqa: PLR0913 - who asks, and what is known already
    rendezvous: Rendezvous,
    device: DeviceProfile,
    *,
    peers: Sequence[str] = (),
    address: str | None = None,
    fleet_path: str = "",
    given: Topology | None = None,
    measures: bool = True,
) -> JobNetwork:
    """Find out where all ranks are, and measure the links between their hosts.

    All ranks must call it together. On a single host nothing is sent. On several, each
    host's first rank measures with the others, led by rank 0; the links that a fleet file
    holds already are taken instead where they are of the same hosts.

    Args:
        rendezvous: All ranks.
        device: This rank's.
        peers: Names or addresses that this host talks to, to choose its own address.
        address: This host's own, where it is known.
        fleet_path: A fleet file that may hold the links.
        given: The links, where rank 0's caller knows them; takes precedence.
        measures: Whether links may be measured: no two measurements are alike to the bit,
            and so no two plans made of them. Else unknown links count as equal.

    Raises:
        CommunicationError: If a host can't be reached, or two can't reach each other.
        ConfigError: If the links given are not of these hosts.
    """
    choice = _own_address(peers, address)
    own = _describe(device, choice, fleet_path)
    ranks = tuple(rendezvous.gather("place", own, RankFacts))
    if len({facts.host_id for facts in ranks}) == 1:
        names = rendezvous.member_ids
        return JobNetwork(topology=local_topology(tuple(names)), ranks=ranks)
    known = _known(ranks, given) if rendezvous.rank == 0 else _Probed()
    known = rendezvous.broadcast("known links", known, _Probed)
    if known.error:
        raise ConfigError(known.error)
    topology = known.topology
    if topology is None and not measures:
        topology = equal_links(ranks)
    return JobNetwork(
        topology=topology or _measure(rendezvous, ranks, choice, probe_topology),
        ranks=ranks,
    )


def describe_place(
    device: DeviceProfile,
    *,
    peers: Sequence[str] = (),
    address: str | None = None,
    fleet_path: str = "",
) -> RankFacts:
    """Where this process is.

    Args:
        device: Its device.
        peers: Names or addresses that it talks to, to choose its own address.
        address: Its own, where it is known.
        fleet_path: A fleet file that may hold the links.

    Raises:
        ConfigError: If the address is none of this host's.
    """
    return _describe(device, _own_address(peers, address), fleet_path)


def with_ranks(
    network: JobNetwork, added: Sequence[RankFacts], names: Sequence[str]
) -> JobNetwork:
    """The network with more ranks at its end.

    Links of hosts that were not in it count as like the slowest known until an exchange
    shows more: the others train, and nothing is measured meanwhile.

    Args:
        network: As it was found.
        added: Where the new ranks are.
        names: Of all devices, in rank order.
    """
    ranks = (*network.ranks, *added)
    known = set(network.placement)
    if len({facts.host_id for facts in ranks}) == 1:
        return JobNetwork(topology=local_topology(tuple(names)), ranks=ranks)
    if {facts.host_id for facts in ranks} == known:
        return JobNetwork(topology=network.topology, ranks=ranks)
    if network.is_one_host:
        return JobNetwork(topology=equal_links(ranks), ranks=ranks)
    topology = network.topology
    for host_id in dict.fromkeys(facts.host_id for facts in added):
        if host_id not in known:
            topology = with_host(topology, host_id)
    return JobNetwork(topology=topology, ranks=ranks)


def equal_links(ranks: Sequence[RankFacts]) -> Topology:
    """Stand in for a measurement: all hosts in one rack, on links of one rate."""
    host_ids = tuple(dict.fromkeys(facts.host_id for facts in ranks))
    hosts = tuple(
        Tier(
            kind="host",
            tier_id=host_id,
            member_ids=(),
            uplink_send_bytes_per_s=_NOMINAL_BYTES_PER_S,
            uplink_receive_bytes_per_s=_NOMINAL_BYTES_PER_S,
        )
        for host_id in host_ids
    )
    links = tuple(
        LinkProfile(
            source_id=source,
            target_id=target,
            bytes_per_s=_NOMINAL_BYTES_PER_S,
            latency_s=_NOMINAL_LATENCY_S,
        )
        for source in host_ids
        for target in host_ids
        if source != target
    )
    rack = Tier(kind="rack", tier_id="rack0", member_ids=host_ids)
    return Topology(tiers=(*hosts, rack), links=links, source="assumed")


def probe_again(
    rendezvous: Rendezvous, network: JobNetwork, suspect_ids: Sequence[str]
) -> JobNetwork:
    """Measure some uplinks anew; all ranks must call it together.

    Args:
        rendezvous: All ranks.
        network: What is known.
        suspect_ids: Hosts and racks, as ``topology.watch`` names them.

    Raises:
        CommunicationError: As ``find_network``.
    """
    own = network.ranks[rendezvous.rank]
    choice = InterfaceChoice(
        address=own.address, interface=own.interface, reason="was chosen before"
    )

    def lead(agents: Sequence[AgentAddress], token: str) -> Topology:
        host_ids = dict.fromkeys(facts.host_id for facts in network.ranks)
        by_host = dict(zip(host_ids, agents, strict=True))
        return reprobe(network.topology, by_host, token, suspect_ids)

    topology = _measure(rendezvous, network.ranks, choice, lead)
    return JobNetwork(topology=topology, ranks=network.ranks)


def _describe(device: DeviceProfile, choice: InterfaceChoice, fleet_path: str) -> RankFacts:
    return RankFacts(
        host_id=read_host_identity().host_id,
        address=choice.address,
        interface=choice.interface,
        device_kind=device.kind,
        collective_backends=device.collective_backends,
        core_fraction=device.core_fraction,
        fleet_path=fleet_path,
    )


def _own_address(peers: Sequence[str], address: str | None) -> InterfaceChoice:
    if address is None:
        return choose_interface(peers)
    interface = interface_of(address)
    if interface is None:
        msg = (
            f"this worker was told to use {address}, which is no address of its host; "
            "start again with `geartrain run`"
        )
        raise ConfigError(msg)
    return InterfaceChoice(address=address, interface=interface, reason="was given")


def _known(ranks: tuple[RankFacts, ...], given: Topology | None) -> _Probed:
    """What rank 0 was told of the links, by its caller or else by a fleet file."""
    if given is None:
        return _Probed(topology=_known_links(ranks))
    unknown = {facts.host_id for facts in ranks} - {host.tier_id for host in given.hosts}
    if unknown:
        error = (
            f"the topology given to rank 0 lacks {', '.join(sorted(unknown))}; probe the "
            "links anew (`geartrain probe --links`) or leave it out to have them measured"
        )
        return _Probed(error=error)
    return _Probed(topology=given)


def _known_links(ranks: tuple[RankFacts, ...]) -> Topology | None:
    """The links of the fleet file, where they are those of these hosts."""
    path = ranks[0].fleet_path
    if not path or not Path(path).is_file():
        return None
    topology = read_fleet_document(Path(path)).topology
    if topology is None:
        return None
    known = {host.tier_id for host in topology.hosts}
    here = {facts.host_id for facts in ranks}
    if here <= known:
        return topology
    logger.warning(
        "%s holds the links of other hosts (%s are new); measuring them",
        path,
        ", ".join(sorted(here - known)),
    )
    return None


def _measure(
    rendezvous: Rendezvous,
    ranks: tuple[RankFacts, ...],
    choice: InterfaceChoice,
    lead: Callable[[Sequence[AgentAddress], str], Topology],
) -> Topology:
    """Let each host's first rank run a link agent, and rank 0 lead the probe."""
    token = rendezvous.broadcast("probe token", secrets.token_hex(16), str)
    speaks = _first_rank_of(ranks, ranks[rendezvous.rank].host_id) == rendezvous.rank
    with ExitStack() as stack:
        agent = ""
        if speaks:
            names = tuple(
                rendezvous.member_ids[rank]
                for rank, facts in enumerate(ranks)
                if facts.host_id == ranks[rendezvous.rank].host_id
            )
            settings = AgentSettings(
                addresses=(choice.address,), device_ids=names, notes=choice.notes
            )
            agent = str(stack.enter_context(LinkAgent(token, settings)).address)
        agents = rendezvous.gather("link agent", agent, str)
        found = _Probed()
        if rendezvous.rank == 0:
            found = _lead([AgentAddress.parse(a) for a in agents if a], token, lead)
        # All keep their agents until rank 0 is done.
        found = rendezvous.broadcast("links", found, _Probed)
    if found.topology is None:
        raise CommunicationError(found.error)
    return found.topology


@dataclass(frozen=True, slots=True, kw_only=True)
class _Probed:
    """What rank 0 found, or why it could not."""

    topology: Topology | None = None
    error: str = ""


def _lead(
    agents: Sequence[AgentAddress],
    token: str,
    lead: Callable[[Sequence[AgentAddress], str], Topology],
) -> _Probed:
    started_at_s = time.monotonic()
    try:
        topology = lead(agents, token)
    except (CommunicationError, ConfigError) as error:
        return _Probed(error=f"measuring the links between hosts failed: {error}")
    logger.info(
        "measured the links of %d hosts in %.1f s",
        len(agents),
        time.monotonic() - started_at_s,
    )
    return _Probed(topology=topology)


def _first_rank_of(ranks: tuple[RankFacts, ...], host_id: str) -> int:
    return next(rank for rank, facts in enumerate(ranks) if facts.host_id == host_id)
