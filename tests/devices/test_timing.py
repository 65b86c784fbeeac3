from __future__ import annotations

import pytest

from geartrain.devices.probes.timing import TimingBudget, measure_rate, time_once


class FakeDevice:
    """Takes a fixed time for a run, and more for the first ones."""

    def __init__(self, run_s: float, slow_runs: int = 0) -> None:
        self.now_s = 0.0
        self._run_s = run_s
        self._slow_runs = slow_runs
        self._pending_s = 0.0
        self.num_waits = 0

    def run(self) -> None:
        slow = self._slow_runs > 0
        self._slow_runs -= slow
        self._pending_s += self._run_s * (20 if slow else 1)

    def synchronize(self) -> None:
        self.now_s += self._pending_s
        self._pending_s = 0.0
        self.num_waits += 1


def use_clock(monkeypatch: pytest.MonkeyPatch, device: FakeDevice) -> None:
    monkeypatch.setattr("time.perf_counter", lambda: device.now_s)


def test_rate_is_amount_over_time(monkeypatch: pytest.MonkeyPatch) -> None:
    device = FakeDevice(run_s=0.001)
    use_clock(monkeypatch, device)

    rate = measure_rate(device.run, device.synchronize, 50.0, TimingBudget())

    assert rate.per_s == pytest.approx(50_000)
    assert rate.spread_fraction == pytest.approx(0, abs=1e-9)
    assert rate.num_repeats == 5


def test_slow_first_runs_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    device = FakeDevice(run_s=0.001, slow_runs=3)
    use_clock(monkeypatch, device)

    assert time_once(device.run, device.synchronize) == pytest.approx(0.001)


def test_lazy_device_is_waited_for_after_each_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device = FakeDevice(run_s=0.01)
    use_clock(monkeypatch, device)

    measure_rate(device.run, device.synchronize, 1.0, TimingBudget(max_batch=1))

    assert device.num_waits >= 5 * 6


def test_spread_is_what_lies_between_the_repeats(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device = FakeDevice(run_s=0.06)
    use_clock(monkeypatch, device)
    budget = TimingBudget(num_repeats=3)
    num_runs = 0

    def varying() -> None:
        nonlocal num_runs
        num_runs += 1
        device._run_s = {5: 0.06, 6: 0.12, 7: 0.24}.get(num_runs, 0.06)
        device.run()

    rate = measure_rate(varying, device.synchronize, 1.0, budget)

    assert rate.per_s == pytest.approx(1 / 0.12)
    assert rate.spread_fraction == pytest.approx((1 / 0.06 - 1 / 0.24) * 0.12)
