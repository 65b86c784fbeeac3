"""The node agents of a run: they keep its state in memory, also when all workers die.

One for each node: the host itself, or each emulated host of its own links. They come up
beside the workers, which do not wait for them, and are started again when they die, empty.
"""

from __future__ import annotations

import logging
import os
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from geartrain.checkpoint.agent.listing import AgentAccess, AgentListing, ListedAgent
from geartrain.checkpoint.agent.process import AgentProcess, start_agent
from geartrain.checkpoint.agent.settings import AgentSettings
from geartrain.devices.profile import Fleet
from geartrain.errors import ConfigError, GeartrainError
from geartrain.launch.coordinator_process import Deaths, needs_coordinator
from geartrain.launch.emulated_network import EmulatedNetwork
from geartrain.launch.settings import LaunchSettings
from geartrain.parallel.save_spec import PeerMemorySpec
from geartrain.telemetry import write_document

logger = logging.getLogger(__name__)

LISTING_NAME = "agents.json"
TOKEN_NAME = "agents.token"  # noqa: S105 - a file's name

_TOKEN_BYTES = 32
_PART_OF_MEMORY = 4
_JOIN_S = 35.0
"""Longer than an agent may take to come up."""

Command = Callable[[Sequence[str]], Sequence[str]]


@dataclass(slots=True, eq=False)
class _Node:
    """One node, and the agent that runs there now."""

    settings: AgentSettings
    command: Command
    agent: AgentProcess | None = None
    starting: threading.Thread | None = None
    deaths: Deaths = field(default_factory=Deaths)
    due_at_s: float = 0.0
    problem: str = ""


