"""A fleet in numbers: true curves, noise and slow-downs, corrected step by step.

Results from it are simulated; only the decisions are real.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from geartrain.planner import ModelProfile, Plan, Workload, solve
from geartrain.planner.correction import (
    CorrectionSettings,
    CorrectionState,
    Decision,
    DeviceObservation,
    expected_compute_s,
    observe,
    start_correction,
)
from geartrain.planner.prediction import predict, scale_profile

Noise = Callable[[random.Random], float]


def uniform_noise(fraction: float) -> Noise:
    return lambda rng: rng.uniform(1 - fraction, 1 + fraction)


def gaussian_noise(sigma: float) -> Noise:
    return lambda rng: max(0.3, rng.gauss(1, sigma))


def with_outliers(noise: Noise, probability: float, size: float) -> Noise:
    return lambda rng: noise(rng) * (size if rng.random() < probability else 1)


@dataclass
class SimulatedFleet:
    """Runs the correction against the truth; a mutable object as a test's world is."""

    measured: ModelProfile
    """What the profiler said, right or wrong."""
    true_factors: dict[str, float]
    """True time over measured time; tests change it as they go."""
    workload: Workload
    noise: Noise
    seed: int = 0
    settings: CorrectionSettings | None = None
    probe_interval: int = 5
    """Left-out devices are probed so often."""
    state: CorrectionState = field(init=False)
    decisions: list[Decision] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._rng = random.Random(self.seed)
        plan = solve(self.measured, self.workload)
        self.state = start_correction(self.measured, self.workload, plan, self.settings)

    def run(self, num_steps: int, factors: Mapping[str, float] | None = None) -> None:
        self.true_factors |= factors or {}
        for _ in range(num_steps):
            self.state, decision = observe(self.state, self._observations())
            self.decisions.append(decision)

    def _observations(self) -> list[DeviceObservation]:
        seen = []
        for device_id, factor in self.true_factors.items():
            replica = self.state.plan.replica_of(device_id)
            if replica is not None:
                rounds, rest = divmod(replica.share, replica.micro_batch_size)
                sizes = [replica.micro_batch_size] * rounds + ([rest] if rest else [])
            elif len(self.decisions) % self.probe_interval == 0:
                sizes = [1]
            else:
                continue
            expected_s = expected_compute_s(
                self.measured, device_id, sizes, with_optimizer=replica is not None
            )
            seen.append(
                DeviceObservation(
                    device_id=device_id,
                    compute_s=expected_s * factor * self.noise(self._rng),
                    expected_s=expected_s,
                )
            )
        return seen

    @property
    def truth(self) -> ModelProfile:
        return scale_profile(self.measured, self.true_factors)

    @property
    def true_plan(self) -> Plan:
        """The plan in force, with what it truly takes."""
        return predict(self.state.plan, self.truth)

    @property
    def best_step_s(self) -> float:
        return solve(self.truth, self.workload).predicted_step_s

    def steps_with(self, kind: str) -> list[int]:
        return [
            index
            for index, decision in enumerate(self.decisions)
            if any(event.kind == kind for event in decision.events)
        ]
