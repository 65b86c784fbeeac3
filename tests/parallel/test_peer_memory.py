"""Runs whose workers are all lost at once, and what their nodes hold in memory then."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from example_fleets import emulated_fleet
from geartrain.checkpoint.cadence import Cadence, SaveInterval, TierCadence
from geartrain.devices.emulation.network import parse_links
from geartrain.launch import LaunchResult, LaunchSettings, launch
from geartrain.launch.node_agents import LISTING_NAME
from geartrain.launch.respawn import RespawnSettings
from geartrain.launch.settings import SilentObserver
from geartrain.parallel.resume import find_resumable
from geartrain.parallel.save_spec import PeerMemorySettings
from geartrain.telemetry import RunEvent, RunLogReader
from training_jobs import relative_error

SCRIPT = Path(__file__).parents[1] / "memory_script.py"
NUM_STEPS, DIE_AFTER = 24, 15

pytestmark = pytest.mark.root


class Watching(SilentObserver):
    def __init__(self, on_tick: Callable[[], None]) -> None:
        self.texts: list[str] = []
        self._on_tick = on_tick

    def on_notice(self, text: str) -> None:
        self.texts.append(text)

    def on_tick(self) -> None:
        self._on_tick()


@dataclass(frozen=True, kw_only=True)
class Ran:
    ended: LaunchResult
    notices: list[str]
    events: list[RunEvent]
    result: dict[str, Any]

    def resumed(self) -> list[str]:
        return [event.message for event in self.events if event.kind == "resumed"]

    def resumed_step(self) -> int:
        (text,) = self.resumed()
        found = re.search(r"goes on after step (\d+)", text)
        assert found, text
        return int(found[1])


def run(
    folder: Path,
    memory: PeerMemorySettings | None,
    *,
    die_after: int = DIE_AFTER,
    on_tick: Callable[[], None] = lambda: None,
    **options: Any,
) -> Ran:
    folder.mkdir(exist_ok=True)
    asked: dict[str, Any] = {
        "num_steps": NUM_STEPS,
        "die_after": die_after,
        "kill": options.pop("kill", 0),
        "result": str(folder / "result.json"),
    }
    observer = Watching(on_tick)
    settings = LaunchSettings(
        script=SCRIPT,
        arguments=(json.dumps(asked),),
        fleet=emulated_fleet(0.3, 0.3, 0.3),
        run_dir=folder,
        preload=("torch", "geartrain.session"),
        deterministic=True,
        peer_memory=memory,
        respawn=RespawnSettings(first_wait_s=0.1, max_wait_s=0.1),
        **({"cadence": None} | options),
    )
    ended = launch(settings, observer)
    result = folder / "result.json"
    ran = Ran(
        ended=ended,
        notices=observer.texts,
        events=list(RunLogReader(folder).new_events()),
        result=json.loads(result.read_text()) if result.exists() else {},
    )
    print(ended.message, observer.texts, ran.resumed())  # noqa: T201 - on failure
    return ran


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    return run(tmp_path_factory.mktemp("undisturbed"), None, die_after=0)


def check_as_undisturbed(ran: Ran, undisturbed: Ran) -> None:
    assert (ran.ended.outcome, ran.ended.exit_code) == ("finished", 0), ran.ended.message
    for name in ("parameters", "average", "seen", "rate"):
        assert ran.result[name] == undisturbed.result[name], name
    for step, loss in ran.result["losses"].items():
        assert loss == undisturbed.result["losses"][step]


def test_run_is_as_on_one_device(tmp_path: Path, undisturbed: Ran) -> None:
    asked: dict[str, Any] = {"num_steps": NUM_STEPS, "die_after": 0, "kill": 0}
    asked["result"] = str(tmp_path / "result.json")
    subprocess.run([sys.executable, SCRIPT, json.dumps(asked)], check=True, timeout=120)

    one = json.loads((tmp_path / "result.json").read_text())

    for name in ("parameters", "average"):
        expected = torch.tensor(one[name], dtype=torch.float64)
        found = torch.tensor(undisturbed.result[name], dtype=torch.float64)
        assert relative_error(found, expected) < 1e-5


def test_all_workers_are_lost_and_the_log_leads_to_the_last_step(
    tmp_path: Path, undisturbed: Ran
) -> None:
    rarely = PeerMemorySettings(max_cost_fraction=1e-6, max_log_cost_fraction=0.9)

    ran = run(tmp_path, rarely)

    check_as_undisturbed(ran, undisturbed)
    (text,) = ran.resumed()
    assert "logged steps" in text
    assert ran.resumed_step() == DIE_AFTER
    assert any("what the nodes hold in memory" in notice for notice in ran.notices)


@pytest.mark.slow
def test_snapshots_alone_serve_where_logging_costs_too_much(
    tmp_path: Path, undisturbed: Ran
) -> None:
    ran = run(tmp_path, PeerMemorySettings(max_log_cost_fraction=1e-9))

    check_as_undisturbed(ran, undisturbed)
    assert 0 < ran.resumed_step() <= DIE_AFTER


def test_other_hosts_have_what_was_lost_with_a_host(
    tmp_path: Path, undisturbed: Ran
) -> None:
    """One agent dies before its workers, and comes back empty."""
    killed: list[int] = []

    def kill_an_agent() -> None:
        if killed or not list(tmp_path.glob("died-*")):
            return
        for process_id in agents_of()[:1]:
            killed.append(process_id)
            subprocess.run(["kill", "-9", str(process_id)], check=False)

    links = parse_links("1Gbit", 3)

    ran = run(tmp_path, PeerMemorySettings(), on_tick=kill_an_agent, links=links)

    check_as_undisturbed(ran, undisturbed)
    assert killed
    assert 0 < ran.resumed_step() <= DIE_AFTER


def test_run_without_memory_and_saves_ends_when_all_workers_are_lost(
    tmp_path: Path,
) -> None:
    ran = run(tmp_path, None)

    assert ran.ended.outcome == "failed"
    assert not ran.resumed()
    assert not (tmp_path / LISTING_NAME).exists()


def test_killed_agent_is_started_again_and_holds_the_state_again(
    tmp_path: Path, undisturbed: Ran
) -> None:
    killed: list[int] = []

    def kill_the_agent() -> None:
        is_kept = any("kept in memory" in event.message for event in reader.new_events())
        if is_kept and not killed:
            killed.extend(agents_of()[:1])
            subprocess.run(["kill", "-9", *map(str, killed)], check=False)

    reader = RunLogReader(tmp_path)

    ran = run(tmp_path, PeerMemorySettings(), die_after=0, on_tick=kill_the_agent)

    check_as_undisturbed(ran, undisturbed)
    assert killed
    assert any("it is started again, training goes on" in text for text in ran.notices)
    assert not agents_of()


def test_saves_that_are_due_are_written_by_the_agent(
    tmp_path: Path, undisturbed: Ran
) -> None:
    often = Cadence(local=TierCadence(full=SaveInterval(every_s=0.3)))

    ran = run(tmp_path, PeerMemorySettings(), die_after=0, cadence=often)

    check_as_undisturbed(ran, undisturbed)
    by_agent = [e.message for e in ran.events if e.message.endswith("by the agent)")]
    assert by_agent, [event.message for event in ran.events]
    found = find_resumable(str(tmp_path))
    assert 0 < found.spec.step <= NUM_STEPS
    anew = run(
        tmp_path / "anew", None, die_after=0, resume=find_resumable(str(tmp_path)).spec
    )
    check_as_undisturbed(anew, undisturbed)


def agents_of() -> list[int]:
    """Processes of agents that this process has started, and that run."""
    pattern = "geartrain.checkpoint.agent.process"
    found = subprocess.run(
        ["pgrep", "-P", str(os.getpid()), "-f", pattern],
        capture_output=True,
        text=True,
        check=False,
    )
    return [int(process_id) for process_id in found.stdout.split()]
