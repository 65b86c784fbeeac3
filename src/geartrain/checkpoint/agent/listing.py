"""Where the agents of a run are reached: a file that says so, and callers for all.

The file is written anew when an agent was started again, so that whoever lost it finds
its successor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from geartrain.checkpoint.agent.caller import AgentCaller
from geartrain.checkpoint.agent.messages import PeerAddress
from geartrain.checkpoint.agent.recovery import Recovery
from geartrain.errors import CheckpointError, CommunicationError, ConfigError
from geartrain.telemetry import read_document


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedAgent:
    """One node's agent."""

    node_id: str
    host_id: str
    """Failure domain: nodes with the same one are lost together."""
    rack_id: str = ""
    local_address: str
    """For trainers of the node."""
    peer_address: str
    """For all others: ``HOST:PORT``."""

    @property
    def as_peer(self) -> PeerAddress:
        """As other agents are told of it."""
        return PeerAddress(
            node_id=self.node_id,
            host_id=self.host_id,
            rack_id=self.rack_id,
            address=self.peer_address,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentListing:
    """All agents of a run that run now."""

    agents: tuple[ListedAgent, ...]
    schema_version: int = 1

    def of_node(self, node_id: str) -> ListedAgent | None:
        """The agent of a node; None where it has none."""
        found = (agent for agent in self.agents if agent.node_id == node_id)
        return next(found, None)

    @property
    def num_hosts(self) -> int:
        """Failure domains that have one."""
        return len({agent.host_id for agent in self.agents})


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentAccess:
    """How a process finds the agents of its run."""

    listing_path: str
    """An ``AgentListing``; it may come later, and change."""
    token_path: str
    """Mode 0600; what agents ask for."""

    def read_listing(self) -> AgentListing:
        """Who there is now.

        Raises:
            CheckpointError: If that is not known.
        """
        try:
            return read_document(Path(self.listing_path), AgentListing)
        except ConfigError as error:
            msg = f"it is not known where the agents are ({error}); restore from disk"
            raise CheckpointError(msg) from error

    def read_token(self) -> str:
        """What agents ask for.

        Raises:
            CheckpointError: If it can't be read.
        """
        try:
            return Path(self.token_path).read_text().strip()
        except OSError as error:
            msg = f"the agents' token can't be read ({error}); restore from disk"
            raise CheckpointError(msg) from error

    def open_recovery(self, first: str = "") -> Recovery:
        """Ask all agents what they hold.

        Args:
            first: The node whose agent is asked first, being the nearest.

        Raises:
            CheckpointError: If it is not known where they are.
        """
        agents = sorted(self.read_listing().agents, key=lambda one: one.node_id != first)
        return ask_agents(agents, self.read_token())


def ask_agents(agents: Sequence[ListedAgent], token: str) -> Recovery:
    """Ask agents what they hold; those that can't be reached are named in errors.

    Args:
        agents: The nearest first.
        token: What they ask for.
    """
    callers, problems = [], []
    for agent in agents:
        try:
            callers.append(AgentCaller.connect(agent.peer_address, token, agent.node_id))
        except CommunicationError as error:
            problems.append(str(error))
    return Recovery(callers, problems)
