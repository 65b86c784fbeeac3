"""The agents of a run as the launcher keeps them."""

from __future__ import annotations

import os
import select
import signal
import stat
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from example_fleets import cpu_fleet
from geartrain.checkpoint.agent.listing import AgentAccess
from geartrain.checkpoint.agent.recovery import RecoverySource
from geartrain.errors import CheckpointError, ConfigError
from geartrain.launch import LaunchSettings
from geartrain.launch.emulated_network import EmulatedNetwork
from geartrain.launch.node_agents import LISTING_NAME, TOKEN_NAME, NodeAgents
from geartrain.launch.restoring import choose, find_in_memory
from geartrain.parallel.resume import Resumable
from geartrain.parallel.save_spec import (
    MemorySource,
    PeerMemorySettings,
    ResumeSpec,
)

LIMIT_S = 60.0


@pytest.fixture
def settings(tmp_path: Path) -> LaunchSettings:
    script = tmp_path / "train.py"
    script.touch()
    return LaunchSettings(script=script, fleet=cpu_fleet(3), run_dir=tmp_path / "run")


@pytest.fixture
def agents(settings: LaunchSettings) -> Iterator[NodeAgents]:
    agents = NodeAgents(settings, EmulatedNetwork(settings))
    yield agents
    agents.close()


def wait_until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline_s, "it did not come to that in time"
        select.select([], [], [], 0.01)


def node_of(settings: LaunchSettings) -> str:
    return settings.fleet.devices[0].node_id


def access_of(agents: NodeAgents) -> AgentAccess:
    assert agents.access is not None
    return agents.access


def test_one_agent_a_node_is_listed_with_a_secret_token(
    agents: NodeAgents, settings: LaunchSettings
) -> None:
    assert agents.wait_ready(LIMIT_S)

    access = access_of(agents)
    spec = agents.spec_for(node_of(settings))
    (agent,) = access.read_listing().agents
    assert agent.node_id == node_of(settings)
    assert spec is not None
    assert (spec.access, spec.node_id) == (access, agent.node_id)
    assert agents.spec_for("elsewhere") is None
    assert stat.S_IMODE(Path(access.token_path).stat().st_mode) == 0o600
    with pytest.raises(CheckpointError, match="nobody holds a snapshot"):
        access.open_recovery().find_whole()
    assert find_in_memory(agents, EmulatedNetwork(settings)) is None


def test_killed_agent_comes_back_at_another_place(agents: NodeAgents) -> None:
    assert agents.wait_ready(LIMIT_S)
    access = access_of(agents)
    before = access.read_listing()
    (process_id,) = agents.process_ids().values()
    os.kill(process_id, signal.SIGKILL)
    told: list[str] = []

    def is_back() -> bool:
        told.extend(agents.poll())
        agents_now = access.read_listing().agents
        return bool(agents_now) and agents_now != before.agents

    wait_until(is_back)

    (notice,) = told
    assert "-9; it is started again, training goes on" in notice


def test_agents_that_forget_are_no_deaths(agents: NodeAgents) -> None:
    assert agents.wait_ready(LIMIT_S)
    (before,) = agents.process_ids().values()

    agents.forget()

    assert agents.poll() == []
    assert agents.wait_ready(LIMIT_S)
    (after,) = agents.process_ids().values()
    assert after != before


def test_nothing_is_left_behind(settings: LaunchSettings) -> None:
    agents = NodeAgents(settings, EmulatedNetwork(settings))
    assert agents.wait_ready(LIMIT_S)
    (process_id,) = agents.process_ids().values()

    agents.close()

    with pytest.raises(ProcessLookupError):
        os.kill(process_id, 0)
    assert not (settings.run_dir / LISTING_NAME).exists()
    assert not (settings.run_dir / TOKEN_NAME).exists()


def test_agents_may_be_closed_before_they_are_up(settings: LaunchSettings) -> None:
    agents = NodeAgents(settings, EmulatedNetwork(settings))

    agents.close()

    assert agents.process_ids() == {} or all(
        not Path(f"/proc/{process_id}").exists()
        for process_id in agents.process_ids().values()
    )


@pytest.mark.parametrize(
    "changed",
    [{"peer_memory": None}, {"on_loss": "stop"}, {"fleet": cpu_fleet(1)}],
    ids=["not wanted", "nobody goes on", "one device"],
)
def test_runs_that_can_not_use_agents_have_none(
    settings: LaunchSettings, changed: dict[str, object]
) -> None:
    settings = replace(settings, **changed)  # type: ignore[arg-type]  # as parametrized

    agents = NodeAgents(settings, EmulatedNetwork(settings))

    assert agents.access is None
    assert agents.spec_for(node_of(settings)) is None
    agents.close()


@pytest.mark.parametrize(
    "wrong",
    [{"num_copies": -1}, {"max_cost_fraction": 0.0}, {"memory_limit_bytes": 0}],
)
def test_impossible_settings_are_refused(wrong: dict[str, float]) -> None:
    (name,) = wrong
    with pytest.raises(ConfigError, match=name):
        PeerMemorySettings(**wrong)  # type: ignore[arg-type]  # wrong on purpose


# -- what a run goes on from ---------------------------------------------------------------


def in_memory(step: int) -> MemorySource:
    source = RecoverySource(
        base_step=step, base_lineage="l", step=step, lineage="l", num_members=2
    )
    return MemorySource(access=AgentAccess(listing_path="l", token_path="t"), source=source)


def on_disk(step: int) -> Resumable:
    spec = ResumeSpec(stores=("checkpoints",), version="v", step=step)
    return Resumable(spec=spec, created_at_s=1.0, config={})


def test_memory_serves_where_it_is_not_older_and_disk_stands_by() -> None:
    chosen = choose(in_memory(7), on_disk(5))

    assert chosen is not None
    assert (chosen.memory, chosen.step) == (in_memory(7), 7)
    assert chosen.stores == ("checkpoints",)


def test_disk_serves_where_it_is_newer_or_alone() -> None:
    assert choose(in_memory(3), on_disk(5)) == on_disk(5).spec
    assert choose(None, on_disk(5)) == on_disk(5).spec


def test_memory_serves_alone_too() -> None:
    chosen = choose(in_memory(7), None)

    assert chosen is not None
    assert (chosen.step, chosen.stores, chosen.snapshot) == (7, (), None)
    assert choose(None, None) is None
