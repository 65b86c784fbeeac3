"""Runs a benchmark's worker script on a fleet and brings back what it wrote."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from geartrain.devices import Fleet
from geartrain.devices.emulation.network import NetworkSpec
from geartrain.errors import DeviceError
from geartrain.launch import LaunchSettings, launch
from geartrain.launch.settings import StreamName
from geartrain.telemetry import RunEvent, RunLogReader, StepRecord, write_document

Say = Callable[[str], None]
"""Takes a line of progress."""

MEASUREMENT_NAME = "macro.json"
"""Where a worker script writes what it measured, in the run directory."""
REFERENCE_NAME = "reference.json"
"""The losses of one device, in the run directory."""

_FOLDER = Path(__file__).parent
_STOP_TIMEOUT_S = 3.0
"""A benchmark that is interrupted has nothing worth waiting for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetRun:
    """What a run left behind."""

    steps: tuple[StepRecord, ...]
    events: tuple[RunEvent, ...]


class _Progress:
    """Hands the lines that rank 0 prints on as progress."""

    def __init__(self, say: Say) -> None:
        self._say = say

    def on_output(self, stream: StreamName, data: bytes) -> None:
        if stream == "stdout":
            for line in filter(None, data.decode(errors="replace").splitlines()):
                self._say(line)  # the newline may come as a piece of its own

    def on_notice(self, text: str) -> None:
        self._say(text)

    def on_tick(self) -> None:
        """Nothing is drawn between the lines."""


def run_script(  # noqa: PLR0913 - what to run, where, and who is told
    script_name: str,
    fleet: Fleet,
    settings: object,
    run_dir: Path,
    say: Say,
    *,
    links: NetworkSpec | None = None,
) -> FleetRun:
    """Run one of this room's worker scripts on a fleet.

    Args:
        script_name: Such as ``macro_worker``.
        fleet: Where.
        settings: A dataclass that the script reads from its first argument.
        run_dir: An existing folder; the script's results are in it afterwards.
        say: Told what goes on.
        links: Emulated links, each device a host of its own; None: without.

    Raises:
        DeviceError: If a worker failed; the message holds its traceback.
        KeyboardInterrupt: If the run was stopped.
    """
    settings_path = run_dir / "bench-settings.json"
    write_document(settings_path, settings)
    result = launch(
        LaunchSettings(
            script=_FOLDER / f"{script_name}.py",
            fleet=fleet,
            run_dir=run_dir,
            arguments=(str(settings_path),),
            links=links,
            # At full speed, before the devices are held to theirs.
            preload=(
                "torch",
                "geartrain.session",
                "geartrain.bench.competitors",
                "torch._dynamo",  # which DDP and optimizers import when first used
            ),
            stop_timeout_s=_STOP_TIMEOUT_S,
        ),
        _Progress(say),
    )
    if result.outcome == "stopped":
        raise KeyboardInterrupt
    if result.outcome == "failed":
        msg = f"{script_name} failed: {result.message}\n{result.details}".rstrip()
        raise DeviceError(msg)
    reader = RunLogReader(run_dir)
    run = FleetRun(steps=tuple(reader.new_steps()), events=tuple(reader.new_events()))
    reader.close()
    return run


def scratch_directory() -> tempfile.TemporaryDirectory[str]:
    """A folder for a run's files, removed when the benchmark ends."""
    return tempfile.TemporaryDirectory(prefix="geartrain-bench-")