class NodeAgents:
    """Starts the agents of a run, and again when they die.

    Args:
        settings: Of the run.
        network: Its hosts.

    Raises:
        ConfigError: If the token can't be written.
    """

    def __init__(self, settings: LaunchSettings, network: EmulatedNetwork) -> None:
        self._run_dir = settings.run_dir
        self._settings = settings.peer_memory
        self._lock = threading.Lock()
        self._nodes: dict[str, _Node] = {}
        self._is_listed = True
        self._is_closed = False
        self._token = ""
        if self._settings is None or not needs_coordinator(settings):
            return
        self._run_dir.mkdir(parents=True, exist_ok=True)
        self._token = _write_token(self._run_dir / TOKEN_NAME)
        (self._run_dir / LISTING_NAME).unlink(missing_ok=True)  # of another run
        self._nodes = _nodes_of(settings, network)
        for node in self._nodes.values():
            self._start(node)

    @property
    def access(self) -> AgentAccess | None:
        """How to find them; None where the run has none."""
        if not self._nodes:
            return None
        return AgentAccess(
            listing_path=str(self._run_dir / LISTING_NAME),
            token_path=str(self._run_dir / TOKEN_NAME),
        )

    def spec_for(self, node_id: str) -> PeerMemorySpec | None:
        """What a worker of a node is told; None where the node has no agent."""
        access = self.access
        if access is None or self._settings is None or node_id not in self._nodes:
            return None
        return PeerMemorySpec(access=access, settings=self._settings, node_id=node_id)

    def process_ids(self) -> dict[str, int]:
        """Of the agents that run now, by node."""
        with self._lock:
            return {
                name: node.agent.process.pid
                for name, node in self._nodes.items()
                if node.agent is not None
            }

    def poll(self) -> list[str]:
        """Start those again that have died; returns what to tell the user."""
        notices = []
        for name, node in self._nodes.items():
            notices += self._look_after(name, node)
        if not self._is_listed:
            self._write_listing()
        return notices

    def wait_ready(self, limit_s: float) -> bool:
        """Wait until all that come up do; for those that need them at once."""
        end_s = time.monotonic() + limit_s
        for node in self._nodes.values():
            if node.starting is not None:
                node.starting.join(max(0.0, end_s - time.monotonic()))
        self.poll()
        return all(node.agent is not None for node in self._nodes.values())

    def forget(self) -> None:
        """Have them hold nothing any more: the run goes on from an older state.

        Those that ``poll`` then starts are empty; it is no death that counts.
        """
        for node in self._nodes.values():
            with self._lock:
                agent, node.agent, self._is_listed = node.agent, None, False
            if agent is not None:
                agent.close()

    def close(self) -> None:
        """End them, and remove what says where they are."""
        with self._lock:
            self._is_closed = True
        for node in self._nodes.values():
            if node.starting is not None:
                node.starting.join(_JOIN_S)
            if node.agent is not None:
                node.agent.close()
        for name in (LISTING_NAME, TOKEN_NAME):
            if self._nodes:
                (self._run_dir / name).unlink(missing_ok=True)

    # -- one agent ----------------------------------------------------------------------

    def _look_after(self, name: str, node: _Node) -> list[str]:
        now_s, notices = time.monotonic(), []
        with self._lock:
            problem, node.problem = node.problem, ""
            agent = node.agent
            is_dead = agent is not None and agent.process.poll() is not None
            if is_dead:
                node.agent, self._is_listed = None, False
            is_starting = node.starting is not None and node.starting.is_alive()
        if is_dead or problem:
            if agent is not None:
                agent.close()
                problem = f"it died with exit code {agent.process.returncode}"
            node.deaths = node.deaths.noted(now_s)
            node.due_at_s = now_s + node.deaths.wait_s
            again = "it stays away" if node.deaths.are_too_many else "it is started again"
            notices.append(
                f"the agent that keeps states in the memory of {name} was lost: {problem}; "
                f"{again}, training goes on"
            )
        is_away = node.agent is None and not is_starting
        if is_away and not node.deaths.are_too_many and now_s >= node.due_at_s:
            self._start(node)
        return notices

    def _start(self, node: _Node) -> None:
        name = f"agent-{node.settings.node_id}"
        node.starting = threading.Thread(
            target=self._bring_up, args=(node,), name=name, daemon=True
        )
        node.starting.start()

    def _bring_up(self, node: _Node) -> None:
        try:
            agent = start_agent(node.settings, self._token, node.command)
        except (GeartrainError, OSError) as error:
            with self._lock:
                node.problem = str(error)
            return
        with self._lock:
            if not self._is_closed:
                node.agent, self._is_listed = agent, False
                return
        agent.close()

    def _write_listing(self) -> None:
        with self._lock:
            agents = tuple(
                ListedAgent(
                    node_id=node.settings.node_id,
                    host_id=node.settings.host_id,
                    rack_id=node.settings.rack_id,
                    local_address=node.agent.place.local_address,
                    peer_address=node.agent.place.peer_address,
                )
                for node in self._nodes.values()
                if node.agent is not None
            )
            self._is_listed = True
        try:
            write_document(self._run_dir / LISTING_NAME, AgentListing(agents=agents))
        except ConfigError as error:  # a full disk: again with the next tick
            logger.debug("the agents are not listed: %s", error)
            self._is_listed = False


def _nodes_of(settings: LaunchSettings, network: EmulatedNetwork) -> dict[str, _Node]:
    fleet: Fleet = network.name_nodes(settings.fleet)
    first = {device.node_id: device for device in reversed(fleet.devices)}
    limit_bytes = _limit_bytes(settings, len(first))
    nodes = {}
    for node_id, device in first.items():
        host = network.host_of(device.device_id)
        nodes[node_id] = _Node(
            settings=AgentSettings(
                node_id=node_id,
                host_id=node_id,
                address="127.0.0.1" if host is None else host.address,
                memory_limit_bytes=limit_bytes,
            ),
            command=partial(network.worker_command, device.device_id),
        )
    return nodes


def _limit_bytes(settings: LaunchSettings, num_agents: int) -> int:
    assert settings.peer_memory is not None
    limit_bytes = settings.peer_memory.memory_limit_bytes
    if limit_bytes is not None:
        return limit_bytes
    total_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return total_bytes // _PART_OF_MEMORY // num_agents


def _write_token(path: Path) -> str:
    """Write a new secret that only this user may read.

    Raises:
        ConfigError: If it can't be written.
    """
    token = secrets.token_hex(_TOKEN_BYTES)
    try:
        with suppress(FileNotFoundError):
            path.unlink()
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(file, "w") as writing:
            writing.write(token)
    except OSError as error:
        msg = f"the agents' token can't be written to {path}: {error}"
        raise ConfigError(msg) from error
    return token
