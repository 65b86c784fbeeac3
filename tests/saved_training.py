"""A training without ranks, and saves beside it."""

from __future__ import annotations

from pathlib import Path

import torch

from geartrain.checkpoint.cadence import Cadence, SaveInterval, TierCadence
from geartrain.checkpoint.retention import RetentionPolicy
from geartrain.parallel.save_spec import SaveSpec
from geartrain.parallel.saved_state import TrainState, whole_state
from geartrain.parallel.tiered_saves import TieredSaves
from geartrain.telemetry import EventKind


class Training:
    """A small model with moments, a schedule, and a position in its data."""

    def __init__(self, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8))
        self.optimizer: torch.optim.Optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=0.1
        )
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2)
        self.step_index = 0

    @property
    def state(self) -> TrainState:
        return TrainState(
            model=self.model,
            optimizer=self.optimizer,
            lr_scheduler=self.scheduler,
            scaler=None,
            step_index=self.step_index,
            seed=7,
        )

    def step(self) -> None:
        generator = torch.Generator().manual_seed(self.step_index)
        self.optimizer.zero_grad()
        loss = self.model(torch.randn(16, 4, generator=generator)).square().mean()
        loss.backward()
        self.optimizer.step()
        self.scheduler.step()
        self.step_index += 1

    def train(self, saves: TieredSaves, num_steps: int) -> None:
        for _ in range(num_steps):
            self.step()
            if saves.is_due(self.step_index):
                positions: list[dict[str, int | bool]] = [{"position": 5 * self.step_index}]
                saves.save(whole_state(self.state, positions), self.step_index)
            saves.report()

    def weights(self) -> torch.Tensor:
        values = [value.double().flatten() for value in self.model.state_dict().values()]
        return torch.cat(values)


def every(steps: int, weights: int | None = None) -> TierCadence:
    return TierCadence(
        full=SaveInterval(every_steps=steps),
        weights=SaveInterval(every_steps=weights) if weights else None,
    )


def spec_of(
    folder: Path,
    local: TierCadence,
    *,
    durable: Path | str | None = None,
    keep_last: int = 3,
) -> SaveSpec:
    return SaveSpec(
        directory=str(folder),
        durable_url=None if durable is None else str(durable),
        cadence=Cadence(local=local, durable=local),
        retention=RetentionPolicy(keep_last=keep_last),
        config={"arguments": ["--lr", "0.1"]},
    )


class Told:
    def __init__(self) -> None:
        self.events: list[tuple[str, str]] = []

    def __call__(self, kind: EventKind, text: str) -> None:
        self.events.append((kind, text))

    def kinds(self) -> set[str]:
        return {kind for kind, _ in self.events}
