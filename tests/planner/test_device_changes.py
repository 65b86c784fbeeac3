"""Profiles of fleets whose devices come and go."""

from __future__ import annotations

from dataclasses import replace

from geartrain.planner.model_profile import (
    guess_curve,
    merge_profiles,
    only_devices,
    with_curves,
)
from planner.plan_cases import linear, make_profile

PROFILE = make_profile(
    [linear(name, 0.01, beta_s) for name, beta_s in (("a", 1.0), ("b", 2.0), ("c", 4.0))],
    optimizer_s=(0.1, 0.2, 0.4),
)
NAMES = [curve.device_id for curve in PROFILE.curves]


def test_devices_that_are_gone_stay_known_with_the_newest_rates_of_the_others() -> None:
    left = only_devices(PROFILE, NAMES[:2])
    slower = replace(left.curves[1], seconds=tuple(2 * s for s in left.curves[1].seconds))
    current = replace(left, curves=(left.curves[0], slower))

    merged = merge_profiles(PROFILE, current, NAMES)

    assert [curve.device_id for curve in merged.curves] == NAMES
    assert merged.curves[1] == slower
    assert merged.curves[2] == PROFILE.curves[2]
    assert merged.optimizer_s == PROFILE.optimizer_s


def test_update_times_are_left_out_where_one_is_not_known() -> None:
    untimed = replace(only_devices(PROFILE, NAMES[:1]), optimizer_s=())

    assert (
        merge_profiles(only_devices(PROFILE, NAMES[1:]), untimed, NAMES).optimizer_s == ()
    )


def test_new_device_stands_in_rank_order_and_updates_like_the_slowest() -> None:
    curve = replace(PROFILE.curves[0], device_id="new")
    known = only_devices(PROFILE, NAMES[:2])

    grown = with_curves(known, [curve], [*NAMES, "new"])

    assert [c.device_id for c in grown.curves] == [*NAMES[:2], "new"]
    assert grown.optimizer_s == (0.1, 0.2, 0.2)
    assert with_curves(grown, [curve], [*NAMES, "new"]) == grown


def test_unknown_device_is_taken_for_as_slow_as_the_slowest() -> None:
    guessed = guess_curve(PROFILE, "unknown")

    slowest = max(PROFILE.curves, key=lambda curve: curve.seconds[-1])
    assert guessed == replace(slowest, device_id="unknown")
