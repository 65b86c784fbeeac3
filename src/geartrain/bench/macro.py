"""``geartrain bench macro``: one unequal fleet, four ways to use it, in turn.

Three launches: the unequal fleet (each device alone, DDP, DDP with uneven batches,
geartrain, then a slow-down), two equal devices (geartrain against DDP), and one device
(geartrain against a plain loop, beside it the losses to compare with). Torch-free: all
that computes runs in worker processes.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from pathlib import Path

from geartrain.bench.fleet_run import (
    MEASUREMENT_NAME,
    REFERENCE_NAME,
    FleetRun,
    Say,
    run_script,
    scratch_directory,
)
from geartrain.bench.macro_report import MacroRaw
from geartrain.bench.macro_settings import (
    FleetMeasurement,
    FleetSettings,
    ModelSize,
    OneDeviceMeasurement,
    OneDeviceSettings,
    ReferenceLosses,
)
from geartrain.devices import Fleet
from geartrain.devices.emulation.network import NetworkSpec, parse_links
from geartrain.devices.host import cores_present
from geartrain.devices.probe import resolve_fleet
from geartrain.errors import ConfigError
from geartrain.telemetry import read_document

DEFAULT_FLEET = "emulated:0.8,0.4,0.2,0.1"


@dataclass(frozen=True, slots=True, kw_only=True)
class MacroOptions:
    """What the user asks for."""

    fleet: str = DEFAULT_FLEET
    quick: bool = False
    oversubscribe: bool = False
    global_batch_size: int | None = None
    """None: 256, or 64 with ``quick``."""
    links: str | None = None
    """Each device of the unequal fleet is a host of its own; None: no emulated links."""

    @property
    def batch_size(self) -> int:
        """The global batch."""
        return self.global_batch_size or (64 if self.quick else 256)


def run_macro(options: MacroOptions, say: Say) -> MacroRaw:
    """Measure everything.

    Args:
        options: What the user asks for.
        say: Told what goes on.

    Raises:
        ConfigError: If the fleet is not emulated or has a single device.
        DeviceError: If a worker failed.
        KeyboardInterrupt: If the benchmark was interrupted; nothing is left behind.
    """
    started_at_s = time.time()
    fleet = resolve_emulated(
        options.fleet, options.batch_size, oversubscribe=options.oversubscribe
    )
    links = options.links and parse_links(options.links, len(fleet.devices))
    over = f" over {options.links}" if options.links else ""
    say(f"1 of 3: {fleet.spec}{over}, four variants in turn, then a slow-down")
    unequal_settings = _unequal_settings(options)
    unequal, run = _run_fleet(fleet, unequal_settings, say, links or None)
    equal_fleet = _equal_fleet(fleet, options)
    say(f"2 of 3: {equal_fleet.spec}, DDP and geartrain in turn")
    equal, equal_run = _run_fleet(
        equal_fleet, _equal_settings(unequal_settings, options), say
    )
    say("3 of 3: one device, a session and a plain loop in turn")
    one_settings = _one_device_settings(unequal_settings, unequal, options)
    one_device, reference = _run_one_device(one_settings, say)
    return MacroRaw(
        started_at_s=started_at_s,
        wall_s=time.time() - started_at_s,
        quick=options.quick,
        fleet=fleet,
        settings=unequal_settings,
        unequal=unequal,
        steps=run.steps,
        events=run.events,
        equal=equal,
        equal_steps=equal_run.steps,
        one_device=one_device,
        reference=reference,
        links=links or None,
        links_spec=options.links,
    )


def default_output(
    name: str, fleet: str, at_s: float, folder: Path, *, quick: bool
) -> Path | None:
    """Where the raw result goes: the repository's results, if run there; else nowhere.

    A benchmark must not litter whatever folder it is started in.
    """
    results = folder / "benchmarks" / "results"
    if not results.is_dir():
        return None
    fleet = fleet.replace(":", "-").replace(",", "-").replace("/", "-")
    suffix = "-quick" if quick else ""
    stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime(at_s))
    return results / f"{name}-{fleet}{suffix}-{stamp}.json"


def resolve_emulated(
    spec: str, global_batch_size: int, *, oversubscribe: bool = False
) -> Fleet:
    """Read the spec of a fleet that can be compared with itself.

    Raises:
        ConfigError: If it is not emulated, has one device, or too many for the batch.
    """
    fleet = resolve_fleet(spec, oversubscribe=oversubscribe, probe=False)
    if len(fleet.devices) < 2 or any(d.kind != "emulated" for d in fleet.devices):  # noqa: PLR2004
        msg = (
            f"fleet {spec!r} must be two or more emulated devices, such as "
            f"{DEFAULT_FLEET}; for GPUs there is geartrain bench gpu"
        )
        raise ConfigError(msg)
    if global_batch_size < len(fleet.devices):
        msg = (
            f"global batch size {global_batch_size} is smaller than the number of "
            f"devices, {len(fleet.devices)}; give a larger one"
        )
        raise ConfigError(msg)
    return fleet


def _equal_fleet(fleet: Fleet, options: MacroOptions) -> Fleet:
    """Two devices as fast as the fleet's fastest, if the cores allow it."""
    fastest = max(device.core_fraction or 0.0 for device in fleet.devices)
    if not options.oversubscribe:
        fastest = min(fastest, cores_present() / 2)
    return resolve_fleet(
        f"emulated:{fastest:g},{fastest:g}",
        oversubscribe=options.oversubscribe,
        probe=False,
    )


