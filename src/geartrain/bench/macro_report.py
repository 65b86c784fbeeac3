"""What a macro benchmark says: one flat object for programs, a table for people."""

from __future__ import annotations

from dataclasses import dataclass

from geartrain.bench.link_bound import exchange_bound_s, step_bound
from geartrain.bench.macro_result import (
    Flat,
    alone_samples_per_s,
    alone_spread_fraction,
    judge_slowdown,
    load_balance_error,
    loss_difference,
    median_ratio,
    overhead_error,
    overhead_fraction,
    throughput,
)
from geartrain.bench.macro_settings import (
    FleetMeasurement,
    FleetSettings,
    OneDeviceMeasurement,
    ReferenceLosses,
)
from geartrain.devices import Fleet
from geartrain.devices.emulation.network import NetworkSpec
from geartrain.telemetry import RunEvent, StepRecord

_GRADIENT_BYTES = 4
"""Of one parameter: all is float32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MacroRaw:
    """All that was measured."""

    started_at_s: float
    wall_s: float
    quick: bool
    fleet: Fleet
    settings: FleetSettings
    unequal: FleetMeasurement
    steps: tuple[StepRecord, ...]
    """Of geartrain on the unequal fleet."""
    events: tuple[RunEvent, ...]
    equal: FleetMeasurement
    equal_steps: tuple[StepRecord, ...]
    """Of geartrain on the two equal devices."""
    one_device: OneDeviceMeasurement
    reference: ReferenceLosses
    links: NetworkSpec | None = None
    """Between the devices of the unequal fleet, in the fleet's order; None: none."""
    links_spec: str | None = None
    """As they were asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MacroResult:
    """The raw result file: the flat numbers, how they came about, and all behind them."""

    result: Flat
    versions: dict[str, str]
    command: str
    commit: str
    raw: MacroRaw
    schema_version: int = 1


def flatten(raw: MacroRaw) -> Flat:
    """Turn measurements into the flat object that ``--json`` prints."""
    total = raw.settings.global_batch_size
    alone = alone_samples_per_s(raw.unequal, total)
    sum_speeds = sum(alone.values())
    geartrain = throughput(raw.unequal, "geartrain")
    ddp = throughput(raw.unequal, "ddp")
    uneven = throughput(raw.unequal, "ddp_uneven")
    equal = median_ratio(raw.equal, "geartrain", "ddp")
    first = raw.unequal.num_warmup_steps
    flat: Flat = {
        "fleet": raw.fleet.spec,
        "labels": ",".join(raw.fleet.labels),
        "quick": raw.quick,
        "global_batch_size": total,
        "num_parameters": raw.unequal.num_parameters,
        "num_rounds": raw.settings.num_rounds,
        "sum_speeds_samples_per_s": sum_speeds,
        "ddp_samples_per_s": ddp.median,
        "ddp_uneven_samples_per_s": uneven.median,
        "geartrain_samples_per_s": geartrain.median,
        "efficiency": geartrain.median / sum_speeds,
        "ddp_efficiency": ddp.median / sum_speeds,
        "ddp_uneven_efficiency": uneven.median / sum_speeds,
        "speedup_vs_ddp": geartrain.median / ddp.median,
        "speedup_vs_ddp_ceiling": _ceiling(alone),
        "speedup_vs_ddp_uneven": geartrain.median / uneven.median,
        "load_balance_error": load_balance_error(raw.steps, first, len(raw.unequal.losses)),
        "loss_difference_vs_one_device": loss_difference(raw.unequal.losses, raw.reference),
        "ratio_to_ddp_equal_fleet": equal.median,
        "ratio_to_ddp_equal_fleet_spread_fraction": equal.spread_fraction,
        "overhead_fraction_one_device": overhead_fraction(raw.one_device),
        "overhead_fraction_one_device_error": overhead_error(raw.one_device),
        "overhead_clock": raw.one_device.clock,
        "sum_speeds_spread_fraction": alone_spread_fraction(raw.unequal, total),
        "ddp_spread_fraction": ddp.spread_fraction,
        "ddp_uneven_spread_fraction": uneven.spread_fraction,
        "geartrain_spread_fraction": geartrain.spread_fraction,
    }
    flat |= _link_keys(raw, alone, {"": geartrain.median, "ddp_": ddp.median})
    return flat | _slowdown_keys(raw, alone) | _device_keys(raw, alone) | _end(raw)


def _link_keys(
    raw: MacroRaw, alone: dict[str, float], samples_per_s: dict[str, float]
) -> Flat:
    """Against the larger one of two bounds of a step: to compute, or to exchange."""
    if raw.links is None:
        return {}
    total = raw.settings.global_batch_size
    gradient_bytes = _GRADIENT_BYTES * raw.unequal.num_parameters
    speeds = [alone[device.device_id] for device in raw.fleet.devices]
    bound = step_bound(total, speeds, gradient_bytes, raw.links)
    keys: Flat = {
        "links": raw.links_spec,
        "compute_bound_step_s": total / sum(speeds),
        "link_bound_step_s": exchange_bound_s(gradient_bytes, raw.links),
        "bound_step_s": bound.step_s,
        "bound_num_devices": bound.num_devices,
    }
    for prefix, speed in samples_per_s.items():
        keys[f"{prefix}step_s"] = total / speed
        keys[f"{prefix}link_bound_efficiency"] = bound.step_s * speed / total
    return keys


def _ceiling(alone: dict[str, float]) -> float:
    """DDP's equal batches run at num_devices x slowest."""
    return sum(alone.values()) / (len(alone) * min(alone.values()))


