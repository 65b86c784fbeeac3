"""``geartrain bench gpu``: a GPU alone, and together with this machine's CPU.

Torch-free: workers compute. All of it takes fleets as arguments, so that tests run the
same code on emulated devices. Untested on GPU hardware.
"""

from __future__ import annotations

import dataclasses
import statistics
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from geartrain.bench.fleet_run import (
    MEASUREMENT_NAME,
    Say,
    run_script,
    scratch_directory,
)
from geartrain.bench.gpu_settings import (
    ExactnessMeasurement,
    ExactnessSettings,
    HarvestMeasurement,
    HarvestSettings,
)
from geartrain.bench.macro_result import Flat, overhead_error, overhead_fraction
from geartrain.bench.macro_settings import (
    ModelSize,
    OneDeviceMeasurement,
    OneDeviceSettings,
)
from geartrain.devices import Fleet
from geartrain.devices.probe import probe_fleet, resolve_fleet
from geartrain.planner import ModelProfile, Plan, Replica, Stage
from geartrain.planner.explanation import explain
from geartrain.telemetry import read_document

GPU_KINDS = ("cuda", "rocm")

_CPU_SAMPLES = 3
_GPU_SAMPLES = 13
"""Uneven shares of the exactness check; plain DDP errs by 87 % on 13 + 3."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuOptions:
    """How much is measured."""

    model: ModelSize = field(
        default_factory=lambda: ModelSize(dim=512, num_layers=8, context=256)
    )
    """Large enough to keep a GPU busy."""
    exactness_model: ModelSize = field(default_factory=ModelSize)
    """Small enough for a float64 reference on the CPU."""
    num_pairs: int = 40
    batch_size: int = 64
    harvest: HarvestSettings = field(default_factory=HarvestSettings)


def run_gpu(say: Say) -> Flat:
    """Measure the first GPU of this machine, or say that there is none.

    Args:
        say: Told what goes on.

    Raises:
        DeviceError: If a worker failed.
    """
    devices = resolve_fleet(None).devices
    gpus = [device for device in devices if device.kind in GPU_KINDS]
    if not gpus:
        found = ", ".join(device.device_id for device in devices)
        reason = f"torch finds no CUDA or ROCm GPU here, only {found}"
        say(f"nothing to measure: {reason}")
        return {"available": False, "reason": reason}
    gpu = gpus[0]
    say(f"1 of 4: probing {gpu.device_id} ({gpu.name}) and the CPU")
    mixed = probe_fleet(resolve_fleet(f"{gpu.device_id},cpu"), on_progress=say)
    alone = Fleet(devices=mixed.devices[:1], spec=gpu.device_id)
    return {
        "available": True,
        "device_name": gpu.name,
        **_probe_keys(mixed),
        **measure(alone, mixed, GpuOptions(), say),
    }


def measure(alone: Fleet, mixed: Fleet, options: GpuOptions, say: Say) -> Flat:
    """Check exactness, overhead and harvest.

    Args:
        alone: The accelerator.
        mixed: The accelerator first, then slower devices.
        options: How much is measured.
        say: Told what goes on.
    """
    flat: Flat = {"fleet": mixed.spec, "labels": ",".join(mixed.labels)}
    say("2 of 4: gradients against one device")
    dtypes: tuple[Literal["float64", "float32"], ...] = ("float64", "float32")
    for name, fleet in (("one_device", alone), ("mixed", mixed)):
        for dtype in dtypes:
            found = _check_exactness(fleet, dtype, options, say)
            flat[f"gradient_error_{name}_{dtype}"] = found.gradient_error
            flat[f"loss_error_{name}_{dtype}"] = found.loss_error
    say("3 of 4: a session against a plain loop")
    loops = _compare_loops(alone, options, say)
    flat["overhead_fraction_one_device"] = overhead_fraction(loops)
    flat["overhead_fraction_one_device_error"] = overhead_error(loops)
    flat["overhead_clock"] = loops.clock
    say("4 of 4: the mixed fleet against the GPU alone")
    return flat | _harvest_keys(mixed, options.harvest, options.model, say)


def uneven_plan(fleet: Fleet) -> Plan:
    """Give the first device 13 samples and every other one 3."""
    replicas = []
    for index, device in enumerate(fleet.devices):
        share = _CPU_SAMPLES if index else _GPU_SAMPLES
        replicas.append(
            Replica(
                device_id=device.device_id,
                share=share,
                micro_batch_size=2,
                num_micro_batches=-(-share // 2),
            )
        )
    total = sum(replica.share for replica in replicas)
    stage = Stage(stage_index=0, replicas=tuple(replicas))
    return Plan(global_batch_size=total, stages=(stage,))


def _check_exactness(
    fleet: Fleet, dtype: Literal["float64", "float32"], options: GpuOptions, say: Say
) -> ExactnessMeasurement:
    settings = ExactnessSettings(
        plan=uneven_plan(fleet), dtype=dtype, model=options.exactness_model
    )
    with scratch_directory() as folder:
        run_script("exactness_worker", fleet, settings, Path(folder), say)
        return read_document(Path(folder) / MEASUREMENT_NAME, ExactnessMeasurement)


def _compare_loops(fleet: Fleet, options: GpuOptions, say: Say) -> OneDeviceMeasurement:
    settings = OneDeviceSettings(
        num_pairs=options.num_pairs, batch_size=options.batch_size, model=options.model
    )
    with scratch_directory() as folder:
        run_script("one_device", fleet, settings, Path(folder), say)
        return read_document(Path(folder) / MEASUREMENT_NAME, OneDeviceMeasurement)


def _harvest_keys(
    fleet: Fleet, settings: HarvestSettings, model: ModelSize, say: Say
) -> Flat:
    asked = dataclasses.replace(settings, model=model)
    with scratch_directory() as folder:
        run_script("harvest_worker", fleet, asked, Path(folder), say)
        measured = read_document(Path(folder) / MEASUREMENT_NAME, HarvestMeasurement)
        profile = read_document(Path(folder) / "model.json", ModelProfile)
    alone = statistics.median(measured.alone_samples_per_s)
    together = statistics.median(measured.fleet_samples_per_s)
    flat: Flat = {
        "alone_samples_per_s": alone,
        "mixed_samples_per_s": together,
        "harvest_fraction": together / alone - 1,
        "left_out": ",".join(measured.plan.left_out),
    }
    for row in explain(measured.plan, profile).rows:
        flat[f"share_{row.device_id}"] = row.share
        flat[f"note_{row.device_id}"] = row.note
    return flat


def _probe_keys(fleet: Fleet) -> Flat:
    return {
        f"probe_{device.device_id}_{dtype}_flop_per_s": rate.per_s
        for device in fleet.devices
        for dtype, rate in device.flop_per_s.items()
    }
