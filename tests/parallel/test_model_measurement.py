"""How far a device is measured, on a fake clock."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from geartrain.errors import DeviceError
from geartrain.parallel.model_measurement import (
    DeviceMemory,
    MeasurementSettings,
    measure_curve,
)
from geartrain.planner import ComputeCurve

ROOMY = DeviceMemory(device_id="d", limit_bytes=2**40, fixed_bytes=0)


@pytest.fixture
def measure(monkeypatch: pytest.MonkeyPatch) -> Callable[..., ComputeCurve]:
    """Measure a device whose micro-batch of size b takes seconds_of(b)."""
    now_s = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: now_s[0])

    def measured(
        seconds_of: Callable[[int], float],
        largest_size: int,
        *,
        most_samples: int = 2**30,
        hiding_s: float = 0.0,
    ) -> ComputeCurve:
        def run(size: int) -> None:
            if size > most_samples:
                raise torch.OutOfMemoryError
            now_s[0] += seconds_of(size)

        settings = MeasurementSettings(hiding_s=hiding_s)
        return measure_curve(run, ROOMY, largest_size, settings)

    return measured


def test_size_that_nobody_measured_is_not_used(
    measure: Callable[..., ComputeCurve],
) -> None:
    curve = measure(lambda size: 0.01 * size, 256)

    assert curve.max_micro_batch_size == curve.micro_batch_sizes[-1] < 256


def test_single_size_without_gain_does_not_end_the_search(
    measure: Callable[..., ComputeCurve],
) -> None:
    # 4 samples look slow for once; 8 and 16 are faster again.
    seconds = {1: 0.10, 2: 0.15, 4: 0.31, 8: 0.40, 16: 0.70, 32: 1.40}

    curve = measure(lambda size: seconds[size], 32)

    assert curve.micro_batch_sizes[-1] >= 16


def test_search_ends_before_runs_take_too_long(
    measure: Callable[..., ComputeCurve],
) -> None:
    curve = measure(lambda size: 0.3 + 0.2 * size, 256)

    assert curve.micro_batch_sizes == (1, 2, 4)


def test_largest_size_asked_for_is_measured(measure: Callable[..., ComputeCurve]) -> None:
    curve = measure(lambda size: 0.05 + 0.001 * size, 12)

    assert curve.micro_batch_sizes == (1, 2, 4, 8, 12)
    assert curve.max_micro_batch_size == 12


def test_memory_ends_the_search_below_the_size_that_failed(
    measure: Callable[..., ComputeCurve],
) -> None:
    curve = measure(lambda size: 0.05 + 0.001 * size, 64, most_samples=5)

    assert curve.micro_batch_sizes == (1, 2, 4)
    assert 4 <= curve.max_micro_batch_size < 8


def test_device_that_holds_no_sample_is_told(
    measure: Callable[..., ComputeCurve],
) -> None:
    with pytest.raises(DeviceError, match="ran out of memory with a single sample"):
        measure(lambda size: 0.1 * size, 8, most_samples=0)


def test_sizes_whose_backward_hides_an_exchange_are_measured_too(
    measure: Callable[..., ComputeCurve],
) -> None:
    plain = measure(lambda size: 0.01 * size, 256)
    curve = measure(lambda size: 0.01 * size, 256, hiding_s=0.5)

    assert plain.max_micro_batch_size == plain.micro_batch_sizes[-1] < 50
    assert curve.micro_batch_sizes[-1] == 64
    assert curve.max_micro_batch_size == 96


def test_sizes_are_not_measured_beyond_twice_what_hides_the_exchange(
    measure: Callable[..., ComputeCurve],
) -> None:
    curve = measure(lambda size: 0.3 * size, 256, hiding_s=1.3)

    assert curve.micro_batch_sizes[-1] == 8