def _slowdown_keys(raw: MacroRaw, alone: dict[str, float]) -> Flat:
    slowdown = raw.unequal.slowdown
    assert slowdown is not None, "the macro benchmark always asks for one"
    judged = judge_slowdown(slowdown, raw.events, alone, raw.settings.global_batch_size)
    return {
        "slowdown_device_id": slowdown.device_id,
        "slowdown_core_fraction_before": slowdown.fraction_before,
        "slowdown_core_fraction_after": slowdown.fraction_after,
        "slowdown_detect_steps": judged.detect_steps,
        "slowdown_replan_steps": judged.replan_steps,
        "slowdown_recovered_fraction": judged.recovered_fraction,
        "slowdown_bound_samples_per_s": judged.bound_samples_per_s,
    }


def _device_keys(raw: MacroRaw, alone: dict[str, float]) -> Flat:
    measured = raw.unequal
    keys: Flat = {}
    for rank, device_id in enumerate(measured.device_ids):
        keys |= {
            f"device_{rank}_id": device_id,
            f"device_{rank}_core_fraction": measured.core_fractions[rank],
            f"device_{rank}_alone_samples_per_s": alone[device_id],
            f"device_{rank}_micro_batch_size": measured.micro_batch_sizes[rank],
            f"device_{rank}_ddp_share": measured.ddp_shares[rank],
            f"device_{rank}_ddp_uneven_share": measured.ddp_uneven_shares[rank],
            f"device_{rank}_geartrain_share": measured.geartrain_shares[rank],
        }
    return keys


def _end(raw: MacroRaw) -> Flat:
    return {"equal_fleet": _equal_spec(raw.equal), "wall_s": raw.wall_s}


def _equal_spec(equal: FleetMeasurement) -> str:
    return "emulated:" + ",".join(f"{fraction:g}" for fraction in equal.core_fractions)


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """What a number should be on the default fleet at the default batch."""

    text: str
    limit: float
    is_upper: bool

    def is_met(self, value: float) -> bool:
        """Whether a value meets it."""
        return value <= self.limit if self.is_upper else value >= self.limit


