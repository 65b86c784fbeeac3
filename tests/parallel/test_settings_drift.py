"""What a script sets otherwise than the run that it goes on with is named."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from geartrain.errors import CheckpointError
from geartrain.parallel.saved_state import TrainState, adopt_state, whole_state
from geartrain.parallel.settings_drift import name_changed_settings


def state(*, seed: int = 0, schedules: bool = False, **settings: Any) -> TrainState:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters(), **settings)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1) if schedules else None
    return TrainState(
        model=model,
        optimizer=optimizer,
        lr_scheduler=scheduler,
        scaler=None,
        step_index=3,
        seed=seed,
    )


def test_settings_that_changed_are_named_and_the_saved_ones_are_in_force() -> None:
    saved = whole_state(state(lr=0.1, betas=(0.9, 0.99), weight_decay=0.01), [])
    now = state(seed=1, lr=0.2, betas=(0.9, 0.95), weight_decay=0.01)

    loaded = adopt_state(saved, now, "here")

    assert set(loaded.changed_settings) == {
        "seed: 0 -> 1",
        "optimizer[0].lr: 0.1 -> 0.2",
        "optimizer[0].betas[1]: 0.99 -> 0.95",
    }
    assert now.optimizer.param_groups[0]["lr"] == 0.1


def test_what_a_schedule_has_moved_did_not_change() -> None:
    before = state(schedules=True, lr=0.1)
    before.optimizer.step()
    before.lr_scheduler.step()
    assert before.optimizer.param_groups[0]["lr"] != 0.1
    saved = whole_state(before, [])

    assert name_changed_settings(saved, state(schedules=True, lr=0.1)) == ()
    assert name_changed_settings(saved, state(schedules=True, lr=0.3)) == (
        "optimizer[0].initial_lr: 0.1 -> 0.3",
    )


def test_a_rate_that_is_a_tensor_is_compared_by_value() -> None:
    saved = whole_state(state(lr=torch.tensor(0.5)), [])

    assert name_changed_settings(saved, state(lr=0.5)) == ()


def test_what_is_no_training_is_refused_before_it_is_compared() -> None:
    with pytest.raises(CheckpointError, match="here lacks optimizer, training"):
        adopt_state({"model": {}}, state(), "here")