def _unequal_settings(options: MacroOptions) -> FleetSettings:
    settings = FleetSettings(
        variants=("alone", "ddp", "ddp_uneven", "geartrain"),
        global_batch_size=options.batch_size,
        slowdown_factor=2.0,
    )
    if not options.quick:
        return settings
    return replace(
        settings,
        model=ModelSize(context=64),
        warmup_steps=4,
        num_rounds=2,
        scanned_sizes=(4, 8),
        largest_micro_batch_size=8,
        alone_s=1.0,
        geartrain_steps=3,
        slowdown_max_steps=8,
        slowdown_steps_after=3,
    )


def _equal_settings(unequal: FleetSettings, options: MacroOptions) -> FleetSettings:
    return replace(
        unequal,
        variants=("ddp", "geartrain"),
        warmup_steps=4,
        num_rounds=2 if options.quick else 5,
        ddp_steps=2,
        geartrain_steps=2,
        slowdown_factor=None,
    )


def _one_device_settings(
    fleet_settings: FleetSettings, measured: FleetMeasurement, options: MacroOptions
) -> OneDeviceSettings:
    return OneDeviceSettings(
        num_pairs=10 if options.quick else 40,
        reference_steps=len(measured.losses),
        reference_batch_size=fleet_settings.global_batch_size,
        seed=fleet_settings.seed,
        model=fleet_settings.model,
    )


def _run_fleet(
    fleet: Fleet, settings: FleetSettings, say: Say, links: NetworkSpec | None = None
) -> tuple[FleetMeasurement, FleetRun]:
    with scratch_directory() as folder:
        run = run_script("macro_worker", fleet, settings, Path(folder), say, links=links)
        return read_document(Path(folder) / MEASUREMENT_NAME, FleetMeasurement), run


def _run_one_device(
    settings: OneDeviceSettings, say: Say
) -> tuple[OneDeviceMeasurement, ReferenceLosses]:
    # A core each where there are two; CPU time is what counts, so sharing one is no harm.
    fleet = resolve_fleet("emulated:1.0,1.0", oversubscribe=True, probe=False)
    with scratch_directory() as folder:
        run_script("one_device", fleet, settings, Path(folder), say)
        return (
            read_document(Path(folder) / MEASUREMENT_NAME, OneDeviceMeasurement),
            read_document(Path(folder) / REFERENCE_NAME, ReferenceLosses),
        )
