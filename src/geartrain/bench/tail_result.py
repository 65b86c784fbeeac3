"""What a tail benchmark runs, brings back and says. Torch-free."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from geartrain.bench.macro_result import Flat, Summary, loss_difference, summarise
from geartrain.bench.macro_settings import ModelSize, ReferenceLosses
from geartrain.devices import Fleet

Condition = Literal["steady", "fluctuating"]
"""Whether the devices keep their speed."""

TAIL_FRACTIONS = (0.0, 0.05, 0.1, 0.25)
"""The first one is what the others are compared with."""

FLUCTUATION = 0.2
"""Largest change of a device's core fraction, up or down."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TailSettings:
    """One launch: all tail fractions in turn, on steady devices and on others."""

    global_batch_size: int = 256
    seed: int = 0
    model: ModelSize = field(default_factory=ModelSize)
    warmup_steps: int = 12
    """In turn with every tail fraction; their losses are held against one device's."""
    num_rounds: int = 5
    steps_per_phase: int = 2
    fluctuation_interval_s: float = 2.0
    fractions: tuple[float, ...] = TAIL_FRACTIONS


@dataclass(frozen=True, slots=True, kw_only=True)
class TailPhase:
    """One tail fraction in one round."""

    condition: Condition
    tail_fraction: float
    round_index: int
    num_samples: int
    seconds: float

    @property
    def samples_per_s(self) -> float:
        """Throughput of the whole fleet."""
        return self.num_samples / self.seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class TailMeasurement:
    """What one launch measured."""

    phases: tuple[TailPhase, ...]
    losses: tuple[float, ...]
    """Of all steps, from the first one on."""
    reference: ReferenceLosses
    """One device's, of the first steps."""
    schema_version: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class TailResult:
    """The raw result file."""

    result: Flat
    versions: dict[str, str]
    command: str
    commit: str
    started_at_s: float
    wall_s: float
    fleet: Fleet
    settings: TailSettings
    measurement: TailMeasurement
    schema_version: int = 1


def core_fractions_in_turn(
    base: Sequence[float], seed: int, num_changes: int
) -> list[tuple[float, ...]]:
    """Core fractions of all devices, one tuple a change, around their own ones.

    Args:
        base: The devices' own core fractions.
        seed: Of what is drawn, evenly within the fluctuation.
        num_changes: How many tuples.

    >>> core_fractions_in_turn([1.0, 0.5], 0, 1)
    [(1.0, 0.552)]
    """
    generator = random.Random(seed)  # noqa: S311 - no secret
    return [
        tuple(
            min(round(own * (1 + generator.uniform(-FLUCTUATION, FLUCTUATION)), 3), 1.0)
            for own in base
        )
        for _ in range(num_changes)
    ]


def throughput_of(
    measurement: TailMeasurement, condition: Condition, fraction: float
) -> Summary:
    """Samples per second of a tail fraction over the rounds."""
    return summarise(list(_speeds(measurement, condition, fraction).values()))


def ratio_to_no_tail(
    measurement: TailMeasurement, condition: Condition, fraction: float
) -> Summary:
    """Throughput against that without a tail, round by round."""
    without = _speeds(measurement, condition, TAIL_FRACTIONS[0])
    speeds = _speeds(measurement, condition, fraction)
    return summarise([speed / without[index] for index, speed in speeds.items()])


def _speeds(
    measurement: TailMeasurement, condition: Condition, fraction: float
) -> dict[int, float]:
    return {
        phase.round_index: phase.samples_per_s
        for phase in measurement.phases
        if (phase.condition, phase.tail_fraction) == (condition, fraction)
    }


def flatten_tail(
    measurement: TailMeasurement, settings: TailSettings, fleet: Fleet
) -> Flat:
    """Turn measurements into the flat object that ``--json`` prints."""
    flat: Flat = {
        "fleet": fleet.spec,
        "labels": ",".join(fleet.labels),
        "global_batch_size": settings.global_batch_size,
        "num_rounds": settings.num_rounds,
        "loss_difference_vs_one_device": loss_difference(
            measurement.losses[: settings.warmup_steps], measurement.reference
        ),
    }
    for condition in _CONDITIONS:
        for fraction in settings.fractions:
            speed = throughput_of(measurement, condition, fraction)
            ratio = ratio_to_no_tail(measurement, condition, fraction)
            key = f"{condition}_tail_{fraction:g}"
            flat |= {
                f"{key}_samples_per_s": speed.median,
                f"{key}_spread_fraction": speed.spread_fraction,
                f"{key}_ratio": ratio.median,
                f"{key}_ratio_spread_fraction": ratio.spread_fraction,
            }
    return flat


_CONDITIONS: tuple[Condition, ...] = ("steady", "fluctuating")

TAIL_TABLE_HEAD = ("devices", "tail", "samples/s", "spread", "ratio to none", "spread")


def tail_table_rows(result: Flat, settings: TailSettings) -> list[tuple[str, ...]]:
    """Rows for people."""
    return [
        (
            condition,
            f"{fraction:.0%}",
            *(
                f"{result[f'{condition}_tail_{fraction:g}_{name}']:.4g}"
                for name in (
                    "samples_per_s",
                    "spread_fraction",
                    "ratio",
                    "ratio_spread_fraction",
                )
            ),
        )
        for condition in _CONDITIONS
        for fraction in settings.fractions
    ]
