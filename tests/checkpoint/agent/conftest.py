"""Three agents in this process, each of a pretended host of its own."""

from collections.abc import Iterator

import pytest

from geartrain.checkpoint.agent.server import AgentServer
from node_agents import TOKEN, agent_settings


@pytest.fixture
def servers() -> Iterator[list[AgentServer]]:
    started = [AgentServer(agent_settings(index), TOKEN) for index in range(3)]
    yield started
    for server in started:
        server.close()
