import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from geartrain.collectives.powersgd import register_powersgd
from geartrain.errors import ConfigError
from local_ranks import run_ranks

STEPS = 40
START_STEP = 3


def train(rank: int, world_size: int) -> tuple[float, float, torch.Tensor, int]:
    layer = nn.Linear(64, 64, bias=False)
    nn.init.zeros_(layer.weight)
    model = DistributedDataParallel(layer)
    state = register_powersgd(model, matrix_rank=2, start_step=START_STEP)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(1 + rank)
    factors = torch.randn(2, 2, 64, generator=torch.Generator().manual_seed(9)) / 4
    target = factors[0].T @ factors[1]  # the gradient of zero weights has rank 2
    losses = []
    for _ in range(STEPS):
        inputs = torch.randn(128, 64, generator=generator)
        loss = (model(inputs) - inputs @ target).square().sum(1).mean() / 2
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    weight = next(model.parameters()).detach()
    return losses[0], losses[-1], weight, len(state.error_dict)


def test_low_rank_gradients_train_and_leave_ranks_equal() -> None:
    (first, last, weight_0, residuals_0), (_, _, weight_1, _) = run_ranks(train, 2)
    assert last < 0.5 * first
    assert torch.equal(weight_0, weight_1)
    assert residuals_0 == 1  # the gradient did go through PowerSGD


@pytest.mark.parametrize("wrong", [{"matrix_rank": 0}, {"start_step": 1}])
def test_settings_that_torch_cannot_carry_out_are_refused(wrong: dict[str, int]) -> None:
    model = object()
    with pytest.raises(ConfigError, match="powersgd"):
        register_powersgd(model, **wrong)  # type: ignore[arg-type]  # refused before use
