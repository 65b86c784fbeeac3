"""A script that ``geartrain run`` trains with, in which workers are hit by signals."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch

import geartrain as gt
from small_models import mean_cross_entropy
from training_jobs import Job, flat_parameters


def strike_later(delay_s: float, number: int) -> None:
    threading.Timer(delay_s, os.kill, (os.getpid(), number)).start()


def main() -> None:
    """Train; the argument says who is hit: rank, place, seconds later, signal."""
    options = json.loads(sys.argv[1])
    job = Job(num_steps=options.get("num_steps", 10))
    hits = [hit for hit in options["hits"] if hit["rank"] == rank_of_this()]

    def hit_at(place: object) -> None:
        for hit in hits:
            if hit["at"] == place:
                strike_later(hit.get("delay_s", 0.0), hit["signal"])

    def loss_fn(output: Any, batch: Any) -> torch.Tensor:
        hit_at("measuring" if session.current_plan is None else session.step_index)
        time.sleep(len(batch[0]) * options.get("sample_s", 0.01))  # worth sharing
        return mean_cross_entropy(output, batch)

    session = gt.Session()
    model = job.model()
    optimizer = job.make_optimizer(model)
    session.setup(model, optimizer, loss_fn=loss_fn, **options.get("setup", {}))
    loader = session.setup_dataloader(job.data(), global_batch_size=job.batch_size)
    if options.get("load"):
        session.load(options["load"])
    losses = []
    metric = 0.0
    while session.step_index < job.num_steps:
        for batch in loader:
            if options.get("own_forward"):
                for part in session.micro_batches(batch):
                    session.backward(loss_fn(model(part[0]), part), count=len(part[0]))
                losses.append(session.optimizer_step())
            else:
                losses.append(session.step(batch))
            if session.step_index == job.num_steps:
                break
    hit_at("evaluating")
    if options.get("evaluates"):
        metric = session.evaluate(
            loader,
            lambda output, batch: {
                "loss": (mean_cross_entropy(output, batch).sum(), len(batch[0]))
            },
        )["loss"]
    if session.is_main:
        result = {
            "losses": losses,
            "parameters": flat_parameters(model).tolist(),
            "metric": metric,
            "shares": [r.device_id for r in session.current_plan.replicas],
        }
        Path(options["result"]).write_text(json.dumps(result))


def rank_of_this() -> int:
    spec = json.loads(Path(os.environ["GEARTRAIN_WORKER_SPEC"]).read_text())
    return int(spec["rank"])


if __name__ == "__main__":
    main()
