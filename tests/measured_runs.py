"""Measurements as a macro benchmark would have brought them back."""

from __future__ import annotations

from dataclasses import replace

from example_fleets import emulated_fleet
from geartrain.bench.macro_report import MacroRaw
from geartrain.bench.macro_settings import (
    AlonePhase,
    FleetMeasurement,
    FleetSettings,
    OneDeviceMeasurement,
    Phase,
    ReferenceLosses,
    Slowdown,
    Variant,
)
from geartrain.telemetry import RunEvent, StepRecord

KEYS_OF_THE_CLAIMS = {
    "fleet",
    "sum_speeds_samples_per_s",
    "ddp_samples_per_s",
    "geartrain_samples_per_s",
    "efficiency",
    "speedup_vs_ddp",
    "load_balance_error",
    "loss_difference_vs_one_device",
    "ratio_to_ddp_equal_fleet",
    "slowdown_detect_steps",
    "slowdown_replan_steps",
    "slowdown_recovered_fraction",
    "overhead_fraction_one_device",
}

IDS = ("emulated:0", "emulated:1")
SPEEDS = {"emulated:0": 60.0, "emulated:1": 20.0}


def alone_phases(round_index: int) -> list[AlonePhase]:
    """Each device at its best size, and at one a fifth slower."""
    return [
        AlonePhase(
            device_id=device_id,
            round_index=round_index,
            micro_batch_size=size,
            num_samples=round(10 * speed),
            compute_s=10.0 * slower,
            optimizer_s=0.0,
        )
        for device_id, speed in SPEEDS.items()
        for size, slower in ((4, 1.0), (8, 1.2))
    ]


def phase(variant: Variant, round_index: int, samples_per_s: float) -> Phase:
    return Phase(
        variant=variant,
        round_index=round_index,
        num_samples=1000,
        seconds=1000 / samples_per_s,
    )


def fleet_measurement() -> FleetMeasurement:
    """Three rounds: DDP at 40, geartrain at 72 to 76 of 80 samples/s."""
    phases = []
    for index, speed in enumerate((72.0, 74.0, 76.0)):
        phases += [
            phase("ddp", index, 40.0),
            phase("ddp_uneven", index, 60.0),
            phase("geartrain", index, speed),
        ]
    return FleetMeasurement(
        device_ids=IDS,
        core_fractions=(0.6, 0.2),
        num_parameters=1000,
        micro_batch_sizes=(4, 4),
        ddp_shares=(20, 20),
        ddp_uneven_shares=(30, 10),
        geartrain_shares=(30, 10),
        phases=tuple(phases),
        alone=tuple(p for index in range(3) for p in alone_phases(index)),
        losses=(4.0, 2.0, 1.0, 1.0),
        num_warmup_steps=2,
        slowdown=Slowdown(
            device_id="emulated:0",
            fraction_before=0.6,
            fraction_after=0.3,
            changed_at_step=4,
            replanned_at_step=8,
            step_s=(1.0, 1.0, 1.0, 1.0, 0.8, 0.8),
        ),
    )


def step_records() -> tuple[StepRecord, ...]:
    """Four steps; in the two warm-up ones the load is far from balanced."""
    return tuple(
        StepRecord(
            step=step,
            device_id=device_id,
            at_s=float(step),
            step_s=1.0,
            num_samples=10,
            compute_s=busy_s,
            comm_s=0.0,
            idle_s=0.0,
            data_s=0.0,
            peak_memory_bytes=0,
            loss=1.0,
        )
        for step in range(4)
        for device_id, busy_s in zip(
            IDS, (0.1, 0.9) if step < 2 else (0.42, 0.38), strict=True
        )
    )


def event(kind: str, step: int, device_id: str = "") -> RunEvent:
    return RunEvent(step=step, at_s=0.0, kind=kind, message="", device_id=device_id)  # type: ignore[arg-type]  # a Literal


def raw_result() -> MacroRaw:
    measured = fleet_measurement()
    equal = replace(
        measured,
        phases=tuple(
            p
            for index, drift in enumerate((1.0, 2.0, 4.0))
            for p in (
                phase("ddp", index, 50 * drift),
                phase("geartrain", index, 49 * drift),
            )
        ),
    )
    return MacroRaw(
        started_at_s=0.0,
        wall_s=1.0,
        quick=False,
        fleet=emulated_fleet(0.6, 0.2),
        settings=FleetSettings(
            variants=("alone", "ddp", "ddp_uneven", "geartrain"), global_batch_size=40
        ),
        unequal=measured,
        steps=step_records(),
        events=(
            event("slowdown", 3, "emulated:1"),
            event("slowdown", 7, "emulated:0"),
            event("replanned", 8),
        ),
        equal=equal,
        equal_steps=(),
        one_device=OneDeviceMeasurement(
            session_s=(1.01, 2.02, 4.04, 8.08),
            plain_s=(1.0, 2.0, 4.0, 8.0),
            clock="process CPU time",
        ),
        reference=ReferenceLosses(losses=(4.0, 2.0, 1.0, 0.8)),
    )
