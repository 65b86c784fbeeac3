"""Runs on every rank: a fleet's throughput against its fastest device alone, in turn.

Started by the launcher with the path of a ``HarvestSettings`` document.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch.distributed as dist

from geartrain.bench.byte_gpt import (
    SourceWindows,
    byte_losses,
    make_model,
    make_optimizer,
)
from geartrain.bench.competitors import GlobalBatches, train_plainly
from geartrain.bench.fleet_run import MEASUREMENT_NAME
from geartrain.bench.gpu_settings import HarvestMeasurement, HarvestSettings
from geartrain.planner import ModelProfile, samples_per_s
from geartrain.session import Session
from geartrain.telemetry import read_document, write_document

_PLAIN_WARMUP_STEPS = 2


def measure_harvest(session: Session, settings: HarvestSettings) -> HarvestMeasurement:
    """Train in turn with the fleet and with rank 0's device alone."""
    assert session.spec is not None
    fleet_steps = _fleet_steps(session, settings)
    _run(fleet_steps, 1)  # measures and plans
    session.print(f"warming up for {settings.warmup_steps} steps")
    _run(fleet_steps, settings.warmup_steps)
    plain_steps = _plain_steps(session, settings) if session.is_main else None
    alone, fleet = [], []
    num_samples = settings.num_steps * settings.global_batch_size
    for round_index in range(settings.num_rounds):
        if plain_steps is not None:
            alone.append(num_samples / _run(plain_steps, settings.num_steps))
        dist.barrier()
        fleet.append(num_samples / _run(fleet_steps, settings.num_steps))
        if session.is_main:
            session.print(
                f"round {round_index + 1}: {session.device_id} alone {alone[-1]:.1f}, "
                f"the fleet {fleet[-1]:.1f} samples/s"
            )
    plan = session.current_plan
    assert plan is not None
    return HarvestMeasurement(
        alone_samples_per_s=tuple(alone), fleet_samples_per_s=tuple(fleet), plan=plan
    )


def _fleet_steps(session: Session, settings: HarvestSettings) -> Iterator[float]:
    model = make_model(settings.model, settings.seed)
    session.setup(model, make_optimizer(model), loss_fn=byte_losses)
    loader = session.setup_dataloader(
        SourceWindows(settings.model.context),
        global_batch_size=settings.global_batch_size,
        seed=settings.seed,
        drop_last=True,
    )
    for _ in itertools.count():
        for batch in loader:
            yield session.step(batch)


def _plain_steps(session: Session, settings: HarvestSettings) -> Iterator[float]:
    assert session.spec is not None
    profile = read_document(Path(session.spec.run_dir) / "model.json", ModelProfile)
    curve = profile.curves[0]
    sizes = [s for s in curve.micro_batch_sizes if s <= curve.max_micro_batch_size]
    batches = GlobalBatches(
        SourceWindows(settings.model.context, session.device),
        settings.global_batch_size,
        settings.seed,
    )
    steps = train_plainly(
        settings.model,
        settings.seed,
        batches,
        micro_batch_size=max(sizes, key=lambda size: samples_per_s(curve, size)),
        device=session.device,
    )
    _run(steps, _PLAIN_WARMUP_STEPS)
    return steps


def _run(steps: Iterator[float], num_steps: int) -> float:
    """Make steps, each of which ends with its loss on the host; returns seconds."""
    started_at_s = time.perf_counter()
    for _ in range(num_steps):
        next(steps)
    return time.perf_counter() - started_at_s


def main() -> None:
    """Measure, and have rank 0 write what came out."""
    settings = read_document(Path(sys.argv[1]), HarvestSettings)
    session = Session(seed=settings.seed)
    measurement = measure_harvest(session, settings)
    if session.is_main:
        assert session.spec is not None
        write_document(Path(session.spec.run_dir) / MEASUREMENT_NAME, measurement)


if __name__ == "__main__":
    main()
