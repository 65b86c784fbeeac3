"""Reads a run directory, finished or half-written."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from geartrain.devices.profile import Fleet
from geartrain.errors import ConfigError
from geartrain.planner import Plan
from geartrain.telemetry import (
    RunEvent,
    RunLogReader,
    RunManifest,
    StepRecord,
    read_document,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFiles:
    """All that a run has written down so far."""

    run_dir: Path
    manifest: RunManifest
    fleet: Fleet
    plan: Plan | None
    records: tuple[StepRecord, ...]
    events: tuple[RunEvent, ...]


def read_plan(run_dir: Path) -> Plan | None:
    """The run's newest plan, if it has got that far."""
    path = run_dir / "plan.json"
    return read_document(path, Plan) if path.exists() else None


def read_run(run_dir: Path) -> RunFiles:
    """Read a run directory; a run that still goes on is read as far as it is.

    Raises:
        ConfigError: If it is not a run directory, or holds no step yet.
    """
    if not run_dir.is_dir():
        msg = f"no run directory at {run_dir}; geartrain run says where it wrote its run"
        raise ConfigError(msg)
    if not (run_dir / "run.json").exists():
        msg = f"{run_dir} holds no run.json; name the directory of one run, not above it"
        raise ConfigError(msg)
    reader = RunLogReader(run_dir)
    try:
        records, events = tuple(reader.new_steps()), tuple(reader.new_events())
    finally:
        reader.close()
    if not records:
        msg = f"{run_dir} holds no step; wait until the run has made one"
        raise ConfigError(msg)
    return RunFiles(
        run_dir=run_dir,
        manifest=read_document(run_dir / "run.json", RunManifest),
        fleet=read_document(run_dir / "fleet.json", Fleet),
        plan=read_plan(run_dir),
        records=records,
        events=events,
    )
