"""A script that ``geartrain run`` trains with, in which workers are hit by signals."""

from __future__ import annotations

import errno
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch

import geartrain as gt
from geartrain.checkpoint import snapshot
from geartrain.parallel.plan_director import PlanDirector
from small_models import mean_cross_entropy
from training_jobs import Job, flat_parameters

SAMPLE_S = 0.01
"""Slow enough that a batch of a few samples is worth sharing."""


class Training:
    """The training that the argument of the script describes.

    Args:
        options: ``hits`` (rank, place, seconds later, signal), ``num_steps``, ``result``,
            and what else is looked up below.
    """

    def __init__(self, options: dict[str, Any]) -> None:
        self.options = options
        self.job = Job(num_steps=options["num_steps"])
        self.session = gt.Session()
        self.model = self.job.model()
        self.session.setup(
            self.model,
            self.job.make_optimizer(self.model),
            loss_fn=self.loss,
            **options.get("setup", {}),
        )
        self.loader = self.session.setup_dataloader(
            self.job.data(), global_batch_size=self.job.batch_size
        )
        if "load" in options:
            self.session.load(options["load"])
        self.losses: list[float] = []
        if options.get("hits"):
            self.watch_saving()
            self.watch_regrouping()

    def loss(self, output: Any, batch: Any) -> torch.Tensor:
        is_planned = self.session.current_plan is not None
        self.hit_at(self.session.step_index if is_planned else "measuring")
        time.sleep(len(batch[0]) * SAMPLE_S)
        return mean_cross_entropy(output, batch)

    def hit_at(self, place: object) -> None:
        """Have this process hit by a signal if it is its turn."""
        for hit in self.options["hits"]:
            if hit["rank"] == self.session.rank and hit["at"] == place:
                hit["at"] = None
                arguments = (os.getpid(), hit["signal"])
                threading.Timer(hit["delay_s"], os.kill, arguments).start()

    def watch_saving(self) -> None:
        """Have ``saving`` be a place to be hit at: a snapshot's files are there half."""
        module: Any = snapshot
        publish = module.replace_directory

        def watched(path: Path) -> Any:
            if self.session.step_index:
                self.hit_at("saving")
                if self.session.rank in self.options.get("disk_full_on", ()):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return publish(path)

        module.replace_directory = watched

    def watch_regrouping(self) -> None:
        """Have ``regrouping`` be a place to be hit at: the exchange is to be opened.

        With ``coordinator_stands_still_s`` the coordinator can't say for a while who died.
        """
        original = PlanDirector.regroup
        still_s = self.options.get("coordinator_stands_still_s")

        def regroup(director: PlanDirector, *arguments: Any) -> None:
            hits = [hit for hit in self.options["hits"] if hit["at"] == "regrouping"]
            if hits and still_s and self.session.is_main:
                stop_coordinator(still_s)
            self.hit_at("regrouping")
            if any(hit["rank"] == self.session.rank for hit in hits):
                time.sleep(5)  # the others get no further than to wait for this rank
            original(director, *arguments)

        PlanDirector.regroup = regroup  # type: ignore[method-assign,assignment]  # to be hit in it

    def run(self) -> None:
        while self.session.step_index < self.job.num_steps:
            for batch in self.loader:
                self.losses.append(self.step(batch))
                self.session.print(f"step {self.session.step_index}")
                if self.session.step_index == self.options.get("saves_after"):
                    self.session.save(self.options["save_to"])
                if self.session.step_index == self.job.num_steps:
                    break

    def step(self, batch: Any) -> float:
        if not self.options.get("own_forward"):
            return self.session.step(batch)
        for part in self.session.micro_batches(batch):
            self.session.backward(self.loss(self.model(part[0]), part))
        return self.session.optimizer_step()

    def mean_loss(self) -> float:
        def sums(output: Any, batch: Any) -> dict[str, Any]:
            self.hit_at("evaluating")
            return {"loss": (mean_cross_entropy(output, batch).sum(), len(batch[0]))}

        return self.session.evaluate(self.loader, sums)["loss"]


def stop_coordinator(still_s: float) -> None:
    run_dir = Path(json.loads(sys.argv[1])["result"]).parent
    process_id = json.loads((run_dir / "coordinator.json").read_text())["process_id"]
    os.kill(process_id, signal.SIGSTOP)
    threading.Timer(still_s, os.kill, (process_id, signal.SIGCONT)).start()


def main() -> None:
    options = json.loads(sys.argv[1])
    training = Training(options)
    training.run()
    training.hit_at("before evaluating")
    metric = training.mean_loss() if options.get("evaluates") else 0.0
    plan = training.session.current_plan
    assert plan is not None
    if training.session.is_main:
        result = {
            "losses": training.losses,
            "parameters": flat_parameters(training.model).tolist(),
            "metric": metric,
            "devices": [replica.device_id for replica in plan.replicas],
        }
        Path(options["result"]).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
