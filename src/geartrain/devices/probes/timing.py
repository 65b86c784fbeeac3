"""Timing an operation so that noise and throttling average out."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

from geartrain.devices.profile import MeasuredRate


@dataclass(frozen=True, slots=True, kw_only=True)
class TimingBudget:
    """How long a case is measured."""

    window_s: float = 0.06
    """Length of one repeat."""
    num_repeats: int = 5
    max_batch: int = 1_000
    """Runs between two waits for the device; 1 for lazily executed devices."""


THROTTLED_BUDGET = TimingBudget(window_s=0.2)
"""A window of ten periods of 20 ms: one period more or less is 10 %, and the median
of five such windows lies far nearer."""


def time_once(run: Callable[[], object], synchronize: Callable[[], None]) -> float:
    """Duration of one warmed-up run, in seconds: the least of three.

    The least, as a first run starts thread pools and a throttled one may be stopped.
    """
    run()
    synchronize()
    times = []
    for _ in range(3):
        started_at_s = time.perf_counter()
        kept = run()
        synchronize()
        times.append(time.perf_counter() - started_at_s)
        del kept
    return min(times)


def measure_rate(
    run: Callable[[], object],
    synchronize: Callable[[], None],
    amount: float,
    budget: TimingBudget,
) -> MeasuredRate:
    """Measure how much of something a device does in a second.

    Args:
        run: Does ``amount`` once; what it returns is kept until the device is done.
        synchronize: Waits for the device.
        amount: FLOP or bytes of one run.
        budget: Length and number of the repeats.

    Returns:
        The median over the repeats, and their spread.
    """
    once_s = max(time_once(run, synchronize), 1e-7)
    batch = max(1, min(budget.max_batch, int(budget.window_s / 8 / once_s)))
    rates = [
        amount * _runs_per_s(run, synchronize, batch, budget.window_s)
        for _ in range(budget.num_repeats)
    ]
    median = statistics.median(rates)
    return MeasuredRate(
        per_s=median,
        spread_fraction=(max(rates) - min(rates)) / median,
        num_repeats=len(rates),
    )


def _runs_per_s(
    run: Callable[[], object],
    synchronize: Callable[[], None],
    batch: int,
    window_s: float,
) -> float:
    num_runs = 0
    started_at_s = time.perf_counter()
    while True:
        for _ in range(batch):
            kept = run()
        synchronize()
        del kept
        num_runs += batch
        elapsed_s = time.perf_counter() - started_at_s
        if elapsed_s >= window_s:
            return num_runs / elapsed_s
