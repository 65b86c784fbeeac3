"""A script whose run directory lies on a disk that is full for a while."""

from __future__ import annotations

import contextlib
import sys
import time
from pathlib import Path
from typing import Any

import torch

import geartrain as gt
from small_models import mean_cross_entropy
from training_jobs import Job, make_adamw

FULL_FROM, FULL_UNTIL, NUM_STEPS = 10, 60, 80
SAMPLE_S = 0.004


def slow_loss(output: Any, batch: Any) -> torch.Tensor:
    time.sleep(SAMPLE_S * len(batch[0]))
    return mean_cross_entropy(output, batch)


def fill(path: Path) -> None:
    """Write until the disk takes no more."""
    with path.open("wb", buffering=0) as filler, contextlib.suppress(OSError):
        while filler.write(bytes(4096)):
            pass


def main(filler: Path) -> None:
    job = Job(make_optimizer=make_adamw)
    session = gt.Session()
    model = job.model()
    session.setup(model, job.make_optimizer(model), loss_fn=slow_loss)
    loader = session.setup_dataloader(job.data(), global_batch_size=job.batch_size)
    while session.step_index < NUM_STEPS:
        for batch in loader:
            if session.is_main and session.step_index == FULL_FROM:
                fill(filler)
            if session.is_main and session.step_index == FULL_UNTIL:
                filler.unlink()
            session.step(batch)
            if session.step_index == NUM_STEPS:
                break


if __name__ == "__main__":
    main(Path(sys.argv[1]))
