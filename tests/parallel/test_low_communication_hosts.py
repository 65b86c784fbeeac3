"""Local SGD and DiLoCo between racks, in a codec, and after a lost device."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import torch

import geartrain as gt
from geartrain.parallel.low_communication import DiLoCo, LocalSGD
from local_ranks import run_ranks
from parallel.two_racks import Training, pretend, set_up_on, train
from small_models import mean_cross_entropy
from training_jobs import Job, train_by_session
from worker_sessions import worker_session

NUM_STEPS = 20


def over_racks(compression: str | None, algorithm: Any) -> list[Any]:
    training = Training(
        racks=(1, 1),
        compression=compression,
        num_steps=NUM_STEPS,
        options={"algorithm": algorithm},
    )
    return run_ranks(train, 2, training)


def test_movements_between_racks_travel_in_the_codec_asked_for() -> None:
    algorithm = DiLoCo(sync_every=5, fragments=2)

    plain = over_racks(None, algorithm)
    coded = over_racks("int8", algorithm)

    for reports in (plain, coded):
        assert reports[0].losses == reports[1].losses
    difference = (coded[0].parameters - plain[0].parameters).norm()
    assert 0 < difference < 0.02 * plain[0].parameters.norm()
    assert coded[0].held_out_loss < 1.02 * plain[0].held_out_loss


def train_and_lose(rank: int, world_size: int, folder: Path) -> tuple[int, torch.Tensor]:
    """Rank 1 is killed in its seventh step, in the middle of a round."""
    calls = 0

    def loss_fn(output: Any, batch: Any) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if rank == 1 and calls == 7:
            os.kill(os.getpid(), signal.SIGKILL)
        return mean_cross_entropy(output, batch)

    session = worker_session(
        rank, world_size, folder, deterministic=True, on_loss="continue"
    )
    options = {"algorithm": LocalSGD(sync_every=4)}
    job = Job(num_steps=12, loss_fn=loss_fn, options=options)
    result = train_by_session(job, session)
    return len(result.losses), result.parameters


def test_those_left_after_a_loss_go_on_with_one_model(tmp_path: Path) -> None:
    results = run_ranks(train_and_lose, 3, tmp_path, may_die=[1])

    # The twelfth step ends a round of four.
    assert results[0][0] == results[2][0] == 12
    assert torch.equal(results[0][1], results[2][1])


def plan_by_measurement(rank: int, world_size: int) -> list[tuple[float, Any]]:
    """What the plan counts for an exchange a step, and the links that it counts with."""
    found = []
    for algorithm in ("exact", DiLoCo(sync_every=50)):
        training = Training(compression=None, options={"algorithm": algorithm})
        pretend(training.racks)
        session = gt.Session()
        loader, _ = set_up_on(session, training)
        session.step(next(iter(loader)))
        assert session._trainer is not None
        profile = session._trainer.director.keeper.profile
        found.append((profile.exchange.all_devices_s, profile.network))
        session.close()
    return found


def test_plans_spread_an_average_over_its_steps() -> None:
    (exact_s, links), (spread_s, no_links) = run_ranks(plan_by_measurement, 2)[0]

    assert links is not None
    assert no_links is None  # no gradient hides behind backward
    assert 0 < spread_s < 0.2 * exact_s
