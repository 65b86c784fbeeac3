"""The cases: which fleet, what is done to it, how often, and what it may take."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

CaseName = Literal[
    "kill_one_of_four",
    "kill_three_of_ten",
    "stop",
    "second_fault",
    "coordinator_kill",
    "warm_join",
]
Deed = Literal["kill", "stop", "second", "coordinator"]

_FAST_STEP_S = 0.1
_FAST_LIMIT_S = 0.3
_THREE_LIMIT_S = 0.5
_SECOND_LIMIT_S = 1.0
_COORDINATOR_LIMIT_S = 2.0
_JOIN_LIMIT_S = 0.5
_STEPS_ALLOWED = 3
STOP_EXCESS_S = 0.1
"""Beyond the silence after which the coordinator gives this member up."""
JOIN_PAUSE_STEPS = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One case. ``warm_join`` has no runs of its own: each return of a device is one."""

    name: CaseName
    deed: Deed
    core_fractions: tuple[float, ...]
    """Of the devices; emulated."""
    sample_s: float
    """What a sample costs a device, so that a step takes some 50 ms."""
    num_events: int
    num_quick: int
    num_victims: int = 1
    saves: bool = False
    """Whether the script saves every so often, so that faults can meet that."""
    budget_s: float = 150.0
    """No event begins later than this after the first run of the case did."""

    @property
    def fleet_spec(self) -> str:
        """As ``--fleet`` takes it."""
        return "emulated:" + ",".join(f"{share:g}" for share in self.core_fractions)


CASES: Mapping[str, Case] = {
    case.name: case
    for case in (
        Case(
            name="kill_one_of_four",
            deed="kill",
            core_fractions=(0.5,) * 4,
            sample_s=0.0025,
            num_events=50,
            num_quick=3,
            budget_s=170.0,
        ),
        Case(
            name="kill_three_of_ten",
            deed="kill",
            core_fractions=(0.2,) * 10,
            sample_s=0.006,
            num_events=50,
            num_quick=1,
            num_victims=3,
            budget_s=230.0,
        ),
        Case(
            name="stop",
            deed="stop",
            core_fractions=(0.5,) * 4,
            sample_s=0.00125,  # the step that is made again counts beyond the silence
            num_events=50,
            num_quick=1,
            budget_s=170.0,
        ),
        Case(
            name="second_fault",
            deed="second",
            core_fractions=(0.4,) * 5,
            sample_s=0.003,
            num_events=51,
            num_quick=3,
            saves=True,
            budget_s=200.0,
        ),
        Case(
            name="coordinator_kill",
            deed="coordinator",
            core_fractions=(0.5,) * 4,
            sample_s=0.0025,
            num_events=12,
            num_quick=1,
            budget_s=60.0,
        ),
    )
}
"""In the order in which they run."""

CASE_NAMES: tuple[str, ...] = (*CASES, "warm_join")


def limit_s(case: str, step_s: float) -> float | None:
    """What the 95th percentile of a case may be, in seconds.

    Args:
        case: Its name.
        step_s: Median step time while nothing happened.

    Returns:
        None for ``stop``, where each event has a limit of its own.

    >>> limit_s("kill_one_of_four", 0.05), limit_s("kill_one_of_four", 0.2)
    (0.3, 0.6000000000000001)
    """
    steps_s = _STEPS_ALLOWED * step_s
    if case == "kill_one_of_four":
        is_fast = step_s < _FAST_STEP_S
        return _FAST_LIMIT_S if is_fast else max(steps_s, _FAST_LIMIT_S)
    limits: Mapping[str, float | None] = {
        "kill_three_of_ten": max(steps_s, _THREE_LIMIT_S),
        "stop": None,
        "second_fault": _SECOND_LIMIT_S,
        "coordinator_kill": _COORDINATOR_LIMIT_S,
        "warm_join": _JOIN_LIMIT_S,
    }
    return limits[case]
