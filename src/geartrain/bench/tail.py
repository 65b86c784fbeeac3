"""``geartrain bench tail``: is it worth sharing the tail of a step? Torch-free."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from geartrain.bench.fleet_run import (
    MEASUREMENT_NAME,
    Say,
    run_script,
    scratch_directory,
)
from geartrain.bench.macro import DEFAULT_FLEET, resolve_emulated
from geartrain.bench.macro_settings import ModelSize
from geartrain.bench.provenance import command_line, current_commit
from geartrain.bench.tail_result import (
    FLUCTUATION,
    TailMeasurement,
    TailResult,
    TailSettings,
    flatten_tail,
)
from geartrain.devices import Fleet
from geartrain.devices.host import cores_present
from geartrain.errors import ConfigError
from geartrain.launch.run_directory import collect_versions
from geartrain.telemetry import read_document


@dataclass(frozen=True, slots=True, kw_only=True)
class TailOptions:
    """What the user asks for."""

    fleet: str = DEFAULT_FLEET
    quick: bool = False

    @property
    def settings(self) -> TailSettings:
        """How much is measured."""
        if not self.quick:
            return TailSettings()
        return TailSettings(
            global_batch_size=64,
            model=ModelSize(context=64),
            warmup_steps=8,
            num_rounds=3,
            fluctuation_interval_s=0.5,
        )


def run_tail(options: TailOptions, say: Say) -> TailResult:
    """Measure everything.

    Args:
        options: What the user asks for.
        say: Told what goes on.

    Raises:
        ConfigError: If the fleet is not emulated, has a single device, or the cores do
            not allow its devices to become faster.
        DeviceError: If a worker failed.
        KeyboardInterrupt: If the benchmark was interrupted; nothing is left behind.
    """
    started_at_s = time.time()
    settings = options.settings
    fleet = resolve_emulated(options.fleet, settings.global_batch_size)
    _check_room(fleet)
    with scratch_directory() as folder:
        run_script("tail_worker", fleet, settings, Path(folder), say)
        measurement = read_document(Path(folder) / MEASUREMENT_NAME, TailMeasurement)
    wall_s = time.time() - started_at_s
    flat = flatten_tail(measurement, settings, fleet)
    return TailResult(
        result=flat | {"quick": options.quick, "wall_s": wall_s},
        versions=collect_versions(),
        command=command_line(),
        commit=current_commit(Path.cwd()),
        started_at_s=started_at_s,
        wall_s=wall_s,
        fleet=fleet,
        settings=settings,
        measurement=measurement,
    )


def _check_room(fleet: Fleet) -> None:
    """Whether all devices may become faster at once."""
    total = sum(device.core_fraction or 0.0 for device in fleet.devices)
    most = cores_present() / (1 + FLUCTUATION)
    if total > most:
        msg = (
            f"the core fractions of {fleet.spec} add up to {total:g}, but devices vary by "
            f"{FLUCTUATION:.0%} here; give a fleet of {most:.3g} cores at most"
        )
        raise ConfigError(msg)
