"""Session.step against a plain loop on one device; and the losses of one device.

Started by the launcher with the path of a ``OneDeviceSettings`` document. Rank 0 runs
both loops in turn, each on a model of its own; a second rank, if there is one, computes
the reference losses meanwhile.
"""

from __future__ import annotations

import dataclasses
import itertools
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch.utils.data import DataLoader, Subset

from geartrain.bench.byte_gpt import (
    Batch,
    SourceWindows,
    byte_losses,
    make_model,
    make_optimizer,
)
from geartrain.bench.competitors import GlobalBatches, train_plainly
from geartrain.bench.fleet_run import MEASUREMENT_NAME, REFERENCE_NAME
from geartrain.bench.macro_settings import (
    OneDeviceMeasurement,
    OneDeviceSettings,
    ReferenceLosses,
)
from geartrain.data.order import GlobalOrder
from geartrain.devices import Fleet
from geartrain.parallel.worker_spec import WorkerSpec
from geartrain.session import Session
from geartrain.telemetry import read_document, write_document

_SAY_EVERY = 10


def compare_loops(
    spec: WorkerSpec, settings: OneDeviceSettings, say: Callable[[str], None]
) -> OneDeviceMeasurement:
    """Time a session's steps and plain ones in turn.

    Args:
        spec: Of a world of one rank.
        settings: What to run.
        say: Told what goes on.
    """
    session = Session(seed=settings.seed, spec=spec)
    device = session.device
    clock = time.process_time if device.type == "cpu" else time.perf_counter
    session_step = _session_steps(session, settings)
    plain_step = _plain_steps(device, settings)
    session_s: list[float] = []
    plain_s: list[float] = []
    # Each goes first in turn: what runs second finds other caches.
    both = [(session_step, session_s), (plain_step, plain_s)]
    for pair in range(settings.num_pairs + 1):
        for step, times in both if pair % 2 else reversed(both):
            started_at_s = clock()
            next(step)
            times.append(clock() - started_at_s)
        if pair % _SAY_EVERY == 0:
            say(f"one device: pair {pair} of {settings.num_pairs}")
    session.close()
    return OneDeviceMeasurement(
        session_s=tuple(session_s[1:]),
        plain_s=tuple(plain_s[1:]),
        clock="process CPU time" if device.type == "cpu" else "wall time",
    )


def _session_steps(session: Session, settings: OneDeviceSettings) -> Iterator[float]:
    model = make_model(settings.model, settings.seed)
    session.setup(model, make_optimizer(model), loss_fn=byte_losses)
    loader = session.setup_dataloader(
        SourceWindows(settings.model.context),
        global_batch_size=settings.batch_size,
        drop_last=True,
    )
    for _ in itertools.count():
        for batch in loader:
            yield session.step(batch)


def _plain_steps(device: torch.device, settings: OneDeviceSettings) -> Iterator[float]:
    """The loop that a user has before geartrain, over the same batches."""
    windows = SourceWindows(settings.model.context)
    order = GlobalOrder(
        num_samples=len(windows),
        global_batch_size=settings.batch_size,
        seed=settings.seed,
        drop_last=True,
    )
    model = make_model(settings.model, settings.seed).to(device)
    optimizer = make_optimizer(model)
    for epoch in itertools.count():
        shuffled = Subset(windows, order.permutation(epoch).tolist())
        loader: DataLoader[Batch] = DataLoader(
            shuffled, batch_size=settings.batch_size, drop_last=True
        )
        for inputs, targets in loader:
            batch = inputs.to(device), targets.to(device)
            optimizer.zero_grad()
            loss = byte_losses(model(batch[0]), batch).mean()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            yield float(loss)


def reference_losses(settings: OneDeviceSettings) -> ReferenceLosses:
    """The losses that one device's plain loop comes to over the fleet's batches."""
    windows = SourceWindows(settings.model.context)
    batches = GlobalBatches(windows, settings.reference_batch_size, settings.seed)
    steps = train_plainly(settings.model, settings.seed, batches)
    losses = itertools.islice(steps, settings.reference_steps)
    return ReferenceLosses(losses=tuple(losses))


def main() -> None:
    """Run this rank's part, and write what came out."""
    settings = read_document(Path(sys.argv[1]), OneDeviceSettings)
    world = Session(seed=settings.seed)
    assert world.spec is not None
    run_dir = Path(world.spec.run_dir)
    if world.rank == 0:
        spec = _spec_of_one(world.spec, run_dir)
        measurement = compare_loops(spec, settings, world.print)
        write_document(run_dir / MEASUREMENT_NAME, measurement)
    if world.rank == world.world_size - 1 and settings.reference_steps:
        write_document(run_dir / REFERENCE_NAME, reference_losses(settings))


def _spec_of_one(spec: WorkerSpec, run_dir: Path) -> WorkerSpec:
    """This rank's device as a fleet of its own, with the run log of any run."""
    folder = run_dir / "one-device"
    device = read_document(Path(spec.fleet_path), Fleet).devices[spec.rank]
    fleet_path = folder / "fleet.json"
    write_document(fleet_path, Fleet(devices=(device,)))
    return dataclasses.replace(
        spec, rank=0, world_size=1, fleet_path=str(fleet_path), run_dir=str(folder)
    )


if __name__ == "__main__":
    main()
