"""A run that was saved and loaded goes on as the one that was not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as lrs

from geartrain.checkpoint.snapshot import load_snapshot, save_snapshot
from geartrain.checkpoint.tree_file import tree_from_bytes, tree_to_bytes

Parameters = Any  # what optimizers take
MakeOptimizer = Callable[[Parameters], torch.optim.Optimizer]
MakeScheduler = Callable[[torch.optim.Optimizer], Any]  # Any: schedulers share no base

OPTIMIZERS: dict[str, MakeOptimizer] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, amsgrad=True),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.01),
    "muon": lambda p: torch.optim.Muon([q for q in p if q.ndim == 2], lr=0.02),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.9, centered=True),
    "lbfgs": lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=3, history_size=4),
}
SCHEDULERS: dict[str, MakeScheduler] = {
    "one_cycle": lambda o: lrs.OneCycleLR(o, max_lr=0.1, total_steps=50),
    "plateau": lambda o: lrs.ReduceLROnPlateau(o, patience=1, factor=0.5),
    "sequential": lambda o: lrs.SequentialLR(
        o,
        [lrs.LinearLR(o, total_iters=4), lrs.CosineAnnealingLR(o, T_max=9)],
        milestones=[4],
    ),
    "multi_step": lambda o: lrs.MultiStepLR(o, milestones=[3, 7]),
    "chained": lambda o: lrs.ChainedScheduler(
        [lrs.ConstantLR(o, total_iters=3), lrs.ExponentialLR(o, gamma=0.9)]
    ),
    "restarts": lambda o: lrs.CosineAnnealingWarmRestarts(o, T_0=3),
}


class Run:
    def __init__(self, optimizer: MakeOptimizer, scheduler: MakeScheduler) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(
            nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 2)
        )
        self.optimizer = optimizer(self.model.parameters())
        self.scheduler = scheduler(self.optimizer)

    def parts(self) -> dict[str, Any]:  # Any: things with a state_dict
        return {
            "model": self.model,
            "optimizer": self.optimizer,
            "scheduler": self.scheduler,
        }

    def state(self) -> dict[str, Any]:  # Any: trees
        return {name: part.state_dict() for name, part in self.parts().items()}

    def load(self, state: dict[str, Any]) -> None:  # Any: trees
        for name, part in self.parts().items():
            part.load_state_dict(state[name])

    def losses(self, first: int, last: int) -> list[float]:
        losses = []
        for step in range(first, last):
            generator = torch.Generator().manual_seed(step)
            x, y = (torch.randn(16, n, generator=generator) for n in (6, 2))

            def closure(x: torch.Tensor = x, y: torch.Tensor = y) -> float:
                self.optimizer.zero_grad()
                loss = nn.functional.mse_loss(self.model(x), y)
                loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
                return loss.item()

            loss = self.optimizer.step(closure)
            assert loss is not None
            losses.append(loss)
            plateau = isinstance(self.scheduler, lrs.ReduceLROnPlateau)
            self.scheduler.step(*([loss] if plateau else []))
        return losses


CASES = [(name, "multi_step") for name in OPTIMIZERS if name != "sgd"]
CASES += [("sgd", s) for s in SCHEDULERS]


@pytest.mark.filterwarnings("ignore:.*lr_scheduler.step.*", "ignore:.*epoch parameter.*")
@pytest.mark.parametrize(("optimizer", "scheduler"), CASES)
def test_a_loaded_run_goes_on_bit_for_bit(
    tmp_path: Path, optimizer: str, scheduler: str
) -> None:
    whole = Run(OPTIMIZERS[optimizer], SCHEDULERS[scheduler])
    whole.losses(0, 6)
    save_snapshot(tmp_path / "snapshot", whole.state())
    sent = {name: tree_to_bytes(tree) for name, tree in whole.state().items()}
    expected = whole.losses(6, 14)

    loaded = Run(OPTIMIZERS[optimizer], SCHEDULERS[scheduler])
    loaded.load(load_snapshot(tmp_path / "snapshot"))
    received = Run(OPTIMIZERS[optimizer], SCHEDULERS[scheduler])
    received.load({name: tree_from_bytes(block) for name, block in sent.items()})

    assert loaded.losses(6, 14) == expected
    assert received.losses(6, 14) == expected
