"""The vector that travels with a step's gradients."""

from __future__ import annotations

import pytest
import torch

from geartrain.parallel.trailer import RankFigures, TrailerLayout


@pytest.mark.parametrize("num_before", [1, 2, 5])
def test_step_of_a_smaller_fleet_is_read_after_the_fleet_has_grown(num_before: int) -> None:
    before = TrailerLayout(term_names=("loss",), num_parameters=3, world_size=num_before)
    vectors = [
        before.pack(
            rank,
            RankFigures(num_samples=10.0 + rank),
            torch.tensor([0.5, 2.0], dtype=torch.float64),
            [True, False, True],
            stop=False,
        )
        for rank in range(num_before)
    ]
    grown = TrailerLayout(term_names=("loss",), num_parameters=3, world_size=7)

    total = torch.stack(vectors).sum(0)
    read = grown.of_length(total.numel()).unpack(total)

    assert read.counts == {"loss": 2.0 * num_before}
    assert [rank.num_samples for rank in read.ranks] == [10 + r for r in range(num_before)]
    assert read.touched == [True, False, True]
