"""The numbers of the claims, from measurements whose answer is known."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from geartrain.bench.macro_report import TARGETS, flatten, table_rows
from geartrain.bench.macro_result import (
    alone_samples_per_s,
    judge_slowdown,
    load_balance_error,
    median_ratio,
    overhead_error,
)
from geartrain.bench.macro_settings import AlonePhase, ModelSize, OneDeviceMeasurement
from geartrain.devices.emulation.network import parse_links
from geartrain.errors import ConfigError
from measured_runs import (
    KEYS_OF_THE_CLAIMS,
    SPEEDS,
    event,
    fleet_measurement,
    raw_result,
    step_records,
)


def test_flat_object_has_the_keys_of_the_claims_and_one_level() -> None:
    flat = flatten(raw_result())

    assert flat.keys() >= KEYS_OF_THE_CLAIMS
    assert all(isinstance(v, str | float | int | None) for v in flat.values())
    assert msgspec.json.decode(msgspec.json.encode(flat)) == flat


def test_step_over_links_is_compared_with_the_larger_of_its_bounds() -> None:
    raw = raw_result()
    # 40 samples at 80/s in all take 0.5 s; 4000 bytes at 8 kbit/s take 4 s.
    fast = flatten(replace(raw, links=parse_links("8Mbit", 2), links_spec="8Mbit"))
    slow = flatten(replace(raw, links=parse_links("64kbit", 2), links_spec="64kbit"))
    hopeless = flatten(replace(raw, links=parse_links("8kbit", 2), links_spec="8kbit"))

    assert fast["link_bound_step_s"] == pytest.approx(0.004)
    assert fast["link_bound_efficiency"] == pytest.approx(fast["efficiency"])
    assert slow["bound_step_s"] == pytest.approx(0.5)
    assert hopeless["link_bound_step_s"] == pytest.approx(4.0)
    assert hopeless["bound_num_devices"] == 1
    assert hopeless["bound_step_s"] == pytest.approx(40 / 60)
    assert hopeless["link_bound_efficiency"] == pytest.approx(74 / 60)


def test_rows_on_links_are_shown_only_over_links() -> None:
    raw = raw_result()
    over_links = replace(raw, links=parse_links("8Mbit", 2), links_spec="8Mbit")
    name = "link-bound efficiency: bound / step"

    assert name not in [row[0] for row in table_rows(flatten(raw))]
    assert name in [row[0] for row in table_rows(flatten(over_links))]


def test_throughputs_are_medians_over_the_rounds() -> None:
    flat = flatten(raw_result())

    assert flat["sum_speeds_samples_per_s"] == pytest.approx(80.0)
    assert flat["ddp_samples_per_s"] == pytest.approx(40.0)
    assert flat["geartrain_samples_per_s"] == pytest.approx(74.0)
    assert flat["efficiency"] == pytest.approx(74 / 80)
    assert flat["speedup_vs_ddp"] == pytest.approx(74 / 40)
    assert flat["speedup_vs_ddp_ceiling"] == pytest.approx(80 / (2 * 20))
    assert flat["geartrain_spread_fraction"] == pytest.approx(4 / 74)


def test_bound_takes_each_device_at_its_best_micro_batch_size() -> None:
    assert alone_samples_per_s(fleet_measurement(), 40) == pytest.approx(SPEEDS)


def test_device_alone_pays_one_update_a_global_batch() -> None:
    phase = AlonePhase(
        device_id="a",
        round_index=0,
        micro_batch_size=1,
        num_samples=20,
        compute_s=1.0,
        optimizer_s=0.5,
    )

    assert phase.samples_per_s(10) == pytest.approx(20 / (1.0 + 2 * 0.5))


def test_load_balance_leaves_the_warmup_out() -> None:
    assert load_balance_error(step_records(), 2, 4) == pytest.approx(0.05)
    assert load_balance_error(step_records(), 0, 4) > 0.3


def test_ratio_on_equal_devices_pairs_rounds_so_that_drift_cancels() -> None:
    ratio = median_ratio(raw_result().equal, "geartrain", "ddp")

    assert ratio.median == pytest.approx(0.98)
    assert ratio.spread_fraction == pytest.approx(0.0)


def test_slowdown_counts_from_the_change_and_scales_the_bound() -> None:
    flat = flatten(raw_result())

    assert flat["slowdown_detect_steps"] == 3
    assert flat["slowdown_replan_steps"] == 1
    assert flat["slowdown_bound_samples_per_s"] == pytest.approx(60 / 2 + 20)
    assert flat["slowdown_recovered_fraction"] == pytest.approx((40 / 0.8) / 50)


def test_slowdown_that_nobody_saw_is_told_as_never() -> None:
    slowdown = fleet_measurement().slowdown
    assert slowdown is not None

    judged = judge_slowdown(
        replace(slowdown, replanned_at_step=None),
        [event("slowdown", 4, "emulated:0"), event("slowdown", 9, "emulated:1")],
        SPEEDS,
        40,
    )

    assert judged.detect_steps is None
    assert judged.replan_steps is None
    assert judged.recovered_fraction is None


def test_overhead_is_the_median_over_pairs() -> None:
    flat = flatten(raw_result())

    assert flat["overhead_fraction_one_device"] == pytest.approx(0.01)
    assert flat["overhead_fraction_one_device_error"] == pytest.approx(0.0, abs=1e-12)


def test_noisier_pairs_have_a_larger_error_of_the_overhead() -> None:
    def error(noise: float) -> float:
        times = (1 - noise, 1 - noise / 2, 1 + noise / 2, 1 + noise)
        return overhead_error(
            OneDeviceMeasurement(session_s=times, plain_s=(1.0,) * 4, clock="wall time")
        )

    assert error(0.2) == pytest.approx(2 * error(0.1))


def test_loss_difference_is_the_largest_of_all_steps() -> None:
    assert flatten(raw_result())["loss_difference_vs_one_device"] == pytest.approx(0.25)


def test_table_says_which_targets_are_met() -> None:
    rows = table_rows(flatten(raw_result()))
    verdicts = {row[0]: row[-1] for row in rows}

    assert verdicts["efficiency: geartrain / sum of speeds"] == "met"
    assert verdicts["speed-up over DDP"] == "missed"
    assert sum(bool(row[-1]) for row in rows) == len(TARGETS)


def test_table_shows_never_for_what_did_not_happen() -> None:
    raw = replace(raw_result(), events=())
    row = next(r for r in table_rows(flatten(raw)) if "until seen" in r[0])

    assert row[1] == "never"
    assert row[-1] == "missed"


def test_model_width_must_be_whole_heads() -> None:
    with pytest.raises(ConfigError, match="dim=100 must be a multiple of 32"):
        ModelSize(dim=100)
