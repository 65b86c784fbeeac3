"""After how much silence a member counts as lost: as long as its own steps make likely.

A fixed limit is too short for a slow device and too long for a fast one. So each member
is measured against its own steps: slow is not dead.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from geartrain.errors import ConfigError

_WARM_UP_STEPS = 2
"""The first steps allocate, compile and import; 3 s were seen before steps of 30 ms."""
_KEPT_STEPS = 128
_KEPT_GAPS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How patient the coordinator is. Times are in seconds.

    The defaults suit a fleet on one network; all but ``beat_interval_s`` concern only the
    coordinator.
    """

    min_members: int = 1
    """With fewer nobody trains; they wait."""
    expected_members: int = 1
    """The first epoch waits for so many, up to ``start_s``."""
    start_s: float = 300.0
    hold_s: float = 600.0
    """How long too few members wait for others before the run halts."""
    rejoin_s: float = 1.0
    """How long a coordinator that came back waits for all members of the last epoch."""
    rejoin_gap_s: float = 0.4
    """And no longer than this after the last of them has come: they try all at once."""
    beat_interval_s: float = 0.05
    shortest_s: float = 0.3
    """Floor of a member's limit; below, busy hosts give false deaths."""
    longest_s: float = 60.0
    step_factor: float = 8.0
    """Limit = this x the 95th percentile of the member's own step time."""
    least_silence_s: float = 1.0
    """A silence of so long, and of a whole step, is too long, however irregular steps
    are: beats come from a thread of their own."""
    gap_factor: float = 3.0
    """A silence must also be so many times the gaps between its beats of late: where the
    whole host is starved, its beats are late before they stop."""
    unmeasured_s: float = 30.0
    """Limit of a member with no step time yet."""
    away_s: float = 600.0
    """Limit of a main loop that is in the user's own code."""
    build_s: float = 0.5
    """For an epoch's exchange to stand, once all main loops have taken it up."""
    lost_state_s: float = 2.0
    """How long the run waits for a member that holds what nobody else does to come back,
    before it halts."""
    longest_build_s: float = 8.0
    """A build in which most fail was too short: it gets twice as long, up to this."""
    transfer_s: float = 600.0
    """For a member to get its state, as long as it gets on with it."""
    loss_gather_s: float = 0.01
    """Several that are lost at once are one new epoch."""
    join_gather_s: float = 0.03
    """Joiners that come together are one new epoch."""
    suspect_gather_s: float = 0.1
    """For all sides of a torn link to say so."""
    suspect_memory_s: float = 10.0
    """A live member that is suspected twice within this time is left out."""
    drain_s: float = 30.0
    """How long a draining member is kept where nobody can take its state over."""
    catch_up_steps: int = 50
    """A joiner this close to the fleet is admitted and makes up the rest at once."""
    most_heals: int = 3
    """After so many copies that were outrun it is admitted however far behind it is."""
    max_failures: int | None = None
    """In total, before the run halts."""
    max_member_failures: int | None = None
    """Of one member, before it is not admitted any more."""
    backoff_s: float = 0.5
    """Wait of a member after its second failure; doubles with each further one."""
    longest_backoff_s: float = 60.0
    forget_s: float = 120.0
    """A failure this long ago does not lengthen the wait any more."""
    max_barren_epochs: int = 20
    """So many epochs in a row without a loss to explain them or a step halt the run."""
    restores_from_tier_1: bool = False
    """Whether members can load ranges that nobody holds from the node agents."""

    _POSITIVE: ClassVar[tuple[str, ...]] = (
        "min_members",
        "expected_members",
        "beat_interval_s",
        "shortest_s",
        "longest_s",
        "unmeasured_s",
        "build_s",
        "longest_build_s",
        "max_barren_epochs",
    )

    def __post_init__(self) -> None:
        for name in self._POSITIVE:
            if (value := getattr(self, name)) <= 0:
                msg = f"{name}={value} must be > 0; leave it out for the default"
                raise ConfigError(msg)
        if self.shortest_s > self.longest_s or self.build_s > self.longest_build_s:
            msg = (
                f"shortest_s={self.shortest_s} may be at most longest_s={self.longest_s}, "
                f"and build_s={self.build_s} at most longest_build_s={self.longest_build_s}"
            )
            raise ConfigError(msg)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """Step times and gaps between beats of one member, the last ones.

    >>> pace = Pace()
    >>> for step_s in (3.0, 0.2, 0.05, 0.05):
    ...     pace = pace.with_step(step_s)
    >>> round(pace.limit_s(Limits()), 6)
    0.4
    """

    step_s: tuple[float, ...] = ()
    gap_s: tuple[float, ...] = ()
    num_skipped: int = 0
    slow_step_s: float = 0.0
    """95th percentile of ``step_s``; 0 before there is one. A step in which the process
    was stopped for a moment must not make the others wait for it for minutes."""
    usual_gap_s: float = 0.0
    """95th percentile of ``gap_s``."""

    def with_step(self, step_s: float) -> Pace:
        """The pace with one more step; the first ones are passed over."""
        if self.num_skipped < _WARM_UP_STEPS:
            return Pace(
                gap_s=self.gap_s,
                num_skipped=self.num_skipped + 1,
                usual_gap_s=self.usual_gap_s,
            )
        steps = (*self.step_s[1 - _KEPT_STEPS :], step_s)
        return Pace(
            step_s=steps,
            gap_s=self.gap_s,
            num_skipped=self.num_skipped,
            slow_step_s=percentile(steps, 0.95),
            usual_gap_s=self.usual_gap_s,
        )

    def with_gap(self, gap_s: float) -> Pace:
        """The pace with one more gap between beats."""
        gaps = (*self.gap_s[1 - _KEPT_GAPS :], gap_s)
        return Pace(
            step_s=self.step_s,
            gap_s=gaps,
            num_skipped=self.num_skipped,
            slow_step_s=self.slow_step_s,
            usual_gap_s=percentile(gaps, 0.95),
        )

    def limit_s(self, limits: Limits) -> float:
        """How long the member's main loop may make no progress.

        Source: docs/explanation/elastic.md, "Detection".
        """
        if not self.slow_step_s:
            return limits.unmeasured_s
        wanted_s = max(limits.shortest_s, limits.step_factor * self.slow_step_s)
        return min(wanted_s, limits.longest_s)

    def silence_limit_s(self, limits: Limits) -> float:
        """How long the member may send no beats."""
        if not self.slow_step_s:
            return limits.unmeasured_s
        long_s = max(limits.least_silence_s, self.slow_step_s)
        return max(min(self.limit_s(limits), long_s), self.starved_s(limits))

    def starved_s(self, limits: Limits) -> float:
        """A silence that the gaps between beats of late may explain."""
        return min(limits.gap_factor * self.usual_gap_s, limits.longest_s)


def percentile(values: tuple[float, ...], fraction: float) -> float:
    """Nearest-rank percentile.

    >>> percentile((1.0, 2.0, 3.0, 4.0), 0.5)
    2.0
    """
    ordered = sorted(values)
    return ordered[max(0, math.ceil(fraction * len(ordered)) - 1)]


def backoff_s(limits: Limits, failed_at_s: tuple[float, ...], now_s: float) -> float:
    """How long a member waits after its last failure before it is admitted.

    The first failure of late costs no wait: whoever restarts it is asked to be quick.

    >>> backoff_s(Limits(), (0.0,), 1.0), backoff_s(Limits(), (0.0, 1.0, 2.0), 2.0)
    (0.0, 1.0)
    """
    recent = sum(1 for at_s in failed_at_s if now_s - at_s < limits.forget_s)
    if recent <= 1:
        return 0.0
    wait_s: float = limits.backoff_s * 2.0 ** min(recent - 2, 30)
    return min(wait_s, limits.longest_backoff_s)
