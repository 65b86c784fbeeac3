"""Workers that are lost and come back while the others train on."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from example_fleets import emulated_fleet
from geartrain.checkpoint.cadence import Cadence
from geartrain.launch import LaunchResult, LaunchSettings, launch
from geartrain.launch.settings import SilentObserver
from geartrain.telemetry import RunEvent, RunLogReader
from returning_workers_script import returning_job
from training_jobs import relative_error, train_plainly

SCRIPT = Path(__file__).parents[1] / "returning_workers_script.py"
NUM_AFTER = 6


@dataclass(frozen=True, kw_only=True)
class Ran:
    """How a run went."""

    ended: LaunchResult
    events: list[RunEvent]
    results: dict[int, dict[str, Any]]
    """What each rank's script wrote at its end, by rank."""

    def kinds_of(self, device_id: str) -> list[str]:
        kinds = {"lost", "left", "joined"}
        found = [e for e in self.events if e.device_id == device_id and e.kind in kinds]
        return [event.kind for event in found]


def run(folder: Path, *hits: dict[str, Any], num_workers: int = 3, **more: Any) -> Ran:
    options = {
        "hits": hits,
        "folder": str(folder),
        "after_step": max(hit["step"] for hit in hits) + 1,
        "num_after": NUM_AFTER,
        "num_ranks": num_workers,
    }
    settings = LaunchSettings(
        script=SCRIPT,
        arguments=(json.dumps(options | more),),
        fleet=emulated_fleet(*[1 / num_workers] * num_workers),
        run_dir=folder,
        preload=("torch", "geartrain.session"),
        cadence=Cadence.by_steps(weights=1000, optimizer=3),
    )
    ended = launch(settings, SilentObserver())
    assert ended.exit_code == 0, (ended.message, ended.details)
    results = [json.loads(path.read_text()) for path in folder.glob("result-*.json")]
    return Ran(
        ended=ended,
        events=list(RunLogReader(folder).new_events()),
        results={result["rank"]: result for result in results},
    )


@contextmanager
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def check_as_on_one_device(ran: Ran) -> None:
    """All ranks hold the same bits, and they are those of one device up to rounding."""
    (steps,) = {result["steps"] for result in ran.results.values()}
    first, *others = [result["parameters"] for result in ran.results.values()]
    assert all(other == first for other in others)
    with one_thread():  # faster for so small a model, where others compute as well
        alone = train_plainly(returning_job(steps))
    assert relative_error(torch.tensor(first, dtype=torch.float64), alone.parameters) < 1e-9


def check_meetings(ran: Ran) -> None:
    """Who came back has read what the others found out while it was not there."""
    ranks = sorted(ran.results)
    for rank in ranks[1:]:
        known = dict(map(tuple, ran.results[ranks[0]]["metrics"]))
        own = dict(map(tuple, ran.results[rank]["metrics"]))
        shared = known.keys() & own.keys()
        assert shared
        assert all(known[step] == own[step] for step in shared)


def test_killed_worker_comes_back_with_the_same_bits(tmp_path: Path) -> None:
    ran = run(tmp_path, {"rank": 1, "step": 3, "signal": signal.SIGKILL})

    assert ran.kinds_of("emulated:1") == ["lost", "joined"]
    assert sorted(ran.results) == [0, 1, 2]
    assert ran.results[1]["first_step"] > 3
    check_as_on_one_device(ran)
    check_meetings(ran)


def test_one_that_is_just_let_in_goes_on_alone_with_the_plans_of_the_others(
    tmp_path: Path,
) -> None:
    """Nobody is left who has planned: still nothing is measured again."""
    hit = {"rank": 1, "step": 3, "signal": signal.SIGKILL}
    ran = run(tmp_path, hit, num_workers=2, kills_as_it_enters=[1])

    assert ran.kinds_of("emulated:0") == ["lost", "joined"]
    assert len([event for event in ran.events if event.kind == "profiled"]) == 1
    check_as_on_one_device(ran)


@pytest.mark.slow
def test_rank_0_comes_back_and_does_not_lead(tmp_path: Path) -> None:
    ran = run(tmp_path, {"rank": 0, "step": 3, "signal": signal.SIGKILL})

    assert ran.kinds_of("emulated:0") == ["lost", "joined"]
    assert [r for r, result in ran.results.items() if result["is_main"]] == [1]
    check_as_on_one_device(ran)
    check_meetings(ran)


@pytest.mark.slow
def test_frozen_worker_is_replaced(tmp_path: Path) -> None:
    ran = run(tmp_path, {"rank": 2, "step": 4, "signal": signal.SIGSTOP})

    assert ran.kinds_of("emulated:2") == ["lost", "joined"]
    check_as_on_one_device(ran)


@pytest.mark.slow
def test_all_but_one_may_be_lost_and_come_back(tmp_path: Path) -> None:
    hits = [{"rank": r, "step": 3 + r, "signal": signal.SIGKILL} for r in (0, 1)]
    ran = run(tmp_path, *hits)

    assert sorted(ran.results) == [0, 1, 2]
    check_as_on_one_device(ran)
    check_meetings(ran)


@pytest.mark.slow
def test_state_that_nobody_holds_any_more_comes_from_the_last_save(tmp_path: Path) -> None:
    hits = [{"rank": r, "step": 9, "signal": signal.SIGKILL} for r in range(3)]
    ran = run(tmp_path, *hits)

    (resumed,) = [event for event in ran.events if event.kind == "resumed"]
    assert 0 < resumed.step <= 9
    assert {result["first_step"] for result in ran.results.values()} == {resumed.step}
    check_as_on_one_device(ran)
