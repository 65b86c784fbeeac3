"""A script that ``geartrain run`` trains with until it is stopped."""

from __future__ import annotations

import time
from typing import Any

import torch

import geartrain as gt
from small_models import mean_cross_entropy
from training_jobs import Job

SAMPLE_S = 0.005
"""Slow enough that there is time between steps for what a test does."""


def slow_loss(output: Any, batch: Any) -> torch.Tensor:
    time.sleep(len(batch[0]) * SAMPLE_S)
    return mean_cross_entropy(output, batch)


def main() -> None:
    job = Job(loss_fn=slow_loss)
    session = gt.Session()
    model = job.model()
    session.setup(model, job.make_optimizer(model), loss_fn=job.loss_fn)
    loader = session.setup_dataloader(job.data(), global_batch_size=job.batch_size)
    while True:
        for batch in loader:
            session.step(batch)


if __name__ == "__main__":
    main()