TARGETS = {
    "efficiency": Target(text=">= 0.92", limit=0.92, is_upper=False),
    "speedup_vs_ddp": Target(text=">= 3.2", limit=3.2, is_upper=False),
    "load_balance_error": Target(text="<= 0.05", limit=0.05, is_upper=True),
    "ratio_to_ddp_equal_fleet": Target(text=">= 0.98", limit=0.98, is_upper=False),
    "overhead_fraction_one_device": Target(text="<= 0.02", limit=0.02, is_upper=True),
    "slowdown_detect_steps": Target(text="<= 5", limit=5, is_upper=True),
    "slowdown_replan_steps": Target(text="<= 3", limit=3, is_upper=True),
    "slowdown_recovered_fraction": Target(text=">= 0.9", limit=0.9, is_upper=False),
    "loss_difference_vs_one_device": Target(text="<= 1e-4", limit=1e-4, is_upper=True),
}

LINK_TARGETS = {
    "link_bound_efficiency": Target(text=">= 0.85", limit=0.85, is_upper=False),
}
"""Of a run over emulated links."""

_ROWS = (
    ("sum of speeds, each device alone (samples/s)", "sum_speeds_samples_per_s"),
    ("DDP, equal batches (samples/s)", "ddp_samples_per_s"),
    ("DDP, batches by core fraction (samples/s)", "ddp_uneven_samples_per_s"),
    ("geartrain (samples/s)", "geartrain_samples_per_s"),
    ("efficiency: geartrain / sum of speeds", "efficiency"),
    ("speed-up over DDP", "speedup_vs_ddp"),
    ("load-balance error", "load_balance_error"),
    ("largest loss difference from one device", "loss_difference_vs_one_device"),
    ("two equal devices: geartrain / DDP", "ratio_to_ddp_equal_fleet"),
    ("one device: overhead over a plain loop", "overhead_fraction_one_device"),
    ("slow-down 2x: steps until seen", "slowdown_detect_steps"),
    ("slow-down 2x: further steps until re-planned", "slowdown_replan_steps"),
    ("slow-down 2x: throughput / new bound", "slowdown_recovered_fraction"),
)
_LINK_ROWS = (
    ("step: all devices' bound by computing (s)", "compute_bound_step_s"),
    ("step: all devices' bound by the links (s)", "link_bound_step_s"),
    ("step: bound, of the best choice of devices (s)", "bound_step_s"),
    ("devices in that choice", "bound_num_devices"),
    ("step: geartrain (s)", "step_s"),
    ("link-bound efficiency: bound / step", "link_bound_efficiency"),
    ("the same of DDP, equal batches", "ddp_link_bound_efficiency"),
)
_SPREADS = {
    "sum_speeds_samples_per_s": "sum_speeds_spread_fraction",
    "ddp_samples_per_s": "ddp_spread_fraction",
    "ddp_uneven_samples_per_s": "ddp_uneven_spread_fraction",
    "geartrain_samples_per_s": "geartrain_spread_fraction",
    "ratio_to_ddp_equal_fleet": "ratio_to_ddp_equal_fleet_spread_fraction",
}

TABLE_HEAD = ("", "measured", "spread", "target", "")


def table_rows(result: Flat) -> list[tuple[str, ...]]:
    """Rows for people: what, measured, spread over rounds, target, whether it is met."""
    rows: list[tuple[str, ...]] = []
    for name, key in (*_ROWS, *(_LINK_ROWS if "links" in result else ())):
        target = TARGETS.get(key) or LINK_TARGETS.get(key)
        value = result[key]
        spread = result.get(_SPREADS.get(key, ""))
        rows.append(
            (
                name,
                _format(value),
                "" if spread is None else f"{spread:.3f}",
                "" if target is None else target.text,
                "" if target is None else _verdict(target, value),
            )
        )
    return rows


def _format(value: str | float | None) -> str:
    return "never" if value is None else f"{value:.4g}"


def _verdict(target: Target, value: str | float | None) -> str:
    is_met = isinstance(value, int | float) and target.is_met(value)
    return "met" if is_met else "missed"
