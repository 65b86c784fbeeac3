from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from geartrain.errors import ConfigError
from geartrain.planner import MemoryCurve, best_samples_per_s, fit_curve, predict_s
from geartrain.planner.curve_fit import (
    largest_micro_batch_size,
    predict_many_s,
    samples_per_s,
)

times = st.lists(st.floats(1e-4, 10), min_size=1, max_size=6)


def test_a_line_is_recovered_whatever_the_order_of_points() -> None:
    curve = fit_curve("cpu:0", [8, 1, 4], [0.9, 0.2, 0.5], 16)
    assert curve.micro_batch_sizes == (1, 4, 8)
    assert curve.alpha_s == pytest.approx(0.1)
    assert curve.beta_s == pytest.approx(0.1)


def test_a_negative_fixed_part_becomes_zero() -> None:
    curve = fit_curve("cpu:0", [1, 2, 4], [0.1, 0.3, 0.7], 8)
    assert curve.alpha_s == 0
    assert curve.beta_s > 0


def test_falling_times_fit_a_flat_line_and_are_averaged() -> None:
    curve = fit_curve("cpu:0", [1, 2, 4], [0.3, 0.2, 0.1], 8)
    assert curve.beta_s == 0
    assert predict_s(curve, 1) == predict_s(curve, 4) == pytest.approx(0.2)


def test_a_size_beyond_flat_times_is_not_free() -> None:
    curve = fit_curve("cpu:0", [1, 2], [0.2, 0.2], 64)
    assert predict_s(curve, 64) == pytest.approx(64 / 2 * 0.2)


def test_beyond_the_last_point_the_fit_goes_on() -> None:
    curve = fit_curve("cpu:0", [1, 2, 4], [0.3, 0.5, 0.9], 8)
    assert predict_s(curve, 8) == pytest.approx(0.1 + 8 * 0.2)


def test_between_points_the_curve_is_linear() -> None:
    curve = fit_curve("cpu:0", [1, 2, 4], [1.0, 1.1, 4.1], 8)
    assert predict_s(curve, 3) == pytest.approx(2.6)


def test_an_empty_micro_batch_takes_no_time() -> None:
    assert predict_s(fit_curve("cpu:0", [1], [1.0], 8), 0) == 0


def test_a_negative_size_is_refused() -> None:
    with pytest.raises(ConfigError, match="micro_batch_size=-1"):
        predict_s(fit_curve("cpu:0", [1], [1.0], 8), -1)


def test_unequal_numbers_of_sizes_and_times_are_refused() -> None:
    with pytest.raises(ConfigError, match="as many of each"):
        fit_curve("cpu:0", [1, 2], [1.0], 8)


@given(seconds=times, first=st.integers(1, 9))
def test_time_is_positive_and_never_falls(seconds: list[float], first: int) -> None:
    sizes = [first * 2**i for i in range(len(seconds))]
    curve = fit_curve("cpu:0", sizes, seconds, 1000)
    predicted = predict_many_s(curve, np.arange(sizes[-1] * 3))
    assert predicted[0] == 0
    assert (predicted[1:] > 0).all()
    assert (np.diff(predicted[1:]) >= -1e-12).all()


@given(seconds=times, limit=st.integers(1, 80), largest=st.integers(1, 80))
def test_best_rate_is_the_best_over_all_sizes(
    seconds: list[float], limit: int, largest: int
) -> None:
    curve = fit_curve("cpu:0", [2**i for i in range(len(seconds))], seconds, largest)
    every = [samples_per_s(curve, b) for b in range(1, min(limit, largest) + 1)]
    assert best_samples_per_s(curve, limit) == pytest.approx(max(every))


@pytest.mark.parametrize(("limit_bytes", "largest"), [(1000, 8), (450, 3), (150, 0)])
def test_largest_size_honours_the_memory_curve(limit_bytes: int, largest: int) -> None:
    memory = MemoryCurve(fixed_bytes=100, bytes_per_sample=100.0, limit_bytes=limit_bytes)
    curve = fit_curve("cpu:0", [1], [1.0], 8, memory=memory)
    assert largest_micro_batch_size(curve) == largest


@given(seconds=times, first=st.integers(1, 9))
def test_one_prediction_has_the_same_bits_as_many(seconds: list[float], first: int) -> None:
    sizes = [first * 2**i for i in range(len(seconds))]
    curve = fit_curve("cpu:0", sizes, seconds, 1000)
    asked = np.arange(sizes[-1] * 2)
    assert [predict_s(curve, int(b)) for b in asked] == list(predict_many_s(curve, asked))
