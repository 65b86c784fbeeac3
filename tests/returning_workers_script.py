"""A script that ``geartrain run`` trains with until a worker that was lost is back."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch

import geartrain as gt
from geartrain.parallel.regroup import Regrouper
from small_models import mean_cross_entropy
from training_jobs import Job, flat_parameters, make_adamw

SAMPLE_S = 0.04
MOST_STEPS = 2000
"""The tests' deadline comes first."""


def reduce_learning_rate(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.StepLR(optimizer, step_size=50, gamma=0.9)


def returning_job(num_steps: int = MOST_STEPS) -> Job:
    return Job(
        num_steps=num_steps,
        make_optimizer=make_adamw,
        make_scheduler=reduce_learning_rate,
        max_grad_norm=1.0,
    )


class Training:
    """Trains on until as many ranks take part again as at first, and a little longer.

    Args:
        options: ``hits`` of (rank, step, signal), ``folder`` for the ranks' results,
            ``num_after``: steps with all ranks at the end; ``num_ranks`` to wait for.
    """

    def __init__(self, options: dict[str, Any]) -> None:
        self.options = options
        self.job = returning_job()
        for rank in options.get("kills_as_it_enters", ()):
            kill_all_others_on_entering(rank, Path(options["folder"]))
        self.session = gt.Session()
        self.model = self.job.model()
        optimizer = self.job.make_optimizer(self.model)
        assert self.job.make_scheduler is not None
        self.session.setup(
            self.model,
            optimizer,
            loss_fn=self.loss,
            lr_scheduler=self.job.make_scheduler(optimizer),
            max_grad_norm=self.job.max_grad_norm,
        )
        self.first_step = self.session.step_index
        self.loader = self.session.setup_dataloader(
            self.job.data(), global_batch_size=self.job.batch_size
        )
        (Path(options["folder"]) / f"pid-{self.session.rank}").write_text(str(os.getpid()))
        self.metrics: list[tuple[int, float]] = []
        self.losses: list[tuple[int, float]] = []

    def loss(self, output: Any, batch: Any) -> torch.Tensor:
        for hit in self.options["hits"]:
            is_due = hit["step"] == self.session.step_index and not self.first_step
            is_planned = self.session.current_plan is not None
            if hit["rank"] == self.session.rank and is_due and is_planned:
                os.kill(os.getpid(), hit["signal"])
        time.sleep(len(batch[0]) * SAMPLE_S)
        return mean_cross_entropy(output, batch)

    def run(self) -> None:
        last = MOST_STEPS
        while True:
            for batch in self.loader:
                self.losses.append((self.session.step_index, self.session.step(batch)))
                if self.session.step_index >= last:
                    return
            num_ranks = self.count_ranks()
            self.metrics.append((self.session.step_index, num_ranks))
            is_past = self.session.step_index > self.options["after_step"]
            if is_past and num_ranks == self.options["num_ranks"] and last == MOST_STEPS:
                last = self.session.step_index + self.options["num_after"]

    def count_ranks(self) -> float:
        """From a mean over all ranks to which rank 0 gives 1 and others 0."""
        lead = 1.0 if self.session.is_main else 0.0
        return round(1 / self.session.all_reduce_metric(lead, 1.0), 6)


def kill_all_others_on_entering(rank: int, folder: Path) -> None:
    """Have all die that take part, when the coordinator has just let this rank in."""
    original = Regrouper.enter

    def enter(regrouper: Regrouper, *arguments: Any) -> None:
        for path in folder.glob("pid-*"):
            is_other = int(path.read_text()) != os.getpid()
            if regrouper.groups.rank == rank and is_other:
                os.kill(int(path.read_text()), signal.SIGKILL)
        original(regrouper, *arguments)

    Regrouper.enter = enter  # type: ignore[method-assign,assignment]  # see above


def main() -> None:
    options = json.loads(sys.argv[1])
    training = Training(options)
    training.run()
    session = training.session
    result = {
        "rank": session.rank,
        "is_main": session.is_main,
        "first_step": training.first_step,
        "steps": session.step_index,
        "parameters": flat_parameters(training.model).tolist(),
        "metrics": training.metrics,
        "losses": training.losses,
    }
    path = Path(options["folder"]) / f"result-{session.rank}.json"
    path.write_text(json.dumps(result))


if __name__ == "__main__":
    main()
