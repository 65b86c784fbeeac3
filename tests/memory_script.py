"""Trains on a fleet; all its workers kill themselves when they have made some steps.

Takes one JSON object: ``num_steps``, ``die_after`` (steps; each worker dies once, and none
where it is 0), ``kill`` (a process that dies with them, or 0), ``result`` (a path).
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

import torch

import geartrain as gt


class Model(torch.nn.Module):
    """Counts in a buffer what its forward has seen, as batch norms do."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = torch.nn.Linear(8, 32), torch.nn.Linear(32, 1)
        self.seen: torch.Tensor
        self.register_buffer("seen", torch.zeros(4))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.seen += inputs.detach().sum()
        output: torch.Tensor = self.last(torch.relu(self.first(inputs)))
        return output


def loss_fn(output: torch.Tensor, batch: list[torch.Tensor]) -> torch.Tensor:
    time.sleep(0.004 * len(output))  # a step takes longer than its log
    return (output - batch[1]).square().squeeze(1)


def numbers(tensors: list[torch.Tensor]) -> list[float]:
    return torch.cat([t.detach().double().reshape(-1) for t in tensors]).tolist()


def die(run_dir: Path, rank: int, process_id: int) -> None:
    mark = run_dir / f"died-{rank}"
    if mark.exists():
        return
    mark.touch()
    if process_id and rank == 0:
        with suppress(ProcessLookupError):
            os.kill(process_id, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    asked = json.loads(sys.argv[1])
    session = gt.Session(seed=3)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.98)
    session.setup(
        model, optimizer, loss_fn=loss_fn, lr_scheduler=schedule, max_grad_norm=0.5
    )
    average = torch.optim.swa_utils.AveragedModel(model)
    session.track(average=average)
    session.after_step(lambda: average.update_parameters(model))
    draws = torch.Generator().manual_seed(1)
    inputs = torch.randn(96, 8, generator=draws)
    data = torch.utils.data.TensorDataset(inputs, inputs[:, :1].sin())
    loader = session.setup_dataloader(data, global_batch_size=12)
    result, losses = Path(asked["result"]), {}
    while session.step_index < asked["num_steps"]:
        for batch in loader:
            if session.step_index == asked["die_after"] > 0:
                die(result.parent, session.rank, asked["kill"])
            loss = session.step(batch)
            losses[session.step_index] = loss
            if session.step_index >= asked["num_steps"]:
                break
    if session.is_main:
        found = {
            "losses": losses,
            "parameters": numbers(list(model.parameters())),
            "average": numbers(list(average.parameters())),
            "seen": model.seen.tolist(),
            "rate": optimizer.param_groups[0]["lr"],
        }
        result.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
