"""A script that keeps an average of its weights, and in which a worker is killed."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import geartrain as gt
from small_models import mean_cross_entropy
from training_jobs import Job, flat_parameters, make_adamw

KILLED_AT = 6
STEPS_TOGETHER = 6
SAMPLE_S = 0.004
LIMIT_S = 100.0
AVERAGE: Any = get_ema_multi_avg_fn(0.9)  # type: ignore[no-untyped-call] # torch's


def slow_loss(output: Any, batch: Any) -> torch.Tensor:
    time.sleep(SAMPLE_S * len(batch[0]))
    return mean_cross_entropy(output, batch)


def is_together(session: gt.Session) -> bool:
    """Whether all devices take part, after one of them had been lost."""
    plan = session.current_plan
    return (
        plan is not None
        and session.step_index > KILLED_AT + 1
        and len(plan.replicas) == session.world_size
    )


def main(folder: Path, victim: int) -> None:
    """Train until the victim, which is killed once, has made some steps again."""
    job = Job(make_optimizer=make_adamw)
    session = gt.Session()
    model = job.model()
    optimizer = job.make_optimizer(model)
    session.setup(model, optimizer, loss_fn=slow_loss)
    ema = AveragedModel(model, multi_avg_fn=AVERAGE)
    session.track(ema=ema)
    session.after_step(lambda: ema.update_parameters(model))
    loader = session.setup_dataloader(job.data(), global_batch_size=job.batch_size)
    first, num_averaged = session.step_index, int(ema.n_averaged)
    was_killed = folder / "was-killed"
    num_together, deadline_s = 0, time.monotonic() + LIMIT_S
    while num_together < STEPS_TOGETHER and time.monotonic() < deadline_s:
        for batch in loader:
            is_its_turn = (session.rank, session.step_index) == (victim, KILLED_AT)
            if is_its_turn and not was_killed.exists():
                was_killed.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            session.step(batch)
            num_together += is_together(session) or victim < 0
            if num_together == STEPS_TOGETHER:
                break
    found = {
        "first": first,
        "num_averaged_at_first": num_averaged,
        "step": session.step_index,
        "num_averaged": int(ema.n_averaged),
        "ema": flat_parameters(ema).tolist(),
        "weights": flat_parameters(model).tolist(),
    }
    (folder / f"{session.rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
