"""A shard copied while the next step is computed."""

import threading

import pytest
import torch

from geartrain.checkpoint.agent.shadow_copy import ShadowCopy
from geartrain.checkpoint.agent.shard_layout import copy_shard, lay_out
from geartrain.checkpoint.ranges import StateRange, split_ownership, whole_ranges
from geartrain.errors import CheckpointError


def _state() -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    return {
        "model/w": torch.randn(1_100_000, 2),
        "model/h": torch.randn(41).bfloat16(),
        "model/running_mean": torch.randn(9),
        "optimizer/w.step": torch.tensor(7.0),
        "optimizer/mask": torch.arange(5) % 2 == 0,
        "optimizer/none": torch.empty(0),
    }


@pytest.mark.parametrize("share", ["whole", "a", "b"])
def test_it_copies_what_a_plain_copy_does(share: str) -> None:
    state = _state()
    sizes = {name: tensor.numel() for name, tensor in state.items()}
    owned = split_ownership(sizes, {"a": 1.0, "b": 2.5})
    layout = lay_out(state, owned.get(share, whole_ranges(sizes)))
    plain, shadow = (memoryview(bytearray(layout.num_bytes)) for _ in range(2))

    copy_shard(layout, state, plain)
    ShadowCopy(layout, state, shadow).finish()

    assert shadow == plain


def test_what_forward_changes_is_copied_at_once() -> None:
    state = _state()
    layout = lay_out(state, [StateRange(name="model/running_mean", start=0, stop=9)])
    before, buffer = (memoryview(bytearray(layout.num_bytes)) for _ in range(2))
    copy_shard(layout, state, before)

    shadow = ShadowCopy(layout, state, buffer, changing={"model/running_mean"})
    state["model/running_mean"].add_(1.0)  # forward, while the copy is on its way
    shadow.finish()

    assert buffer == before


def test_a_copy_that_fails_is_not_taken_for_whole() -> None:
    state = _state()
    layout = lay_out(state, whole_ranges({"model/h": 41}))
    read_only = memoryview(bytes(layout.num_bytes))

    with pytest.raises(CheckpointError, match="don't seal it"):
        ShadowCopy(layout, state, read_only).finish()
    assert not [t for t in threading.enumerate() if t.name == "geartrain-shadow-copy"]
