"""A script that ``geartrain run`` trains with, ends in the middle, and goes on with."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

import torch

import geartrain as gt
from small_models import mean_cross_entropy
from training_jobs import Job, flat_parameters, make_adamw

NUM_STEPS = 14


def main(result: Path, end_after: int) -> None:
    """Train; once ``end_after`` steps are saved, the launcher is killed."""
    job = Job(num_steps=NUM_STEPS, make_optimizer=make_adamw)
    session = gt.Session()
    model = job.model()
    optimizer = job.make_optimizer(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, gamma=0.5)
    session.setup(model, optimizer, loss_fn=mean_cross_entropy, lr_scheduler=scheduler)
    loader = session.setup_dataloader(job.data(), global_batch_size=job.batch_size)
    first, losses = session.step_index, []
    while session.step_index < NUM_STEPS:
        for batch in loader:
            losses.append(session.step(batch))
            if session.step_index == end_after and session.is_main:
                wait_for_version(result.parent)
                os.kill(os.getppid(), signal.SIGKILL)
                time.sleep(30)  # until the death of the parent ends this process
            if session.step_index == NUM_STEPS:
                break
    if session.is_main:
        found = {
            "first": first,
            "losses": losses,
            "parameters": flat_parameters(model).tolist(),
            "lr": scheduler.get_last_lr(),
        }
        result.write_text(json.dumps(found))


def wait_for_version(folder: Path) -> None:
    """Until the save of the run that goes on here is on the disk."""
    deadline_s = time.monotonic() + 30
    while time.monotonic() < deadline_s:
        if any(folder.glob("*/checkpoints/LATEST")):
            return
        time.sleep(0.01)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
