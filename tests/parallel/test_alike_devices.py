"""Devices of one make share their measurements; others don't."""

from __future__ import annotations

from dataclasses import replace

import pytest

from example_fleets import cpu_fleet, emulated_fleet
from geartrain.parallel.alike_devices import pool_alike
from geartrain.planner import ComputeCurve, Workload, fit_curve, solve
from geartrain.planner.model_profile import ExchangeProfile, ModelProfile


def curve(
    device_id: str, slowness: float, sizes: tuple[int, ...] = (1, 2, 4)
) -> ComputeCurve:
    seconds = [slowness * (0.1 + 0.1 * size) for size in sizes]
    return fit_curve(device_id, sizes, seconds, sizes[-1])


def test_noise_between_equal_devices_moves_no_sample() -> None:
    fleet = emulated_fleet(0.5, 0.5)
    curves = pool_alike(
        [curve("emulated:0", 0.97), curve("emulated:1", 1.03)], fleet.devices
    )
    profile = ModelProfile(
        name="m",
        num_parameters=1,
        gradient_bytes=4,
        curves=curves,
        exchange=ExchangeProfile(num_bytes=4, all_devices_s=0.0),
    )

    plan = solve(profile, Workload(global_batch_size=256))

    assert [replica.share for replica in plan.replicas] == [128, 128]
    assert curves[0].seconds == pytest.approx((0.2, 0.3, 0.5))
    assert [c.device_id for c in curves] == ["emulated:0", "emulated:1"]


def test_devices_of_other_speed_keep_their_curves() -> None:
    curves = [curve("emulated:0", 1.0), curve("emulated:1", 1.03)]

    assert pool_alike(curves, emulated_fleet(0.5, 0.4).devices) == tuple(curves)


def test_device_that_differs_from_its_like_is_not_pooled() -> None:
    curves = [curve("cpu:0", 1.0), curve("cpu:1", 1.3)]

    assert pool_alike(curves, cpu_fleet(2).devices) == tuple(curves)


def test_only_sizes_that_all_measured_are_pooled() -> None:
    curves = [curve("cpu:0", 1.0, (1, 2, 4, 8)), curve("cpu:1", 1.02, (1, 2, 4))]

    pooled = pool_alike(curves, cpu_fleet(2).devices)

    assert all(c.micro_batch_sizes == (1, 2, 4) for c in pooled)
    assert all(c.max_micro_batch_size == 4 for c in pooled)


def test_each_device_keeps_its_own_spread() -> None:
    curves = [
        replace(curve(f"cpu:{rank}", 1.0), spread_fraction=0.1 * (rank + 1))
        for rank in range(2)
    ]

    pooled = pool_alike(curves, cpu_fleet(2).devices)

    assert [c.spread_fraction for c in pooled] == pytest.approx([0.1, 0.2])
