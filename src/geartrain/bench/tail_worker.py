"""Runs on every rank of a tail benchmark: the tail fractions in turn, round by round.

Started by the launcher with the path of a ``TailSettings`` document.
"""

from __future__ import annotations

import itertools
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
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
from geartrain.bench.macro_settings import ReferenceLosses
from geartrain.bench.macro_worker import endless
from geartrain.bench.tail_result import (
    Condition,
    TailMeasurement,
    TailPhase,
    TailSettings,
    core_fractions_in_turn,
)
from geartrain.devices import Fleet
from geartrain.devices.emulation.control import CONTROL_NAME
from geartrain.session import Session
from geartrain.telemetry import read_document, write_document

_MAX_CHANGES = 1000
"""Of the devices' speeds in one phase; more than a phase lasts."""


class TailRank:
    """One rank of a tail benchmark."""

    def __init__(self, session: Session, settings: TailSettings) -> None:
        assert session.spec is not None
        self._session = session
        self._settings = settings
        self._run_dir = Path(session.spec.run_dir)
        self._devices = read_document(Path(session.spec.fleet_path), Fleet).devices
        self._core_fractions = [device.core_fraction or 1.0 for device in self._devices]
        self._windows = SourceWindows(settings.model.context)
        self._losses: list[float] = []
        self._phases: list[TailPhase] = []
        model = make_model(settings.model, settings.seed)
        session.setup(model, make_optimizer(model), loss_fn=byte_losses)
        self._batches = endless(
            session.setup_dataloader(
                self._windows,
                global_batch_size=settings.global_batch_size,
                seed=settings.seed,
                drop_last=True,
            )
        )

    def run(self) -> None:
        """Warm up, then measure all rounds, first on steady devices."""
        settings = self._settings
        self._session.print("measuring the model on every device, and warming up")
        for _, fraction in zip(
            range(settings.warmup_steps), itertools.cycle(settings.fractions), strict=False
        ):
            self._train(1)
            self._session.share_tail(fraction)
        for round_index in range(settings.num_rounds):
            self._measure_round("steady", round_index)
        for round_index in range(settings.num_rounds):
            self._measure_round("fluctuating", round_index)

    def measurement(self) -> TailMeasurement:
        """What was measured, and what one device comes to; on rank 0, after ``run``."""
        settings = self._settings
        # At full speed: nothing is measured any more.
        self._set_core_fractions([1.0, *self._core_fractions[1:]])
        batches = GlobalBatches(self._windows, settings.global_batch_size, settings.seed)
        losses = itertools.islice(
            train_plainly(settings.model, settings.seed, batches), settings.warmup_steps
        )
        return TailMeasurement(
            phases=tuple(self._phases),
            losses=tuple(self._losses),
            reference=ReferenceLosses(losses=tuple(losses)),
        )

    def _measure_round(self, condition: Condition, round_index: int) -> None:
        fractions = self._settings.fractions
        # Every other round backwards, so that no fraction always follows the same one.
        for fraction in reversed(fractions) if round_index % 2 else fractions:
            self._session.share_tail(fraction)
            if condition == "steady":
                phase = self._measure(condition, fraction, round_index)
            else:
                with self._fluctuating(seed=round_index):
                    phase = self._measure(condition, fraction, round_index)
            self._phases.append(phase)
            self._session.print(
                f"{condition}, round {round_index + 1}: tail {fraction:.0%}: "
                f"{phase.samples_per_s:.1f} samples/s"
            )

    def _measure(
        self, condition: Condition, fraction: float, round_index: int
    ) -> TailPhase:
        settings = self._settings
        dist.barrier()
        started_at_s = time.perf_counter()
        self._train(settings.steps_per_phase)
        dist.barrier()
        return TailPhase(
            condition=condition,
            tail_fraction=fraction,
            round_index=round_index,
            num_samples=settings.steps_per_phase * settings.global_batch_size,
            seconds=time.perf_counter() - started_at_s,
        )

    def _train(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self._losses.append(self._session.step(next(self._batches)))

    @contextmanager
    def _fluctuating(self, seed: int) -> Iterator[None]:
        """Change the devices' speeds meanwhile, alike for all fractions of a round."""
        if not self._session.is_main:
            yield
            return
        turns = core_fractions_in_turn(self._core_fractions, seed, _MAX_CHANGES)
        ended = threading.Event()

        def change() -> None:
            for core_fractions in turns:
                self._set_core_fractions(core_fractions)
                if ended.wait(self._settings.fluctuation_interval_s):
                    return

        thread = threading.Thread(target=change, name="fluctuation")
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    def _set_core_fractions(self, core_fractions: list[float] | tuple[float, ...]) -> None:
        ids = [device.device_id for device in self._devices]
        document = dict(zip(ids, core_fractions, strict=True))
        write_document(self._run_dir / CONTROL_NAME, document)


def main() -> None:
    """Measure, and have rank 0 write what came out."""
    settings = read_document(Path(sys.argv[1]), TailSettings)
    session = Session(seed=settings.seed)
    rank = TailRank(session, settings)
    rank.run()
    session.close()
    if session.is_main:
        assert session.spec is not None
        session.print("training on one device, for its losses")
        path = Path(session.spec.run_dir) / MEASUREMENT_NAME
        write_document(path, rank.measurement())
    # The interpreter's own clean-up takes seconds at a tenth of a core.
    os._exit(0)


if __name__ == "__main__":
    main()
