"""What a planner must offer."""

from __future__ import annotations

from typing import Protocol

from geartrain.planner.model_profile import ModelProfile, Workload
from geartrain.planner.plan import Plan


class Planner(Protocol):
    """A search for a good plan; a plain function such as ``solve`` is one."""

    def __call__(self, profile: ModelProfile, workload: Workload) -> Plan:
        """Find a plan.

        The same arguments give the same plan on every rank: no clock, no randomness.

        Raises:
            ConfigError: If profile and workload do not belong together.
            InfeasiblePlanError: If no plan exists; the message holds the numbers.
        """
