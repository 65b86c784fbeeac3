"""Run directories as a run would have written them."""

from __future__ import annotations

from pathlib import Path

from geartrain.devices.profile import DeviceProfile, Fleet
from geartrain.telemetry import (
    RunEvent,
    RunLogWriter,
    RunManifest,
    StepRecord,
    write_document,
)

FRACTIONS = (0.8, 0.4, 0.2, 0.1)


def make_records(
    num_steps: int,
    shares: tuple[int, ...] = (34, 17, 9, 4),
    busy_s: tuple[float, ...] = (0.9, 0.88, 0.92, 0.8),
    exchange_s: float = 0.05,
) -> list[StepRecord]:
    """Steps of one second, some of whose time is idle."""
    return [
        StepRecord(
            step=step,
            device_id=f"emulated:{index}",
            at_s=1000.0 + step + 1,
            step_s=1.0,
            num_samples=share,
            compute_s=busy,
            comm_s=exchange_s,
            idle_s=1.0 - busy - exchange_s - 0.01,
            data_s=0.01,
            peak_memory_bytes=2**20,
            loss=5.0 * 0.98**step + 1,
        )
        for step in range(num_steps)
        for index, (share, busy) in enumerate(zip(shares, busy_s, strict=True))
    ]


def planned(step: int = 0, bound: float = 70.0, total_steps: int = 100) -> RunEvent:
    """The event of a plan."""
    return RunEvent(
        step=step,
        at_s=1000.0,
        kind="planned",
        message="planned 4 devices",
        values={"bound_samples_per_s": bound, "total_steps": total_steps},
    )


def write_run(
    run_dir: Path,
    records: list[StepRecord],
    events: list[RunEvent],
    script: str = "train.py",
) -> Path:
    """Write a run directory."""
    run_dir.mkdir(parents=True, exist_ok=True)
    devices = tuple(
        DeviceProfile(
            device_id=f"emulated:{index}",
            node_id="here",
            vendor="emulated",
            kind="emulated",
            name="emulated CPU",
            memory_bytes=2**30,
            core_fraction=fraction,
            source="emulated",
        )
        for index, fraction in enumerate(FRACTIONS)
    )
    fleet = Fleet(devices=devices, spec="emulated:0.8,0.4,0.2,0.1")
    write_document(run_dir / "fleet.json", fleet)
    manifest = RunManifest(
        run_id=run_dir.name,
        started_at_s=1000.0,
        script=script,
        arguments=("--steps", "100"),
        fleet_spec=fleet.spec,
        labels=fleet.labels,
        versions={"geartrain": "0.1.0", "torch": "2.13.0"},
    )
    write_document(run_dir / "run.json", manifest)
    log = RunLogWriter(run_dir)
    log.add_steps(records)
    for event in events:
        log.add_event(event)
    log.close()
    return run_dir
