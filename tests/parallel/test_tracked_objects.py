"""What a script keeps beside its model is saved, restored, and given to who joins."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.optim.swa_utils import AveragedModel

import geartrain as gt
from geartrain.checkpoint.cadence import Cadence, SaveInterval, TierCadence
from geartrain.errors import CheckpointError, ConfigError
from geartrain.parallel.resume import find_resumable
from geartrain.parallel.save_spec import SaveSpec
from geartrain.parallel.tracked_objects import TrackedObjects
from geartrain.planner import Plan
from local_ranks import run_ranks
from small_models import plan_of
from training_jobs import Job, flat_parameters, make_adamw
from worker_sessions import worker_session

NUM_STEPS = 8
SAVED_AT = 5
DECAY = 0.75


class Tally:
    """A metric of the user's own."""

    def __init__(self) -> None:
        self.counts = torch.zeros(3, dtype=torch.int64)
        self.names = ["a"]

    def state_dict(self) -> dict[str, Any]:
        return {"counts": self.counts, "names": self.names}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.counts, self.names = state["counts"], list(state["names"])


class Remembering:
    """Holds whatever it is given."""

    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


def averaged(model: torch.nn.Module) -> AveragedModel:
    def average(old: torch.Tensor, new: torch.Tensor, _count: Any) -> torch.Tensor:
        return DECAY * old + (1 - DECAY) * new

    return AveragedModel(model, avg_fn=average)


def train(
    session: gt.Session, *, load_from: Path | None = None, save_to: Path | None = None
) -> dict[str, Any]:
    """Train with an average of the weights and a tally."""
    job = Job(make_optimizer=make_adamw)
    model = job.model()
    optimizer = job.make_optimizer(model)
    tally = Tally()
    session.track(tally=tally)  # before setup
    session.setup(model, optimizer, loss_fn=job.loss_fn)
    ema = averaged(model)
    session.track(ema=ema)  # and after it

    def update() -> None:
        ema.update_parameters(model)
        tally.counts[session.step_index % 3] += 1

    session.after_step(update)
    loader = session.setup_dataloader(job.data(), global_batch_size=job.batch_size)
    if load_from is not None:
        session.load(load_from)
    first = session.step_index
    while session.step_index < NUM_STEPS:
        for batch in loader:
            session.step(batch)
            if session.step_index == SAVED_AT and save_to is not None:
                session.save(save_to)
            if session.step_index == NUM_STEPS:
                break
    session.close()
    return {
        "first": first,
        "weights": flat_parameters(model),
        "ema": flat_parameters(ema),
        "num_averaged": int(ema.n_averaged),
        "counts": tally.counts.tolist(),
    }


def train_and_save(rank: int, world_size: int, path: Path, plan: Plan) -> dict[str, Any]:
    del rank, world_size
    return train(gt.Session(plan=plan), save_to=path)


def load_and_train(rank: int, world_size: int, path: Path, plan: Plan) -> dict[str, Any]:
    del rank, world_size
    return train(gt.Session(plan=plan), load_from=path)


def train_with_tiers(
    rank: int, world_size: int, folder: Path, resume_from: str | None
) -> dict[str, Any]:
    every = TierCadence(full=SaveInterval(every_steps=SAVED_AT), weights=None)
    return train(
        worker_session(
            rank,
            world_size,
            folder,
            deterministic=True,
            saves=SaveSpec(
                directory=str(folder / "checkpoints"),
                cadence=Cadence(local=every, durable=every),
            ),
            resume=find_resumable(resume_from).spec if resume_from else None,
        )
    )


def assert_same(resumed: dict[str, Any], whole: dict[str, Any]) -> None:
    assert resumed["first"] == SAVED_AT
    assert torch.equal(resumed["weights"], whole["weights"])
    assert torch.equal(resumed["ema"], whole["ema"])
    assert resumed["num_averaged"] == whole["num_averaged"] == NUM_STEPS
    assert resumed["counts"] == whole["counts"]
    assert sum(whole["counts"]) == NUM_STEPS
    assert not torch.equal(whole["ema"], whole["weights"])


def test_averages_and_metrics_go_on_where_they_were_loaded(tmp_path: Path) -> None:
    path, plan = tmp_path / "snapshot", plan_of([7, 5], [4, 3])

    whole = run_ranks(train_and_save, 2, path, plan)
    resumed = run_ranks(load_and_train, 2, path, plan)

    for before, after in zip(whole, resumed, strict=True):
        assert_same(after, before)
    weights = load_file(path / "ema.safetensors")
    assert int(weights["n_averaged"]) == SAVED_AT


def test_averages_and_metrics_go_on_where_a_run_is_resumed(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    second.mkdir()

    whole = run_ranks(train_with_tiers, 2, first, None)
    resumed = run_ranks(train_with_tiers, 2, second, str(first))

    for before, after in zip(whole, resumed, strict=True):
        assert_same(after, before)


def test_a_state_waits_for_the_object_that_is_named_later() -> None:
    saved = TrackedObjects()
    saved.add({"tally": Remembering({"counts": torch.arange(3)})})
    tracked, later = TrackedObjects(), Remembering({})

    tracked.restore({"model": {}, **saved.state_dicts()})
    assert tracked.state_dicts().keys() == {"tally"}  # given on, were a device to join now
    tracked.add({"tally": later})

    assert later.state["counts"].tolist() == [0, 1, 2]
    assert tracked.state_dicts()["tally"] is later.state


def test_a_state_that_nothing_takes_up_is_told(caplog: pytest.LogCaptureFixture) -> None:
    tracked = TrackedObjects()
    tracked.restore({"ema": {"n": 1}})

    tracked.after_step()

    assert "saved state of ema is dropped" in caplog.text
    assert tracked.state_dicts() == {}


def test_an_object_without_a_saved_state_is_told(caplog: pytest.LogCaptureFixture) -> None:
    tracked, fresh = TrackedObjects(), Remembering({"n": 1})
    tracked.add({"fresh": fresh})

    tracked.restore({"model": {}})

    assert "No state was saved for fresh" in caplog.text
    assert fresh.state == {"n": 1}


@pytest.mark.parametrize(
    ("name", "found", "error", "message"),
    [
        ("model", Tally(), ConfigError, "can't be tracked as 'model'"),
        ("_x", Tally(), ConfigError, "can't be tracked as '_x'"),
        ("taken", Tally(), ConfigError, "another object is tracked as 'taken'"),
        ("number", 3, ConfigError, "number=int has no state_dict"),
        ("hook", Remembering({"hook": print}), CheckpointError, r"hook\['hook'\] is a"),
    ],
)
def test_what_cannot_be_tracked_is_refused_by_name(
    name: str, found: object, error: type[Exception], message: str
) -> None:
    tracked = TrackedObjects()
    tracked.add({"taken": Remembering({})})

    with pytest.raises(error, match=message):
        tracked.add({name: found})
    assert tracked.state_dicts().keys() == {"taken"}


def test_a_state_that_does_not_fit_names_its_object() -> None:
    tracked = TrackedObjects()
    tracked.add({"ema": torch.nn.Linear(2, 2)})

    with pytest.raises(CheckpointError, match="saved state of 'ema' does not fit"):
        tracked.restore({"ema": torch.nn.Linear(3, 3).state_dict()})


def test_only_functions_are_called_after_steps() -> None:
    with pytest.raises(ConfigError, match="needs a function"):
        TrackedObjects().call_after_steps(3)
