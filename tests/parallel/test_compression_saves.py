"""A lead that is lost over a save of what compressed exchanges owe."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch

import geartrain as gt
from geartrain.checkpoint import snapshot
from geartrain.checkpoint.cadence import Cadence, SaveInterval, TierCadence
from geartrain.checkpoint.chunk_store import FileStore
from geartrain.checkpoint.manifest import step_of_name
from geartrain.checkpoint.snapshot import load_snapshot, read_manifest
from geartrain.checkpoint.versions import list_versions
from geartrain.parallel import training_saves
from geartrain.parallel.residual_state import ResidualState
from geartrain.parallel.resume import find_resumable
from geartrain.parallel.save_spec import SaveSpec
from local_ranks import run_ranks
from parallel.two_racks import Report, Training, held, pretend, run_steps, train, whole
from training_jobs import largest_difference
from worker_sessions import worker_session

NUM_STEPS = 9
SAVED_AT = 5


def die(*_arguments: Any) -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


def kill_at(place: str) -> None:
    """Have this process die at a place of its next save."""
    state, whole, folders = (ResidualState, training_saves, snapshot)
    targets: dict[str, tuple[Any, str]] = {
        "collecting": (state, "collect"),
        "freezing": (whole, "whole_state"),
        "writing": (folders, "replace_directory"),
    }
    holder, name = targets[place]
    setattr(holder, name, die)


def train_on(
    rank: int, world_size: int, folder: Path, training: Training, place: str | None
) -> Report:
    """For run_ranks: rank 0 dies at a place of its save, if at all."""
    pretend((1,) * world_size)
    if rank == 0 and place is not None:
        kill_at(place)
    session = worker_session(rank, world_size, folder, deterministic=True, on_loss="finish")
    return run_steps(session, training, rank)


def check_goes_on(path: Path, survivors: list[Report], folder: Path) -> None:
    """What the survivors owed was saved, and two ranks go on from it much as they did."""
    step = read_manifest(path).metadata["step"]
    assert step in {SAVED_AT, SAVED_AT + 1}
    saved: Any = load_snapshot(path)["residuals"]
    owed = whole([survivor.seen[step] for survivor in survivors])
    assert float(owed.abs().max()) > 0
    torch.testing.assert_close(whole([saved["pieces"]]), owed, rtol=0, atol=1e-6)
    folder.mkdir()
    training = Training(num_steps=NUM_STEPS, load_from=path)
    again = run_ranks(train_on, 2, folder, training, None)
    for resumed in again:
        assert len(resumed.losses) == NUM_STEPS - step
        assert largest_difference(resumed.losses, survivors[0].losses[step:]) < 0.001


@pytest.mark.parametrize(
    "place", ["collecting", pytest.param("writing", marks=pytest.mark.slow)]
)
def test_a_save_that_its_lead_was_lost_over_is_made_by_the_next(
    tmp_path: Path, place: str
) -> None:
    path = tmp_path / "saved"
    training = Training(num_steps=NUM_STEPS, save_at={SAVED_AT: path}, observe=held)
    (tmp_path / "run").mkdir()

    results = run_ranks(train_on, 3, tmp_path / "run", training, place, may_die=[0])

    survivors = results[1:]
    assert torch.equal(survivors[0].parameters, survivors[1].parameters)
    check_goes_on(path, survivors, tmp_path / "again")
    exact = run_ranks(
        train, 3, Training(racks=(1, 1, 1), num_steps=NUM_STEPS, compression=None)
    )
    assert largest_difference(survivors[0].losses, exact[0].losses) < 0.02


def train_in_tiers(
    rank: int, world_size: int, folder: Path, place: str
) -> tuple[Report, bool]:
    """For run_ranks: the state is saved every third step; rank 0 dies over it."""
    pretend((1,) * world_size)
    if rank == 0:
        kill_at(place)
    every = TierCadence(full=SaveInterval(every_steps=3), weights=None)
    saves = SaveSpec(
        directory=str(folder / "checkpoints"), cadence=Cadence(local=every, durable=every)
    )
    session: gt.Session = worker_session(
        rank, world_size, folder, deterministic=True, on_loss="finish", saves=saves
    )
    report = run_steps(session, Training(num_steps=NUM_STEPS), rank)
    return report, session.is_main


@pytest.mark.parametrize(
    "place", ["collecting", pytest.param("freezing", marks=pytest.mark.slow)]
)
def test_the_next_lead_saves_beside_the_training(tmp_path: Path, place: str) -> None:
    results = run_ranks(train_in_tiers, 3, tmp_path, place, may_die=[0])

    assert [is_main for _, is_main in results[1:]] == [True, False]
    (first, _), (second, _) = results[1:]
    assert torch.equal(first.parameters, second.parameters)
    found = find_resumable(str(tmp_path))
    assert found.spec.step in {6, 9}
    steps = {
        step_of_name(name) for name in list_versions(FileStore(tmp_path / "checkpoints"))
    }
    assert steps <= {3, 4, 6, 9}  # 4: what the lead before owed, made up for
