"""Runs on every rank of a macro benchmark: the variants in turn, round by round.

Started by the launcher with the path of a ``FleetSettings`` document.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch.distributed as dist

from geartrain.bench.byte_gpt import (
    SourceWindows,
    byte_losses,
    make_model,
    make_optimizer,
)
from geartrain.bench.competitors import AloneTrainer, DdpTrainer, GlobalBatches
from geartrain.bench.fleet_run import MEASUREMENT_NAME
from geartrain.bench.macro_settings import (
    AlonePhase,
    FleetMeasurement,
    FleetSettings,
    Phase,
    Slowdown,
    Variant,
)
from geartrain.data.loader import ShareLoader
from geartrain.data.split import apportion
from geartrain.devices import Fleet
from geartrain.devices.emulation.control import set_running_core_fraction
from geartrain.session import Session
from geartrain.telemetry import read_document, write_document

_ALONE_SIZES = 2
"""The two fastest micro-batch sizes of the scan are tried, the better one counts."""

_SCAN_S = 0.5
_LONGEST_SCAN_S = 2.0
"""No size is scanned of which one micro-batch should take longer."""


class MacroRank:
    """One rank of a macro benchmark."""

    def __init__(self, session: Session, settings: FleetSettings) -> None:
        assert session.spec is not None
        self._session = session
        self._settings = settings
        self._run_dir = Path(session.spec.run_dir)
        self._fleet = read_document(Path(session.spec.fleet_path), Fleet)
        windows = SourceWindows(settings.model.context)
        self._global_batches = GlobalBatches(
            windows, settings.global_batch_size, settings.seed
        )
        self._losses: list[float] = []
        self._phases: list[Phase] = []
        self._alone: list[AlonePhase] = []
        self._batches = self._set_up_geartrain(windows)

    def run(self) -> FleetMeasurement:
        """Warm up, measure all rounds, then slow a device where that is asked for."""
        settings = self._settings
        self._say("measuring the model on every device")
        self._train(1)  # measures and plans
        self._say("looking for each device's best micro-batch size")
        self._set_up_competitors()
        self._say(f"warming up for {settings.warmup_steps} steps")
        self._train(settings.warmup_steps - 1)
        for round_index in range(settings.num_rounds):
            for variant in settings.variants:
                self._measure(variant, round_index)
        losses = tuple(self._losses)
        shares = self._plan_shares()
        slowdown = self._slow_down() if settings.slowdown_factor is not None else None
        return FleetMeasurement(
            device_ids=tuple(device.device_id for device in self._fleet.devices),
            core_fractions=self._core_fractions,
            num_parameters=sum(p.numel() for p in self._model.parameters()),
            micro_batch_sizes=self._micro_batch_sizes,
            ddp_shares=self._equal_shares,
            ddp_uneven_shares=self._uneven_shares,
            geartrain_shares=shares,
            phases=tuple(self._phases),
            alone=tuple(self._alone),
            losses=losses,
            num_warmup_steps=settings.warmup_steps,
            slowdown=slowdown,
        )

    # -- set-up -------------------------------------------------------------------

    def _set_up_geartrain(self, windows: SourceWindows) -> Iterator[Any]:
        settings = self._settings
        self._model = make_model(settings.model, settings.seed)
        self._session.setup(
            self._model,
            make_optimizer(self._model),
            loss_fn=byte_losses,
            micro_batch_size=settings.largest_micro_batch_size,
        )
        loader = self._session.setup_dataloader(
            windows,
            global_batch_size=settings.global_batch_size,
            seed=settings.seed,
            drop_last=True,
        )
        return endless(loader)

    def _set_up_competitors(self) -> None:
        settings, rank = self._settings, self._session.rank
        world_size = self._session.world_size
        self._core_fractions = tuple(d.core_fraction or 1.0 for d in self._fleet.devices)
        self._alone_trainer = AloneTrainer(
            settings.model, settings.seed, self._global_batches
        )
        self._own_sizes = self._scan_sizes()
        best: list[int] = [0] * world_size
        dist.all_gather_object(best, self._own_sizes[0])
        self._micro_batch_sizes = tuple(best)
        total = settings.global_batch_size
        self._equal_shares = apportion(total, [1] * world_size)
        weights = [round(1000 * fraction) for fraction in self._core_fractions]
        self._uneven_shares = apportion(total, weights)
        self._ddp: dict[str, DdpTrainer] = {}
        for name, shares in (
            ("ddp", self._equal_shares),
            ("ddp_uneven", self._uneven_shares),
        ):
            if name not in settings.variants:
                continue
            trainer = DdpTrainer(
                make_model(settings.model, settings.seed),
                shares,
                rank,
                self._micro_batch_sizes[rank],
                self._global_batches,
            )
            trainer.warm_up()
            self._ddp[name] = trainer

    def _scan_sizes(self) -> list[int]:
        """Micro-batch sizes of this device, the fastest first; all scan at once."""
        rates: dict[int, float] = {}
        for size in self._settings.scanned_sizes:
            if rates and size / max(rates.values()) > _LONGEST_SCAN_S:
                break
            phase = self._alone_trainer.run("", 0, size, _SCAN_S)
            rates[size] = phase.num_samples / phase.compute_s
        return sorted(rates, key=lambda size: -rates[size])

    # -- variants -----------------------------------------------------------------

    def _measure(self, variant: Variant, round_index: int) -> None:
        if variant == "alone":
            self._measure_alone(round_index)
            return
        settings = self._settings
        num_steps = {
            "ddp": settings.ddp_steps,
            "ddp_uneven": settings.ddp_uneven_steps,
            "geartrain": settings.geartrain_steps,
        }[variant]
        run: Callable[[int], None] = self._train
        if variant != "geartrain":
            trainer = self._ddp[variant]

            def run(num_steps: int) -> None:
                for _ in range(num_steps):
                    trainer.step()

        dist.barrier()
        started_at_s = time.perf_counter()
        run(num_steps)
        dist.barrier()
        phase = Phase(
            variant=variant,
            round_index=round_index,
            num_samples=num_steps * settings.global_batch_size,
            seconds=time.perf_counter() - started_at_s,
        )
        self._phases.append(phase)
        self._say_phase(phase)

    def _measure_alone(self, round_index: int) -> None:
        rank = self._session.rank
        sizes = self._own_sizes[:_ALONE_SIZES]
        device_id = self._fleet.devices[rank].device_id
        dist.barrier()
        own = [
            self._alone_trainer.run(
                device_id, round_index, size, self._settings.alone_s / len(sizes)
            )
            for size in sizes
        ]
        gathered: list[list[AlonePhase]] = [[] for _ in range(self._session.world_size)]
        dist.all_gather_object(gathered, own)
        self._alone += [phase for phases in gathered for phase in phases]
        total = self._settings.global_batch_size
        speed = sum(
            max(phase.samples_per_s(total) for phase in phases) for phases in gathered
        )
        self._say(f"round {round_index + 1}: alone: {speed:.1f} samples/s in all")

    def _train(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self._losses.append(self._session.step(next(self._batches)))

    def _slow_down(self) -> Slowdown:
        settings, session = self._settings, self._session
        assert settings.slowdown_factor is not None
        before = self._core_fractions[0]
        after = before / settings.slowdown_factor
        device_id = self._fleet.devices[0].device_id
        self._say(f"slowing {device_id} from {before:g} to {after:g} of a core")
        dist.barrier()
        changed_at = session.step_index
        if session.is_main:
            set_running_core_fraction(device_id, after, self._run_dir)
        dist.barrier()
        fingerprint = self._fingerprint()
        replanned_at: int | None = None
        step_s: list[float] = []
        while len(step_s) < settings.slowdown_max_steps:
            started_at_s = time.perf_counter()
            self._train(1)
            step_s.append(time.perf_counter() - started_at_s)
            if replanned_at is None and self._fingerprint() != fingerprint:
                replanned_at = session.step_index
            if (
                replanned_at is not None
                and session.step_index - replanned_at >= settings.slowdown_steps_after
            ):
                break
        return Slowdown(
            device_id=device_id,
            fraction_before=before,
            fraction_after=after,
            changed_at_step=changed_at,
            replanned_at_step=replanned_at,
            step_s=tuple(step_s),
        )

    # -- small things -------------------------------------------------------------

    def _fingerprint(self) -> str:
        plan = self._session.current_plan
        assert plan is not None
        return plan.fingerprint

    def _plan_shares(self) -> tuple[int, ...]:
        plan = self._session.current_plan
        assert plan is not None
        shares = {replica.device_id: replica.share for replica in plan.replicas}
        return tuple(shares.get(device.device_id, 0) for device in self._fleet.devices)

    def _say(self, text: str) -> None:
        self._session.print(text)

    def _say_phase(self, phase: Phase) -> None:
        self._say(
            f"round {phase.round_index + 1}: {phase.variant}: "
            f"{phase.samples_per_s:.1f} samples/s"
        )


def endless(loader: ShareLoader) -> Iterator[Any]:
    """Epoch after epoch."""
    while True:
        yield from loader


def main() -> None:
    """Measure, and have rank 0 write what came out."""
    settings = read_document(Path(sys.argv[1]), FleetSettings)
    session = Session(seed=settings.seed)
    rank = MacroRank(session, settings)
    measurement = rank.run()
    if session.is_main:
        assert session.spec is not None
        write_document(Path(session.spec.run_dir) / MEASUREMENT_NAME, measurement)
    session.close()
    # The interpreter's own clean-up takes seconds at a tenth of a core.
    os._exit(0)


if __name__ == "__main__":
    main()
