"""Saves beside the training, and going on from them."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from geartrain.checkpoint.chunk_store import FileStore
from geartrain.checkpoint.local_tier import LocalTier
from geartrain.checkpoint.versions import list_versions
from geartrain.errors import CheckpointError, ConfigError
from geartrain.parallel.resume import find_resumable, take_up, tell_drift
from geartrain.parallel.saved_state import save_state, whole_state
from geartrain.parallel.tiered_saves import TieredSaves
from saved_training import Told, Training, every, spec_of


def test_a_training_goes_on_from_a_save_as_if_it_had_never_ended(tmp_path: Path) -> None:
    whole = Training()
    saves = TieredSaves(spec_of(tmp_path / "run/checkpoints", every(4)), Told())
    whole.train(saves, 6)
    saves.close()
    whole.train(TieredSaves(spec_of(tmp_path / "unused", every(100)), Told()), 4)

    found = find_resumable(str(tmp_path / "run"))
    resumed = Training(seed=1)
    loaded = take_up(found.spec, resumed.state)
    resumed.step_index = loaded.step_index
    assert found.spec.step == loaded.step_index == 4
    assert loaded.positions == [{"position": 20}]
    resumed.train(TieredSaves(spec_of(tmp_path / "unused", every(100)), Told()), 6)

    assert torch.equal(resumed.weights(), whole.weights())
    assert resumed.scheduler.get_last_lr() == whole.scheduler.get_last_lr()


def test_what_is_saved_is_the_state_of_then(tmp_path: Path) -> None:
    training, told = Training(), Told()
    saves = TieredSaves(spec_of(tmp_path / "checkpoints", every(1)), told)
    training.train(saves, 1)
    at_the_save = training.weights().clone()
    with torch.no_grad():
        for parameter in training.model.parameters():
            parameter.add_(1.0)  # while another thread writes
    saves.close()

    resumed = Training(seed=1)
    take_up(find_resumable(str(tmp_path)).spec, resumed.state)
    assert torch.equal(resumed.weights(), at_the_save)
    assert told.kinds() == {"saved"}


def test_a_version_names_the_history_that_a_resumed_training_goes_on_with(
    tmp_path: Path,
) -> None:
    lineage = "ab" * 16
    training = Training()
    saves = TieredSaves(spec_of(tmp_path / "checkpoints", every(2, weights=1)), Told())
    training.step()
    training.step()
    state = dataclasses.replace(training.state, lineage=lineage)
    saves.save(whole_state(state, []), 2, lineage)
    saves.close()

    latest = LocalTier(tmp_path / "checkpoints").latest()
    assert latest is not None
    assert latest.manifest.lineage == lineage
    loaded = take_up(find_resumable(str(tmp_path)).spec, Training(seed=1).state)
    assert (loaded.step_index, loaded.lineage) == (2, lineage)


def test_the_local_disk_keeps_as_many_as_told(tmp_path: Path) -> None:
    training = Training()
    for _ in range(6):
        saves = TieredSaves(
            spec_of(tmp_path, every(1), keep_last=2), Told(), training.step_index
        )
        training.train(saves, 1)
        saves.close()

    steps = [int(name.split("/")[1][:12]) for name in list_versions(FileStore(tmp_path))]
    assert steps == [5, 6]


def test_weights_alone_are_nothing_to_go_on_from(tmp_path: Path) -> None:
    training = Training()
    for _ in range(3):  # one after the other, so that each is written
        saves = TieredSaves(
            spec_of(tmp_path / "checkpoints", every(2, weights=1)),
            Told(),
            training.step_index,
        )
        training.train(saves, 1)
        saves.close()

    latest = LocalTier(tmp_path / "checkpoints").latest()
    assert latest is not None
    assert (latest.manifest.step, latest.manifest.kind) == (3, "weights")
    assert find_resumable(str(tmp_path)).spec.step == 2


def test_a_disk_that_refuses_stops_no_training(tmp_path: Path) -> None:
    (tmp_path / "in-the-way").write_text("a file")
    training, told = Training(), Told()
    saves = TieredSaves(
        spec_of(tmp_path / "in-the-way", every(1), durable=tmp_path / "durable"), told
    )
    training.train(saves, 1)
    deadline_steps = 2000
    while not {"saved", "unsaved"} <= told.kinds() and deadline_steps:
        deadline_steps -= 1
        saves.report()
        os.sched_yield()
        torch.randn(1000).sum()
    saves.close()

    failed = [text for kind, text in told.events if kind == "unsaved"]
    assert len(failed) == 1
    assert "training goes on" in failed[0]
    assert find_resumable(str(tmp_path / "durable")).spec.step == 1


def test_a_damaged_chunk_is_taken_from_the_other_store(tmp_path: Path) -> None:
    training = Training()
    durable = tmp_path / "durable"
    saves = TieredSaves(
        spec_of(tmp_path / "run/checkpoints", every(2), durable=durable), Told()
    )
    training.train(saves, 2)
    saves.close()
    for chunk in (tmp_path / "run/checkpoints/objects").rglob("*"):
        if chunk.is_file():
            data = bytearray(chunk.read_bytes())
            data[len(data) // 2] ^= 1
            chunk.chmod(0o600)
            chunk.write_bytes(data)

    alone = find_resumable(str(tmp_path / "run"))
    with pytest.raises(CheckpointError):
        take_up(alone.spec, Training(seed=1).state)
    resumed = Training(seed=1)
    found = find_resumable(str(tmp_path / "run"), others=[str(durable)])
    take_up(found.spec, resumed.state)
    assert torch.equal(resumed.weights(), training.weights())


def test_the_newest_state_of_a_run_is_found_whatever_wrote_it(tmp_path: Path) -> None:
    training = Training()
    saves = TieredSaves(spec_of(tmp_path / "checkpoints", every(2)), Told())
    training.train(saves, 2)
    saves.close()
    assert find_resumable(str(tmp_path)).spec.step == 2
    training.step()
    save_state(tmp_path / "checkpoint", training.state, [])  # asked to stop

    found = find_resumable(str(tmp_path))
    assert found.spec.snapshot is not None
    assert found.spec.step == 3


def test_a_folder_without_a_state_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="holds no state to go on from"):
        find_resumable(str(tmp_path))
    with pytest.raises(ConfigError, match="there is no folder"):
        find_resumable(str(tmp_path / "nowhere"))


def test_what_differs_from_the_run_before_is_named() -> None:
    before = {"arguments": ["--lr", "0.1"], "fleet": "emulated:0.5,0.5"}
    after = {"arguments": ["--lr", "0.2"], "fleet": "emulated:0.5,0.5"}

    assert tell_drift(before, after) == ("arguments[1]: '0.1' -> '0.2'",)
    assert tell_drift({}, after) == ()


class Coded(torch.optim.SGD):
    """Keeps what it remembers in 8 bits, whatever its parameters are."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # no closure
        for group in self.param_groups:
            for parameter in group["params"]:
                code = self.state[parameter].get("code", torch.zeros(3, dtype=torch.uint8))
                self.state[parameter]["code"] = code + 100


def test_what_an_optimizer_keeps_in_another_dtype_comes_back_in_it(tmp_path: Path) -> None:
    training, resumed = Training(), Training(seed=1)
    for one in (training, resumed):
        one.optimizer = Coded(one.model.parameters(), lr=0.1)
    training.optimizer.step()
    training.optimizer.step()
    save_state(tmp_path / "checkpoint", training.state, [])

    take_up(find_resumable(str(tmp_path)).spec, resumed.state)

    for state in resumed.optimizer.state.values():
        assert state["code"].dtype == torch.uint8
        assert state["code"].tolist() == [200, 200, 200]
