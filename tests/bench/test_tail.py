"""What a tail benchmark says of measurements whose answer is known, and one real run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from example_fleets import emulated_fleet
from geartrain.bench.macro_settings import ReferenceLosses
from geartrain.bench.tail import TailOptions, run_tail
from geartrain.bench.tail_result import (
    Condition,
    TailMeasurement,
    TailPhase,
    TailResult,
    TailSettings,
    core_fractions_in_turn,
    flatten_tail,
    ratio_to_no_tail,
    tail_table_rows,
)
from geartrain.errors import ConfigError
from geartrain.telemetry import read_document
from run_command import run_command

SETTINGS = TailSettings(warmup_steps=2, num_rounds=3)


def phase(
    condition: Condition, fraction: float, round_index: int, samples_per_s: float
) -> TailPhase:
    return TailPhase(
        condition=condition,
        tail_fraction=fraction,
        round_index=round_index,
        num_samples=100,
        seconds=100 / samples_per_s,
    )


def measurement() -> TailMeasurement:
    """The machine drifts; a tail costs a tenth on steady devices and gains it on others."""
    phases = [
        phase(condition, fraction, index, speed * (1.0 if fraction == 0 else worth))
        for index, speed in enumerate((100.0, 120.0, 80.0))
        for fraction in SETTINGS.fractions
        for condition, worth in _WORTH
    ]
    return TailMeasurement(
        phases=tuple(phases),
        losses=(4.0, 2.0, 1.0),
        reference=ReferenceLosses(losses=(4.0, 2.002)),
    )


_WORTH: tuple[tuple[Condition, float], ...] = (("steady", 0.9), ("fluctuating", 1.1))


def test_ratio_pairs_rounds_so_that_drift_cancels() -> None:
    ratio = ratio_to_no_tail(measurement(), "steady", 0.1)

    assert ratio.median == pytest.approx(0.9)
    assert ratio.spread_fraction == pytest.approx(0.0)


def test_flat_object_tells_conditions_and_fractions_apart() -> None:
    flat = flatten_tail(measurement(), SETTINGS, emulated_fleet(0.5, 0.25))

    assert flat["labels"] == "emulated"
    assert flat["steady_tail_0_samples_per_s"] == pytest.approx(100.0)
    assert flat["steady_tail_0_spread_fraction"] == pytest.approx(0.4)
    assert flat["fluctuating_tail_0.25_samples_per_s"] == pytest.approx(110.0)
    assert flat["fluctuating_tail_0.25_ratio"] == pytest.approx(1.1)


def test_losses_are_held_against_one_devices_as_far_as_it_went() -> None:
    flat = flatten_tail(measurement(), SETTINGS, emulated_fleet(0.5, 0.25))

    assert flat["loss_difference_vs_one_device"] == pytest.approx(1e-3, rel=0.01)


def test_table_has_a_row_for_each_condition_and_fraction() -> None:
    flat = flatten_tail(measurement(), SETTINGS, emulated_fleet(0.5, 0.25))

    rows = tail_table_rows(flat, SETTINGS)

    assert rows[0] == ("steady", "0%", "100", "0.4", "1", "0")
    assert len(rows) == 2 * len(SETTINGS.fractions)


def test_speeds_vary_alike_for_all_fractions_of_a_round_and_keep_to_their_range() -> None:
    turns = core_fractions_in_turn([0.9, 0.4], 3, 200)

    assert turns == core_fractions_in_turn([0.9, 0.4], 3, 200)
    assert turns != core_fractions_in_turn([0.9, 0.4], 4, 200)
    fast, slow = zip(*turns, strict=True)
    assert min(fast) >= 0.72
    assert max(fast) == 1.0  # no device gets more than a core
    assert 0.32 <= min(slow) < 0.34
    assert 0.46 < max(slow) <= 0.48


def test_fleet_without_room_to_become_faster_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("geartrain.bench.tail.cores_present", lambda: 1)
    options = TailOptions(fleet="emulated:0.5,0.4")

    with pytest.raises(ConfigError, match=r"add up to 0\.9, but devices vary by 20%"):
        run_tail(options, lambda _text: None)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_quick_run_compares_tails_and_computes_the_same(tmp_path: Path) -> None:
    printed = run_command(
        "geartrain",
        *("bench", "tail", "--quick", "--json", "-o", "raw.json"),
        *("--fleet", "emulated:0.4,0.2"),
        cwd=tmp_path,
        timeout_s=390,
    )

    flat = json.loads(printed.splitlines()[-1])
    assert flat["quick"] is True
    assert flat["labels"] == "emulated"
    assert flat["loss_difference_vs_one_device"] < 1e-4
    assert 0.2 < flat["steady_tail_0.1_ratio"] < 5
    stored = read_document(tmp_path / "raw.json", TailResult)
    settings = stored.settings
    assert len(stored.measurement.phases) == 2 * settings.num_rounds * 4
    assert "raw result: raw.json" in printed
