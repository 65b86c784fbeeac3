"""Compressed gradients in a training: what codes lose is kept, moved and saved."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from local_ranks import run_ranks
from parallel.two_racks import Training, train


@pytest.mark.parametrize("racks", [(1, 1), (1, 2), (1, 1, 1)])
def test_a_saved_run_goes_on_to_the_bit(racks: tuple[int, ...], tmp_path: Path) -> None:
    path = tmp_path / "snapshot"
    world_size = sum(racks)
    whole = Training(racks=racks, num_steps=12, save_at={6: path})
    undisturbed = run_ranks(train, world_size, whole)

    resumed = run_ranks(
        train, world_size, Training(racks=racks, num_steps=12, load_from=path)
    )

    for before, after in zip(undisturbed, resumed, strict=True):
        assert after.losses == before.losses[6:]
        assert torch.equal(after.parameters, before.parameters)
        assert before.residuals.keys() == after.residuals.keys()
