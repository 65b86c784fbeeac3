from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from geartrain.checkpoint.parameter_names import (
    name_optimizer_state,
    number_optimizer_state,
)
from geartrain.checkpoint.tree_file import tree_from_bytes, tree_to_bytes
from geartrain.errors import CheckpointError


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))


def adamw(net: nn.Module, groups: list[dict[str, Any]]) -> torch.optim.AdamW:
    optimizer = torch.optim.AdamW(groups, lr=0.1)
    train(net, optimizer, steps=2)
    return optimizer


def train(net: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for step in range(steps):
        optimizer.zero_grad()
        net(torch.full((2, 3), 1.0 + step)).square().sum().backward()
        optimizer.step()


def named(net: nn.Module) -> dict[str, nn.Parameter]:
    return dict(net.named_parameters())


def weights_and_biases(net: nn.Module) -> list[dict[str, Any]]:
    parameters = named(net)
    return [
        {"params": [p for n, p in parameters.items() if "weight" in n]},
        {"params": [p for n, p in parameters.items() if "bias" in n], "weight_decay": 0.0},
    ]


def test_moments_find_their_weights_in_another_order() -> None:
    net, other = model(), model()
    optimizer = adamw(net, weights_and_biases(net))
    groups = list(reversed(weights_and_biases(other)))
    groups[1]["params"].reverse()
    reordered = torch.optim.AdamW(groups, lr=0.5)

    saved = name_optimizer_state(net, optimizer)
    read = tree_from_bytes(tree_to_bytes(saved))
    other.load_state_dict(net.state_dict())
    reordered.load_state_dict(number_optimizer_state(other, reordered, read))
    train(net, optimizer, steps=3)
    train(other, reordered, steps=3)

    for name, parameter in named(net).items():
        assert torch.equal(parameter, named(other)[name])
    assert [group["weight_decay"] for group in reordered.param_groups] == [0.0, 0.01]


def test_state_is_keyed_by_name() -> None:
    net = model()

    saved = name_optimizer_state(net, adamw(net, weights_and_biases(net)))

    assert set(saved["state"]) == set(named(net))
    assert saved["param_groups"][1]["params"] == ["0.bias", "1.bias"]
    assert saved["param_groups"][1]["weight_decay"] == 0.0


def test_groups_may_be_joined_where_their_settings_agree() -> None:
    net, other = model(), model()
    groups = [{"params": [p]} for p in net.parameters()]
    saved = name_optimizer_state(net, adamw(net, groups))
    joined = torch.optim.AdamW(other.parameters(), lr=0.7)

    joined.load_state_dict(number_optimizer_state(other, joined, saved))

    assert [group["lr"] for group in joined.param_groups] == [0.1]
    assert len(joined.state) == 4


def test_groups_with_other_settings_are_not_joined() -> None:
    net, other = model(), model()
    saved = name_optimizer_state(net, adamw(net, weights_and_biases(net)))
    joined = torch.optim.AdamW(other.parameters())

    with pytest.raises(CheckpointError, match=r"'0\.bias' was saved with other settings"):
        number_optimizer_state(other, joined, saved)


def test_parameters_that_came_or_went_are_named() -> None:
    net, other = model(), model()
    full = torch.optim.SGD(net.parameters())
    part = torch.optim.SGD(list(other.parameters())[:2])

    with pytest.raises(CheckpointError, match=r"'1\.bias' is optimized no more"):
        number_optimizer_state(other, part, name_optimizer_state(net, full))
    with pytest.raises(CheckpointError, match=r"'1\.bias' was not optimized"):
        number_optimizer_state(net, full, name_optimizer_state(other, part))


def test_an_optimizer_of_something_else_is_refused() -> None:
    optimizer = torch.optim.SGD([torch.ones(2, requires_grad=True)])

    with pytest.raises(CheckpointError, match=r"parameter 0 of SGD, of shape \(2,\)"):
        name_optimizer_state(model(), optimizer)
