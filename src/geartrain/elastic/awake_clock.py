"""A clock that stands still while this process does."""

from __future__ import annotations

import time
from collections.abc import Callable


class AwakeClock:
    """Seconds that this process has spent awake, on top of the Unix time of its start.

    A coordinator that was stopped or starved has heard nobody meanwhile. That is nobody's
    fault, so that time does not count. Look at it often: at least every ``step_s``.

    Args:
        longest_step_s: Between two looks; what is beyond counts as slept through.
        monotonic_s: The clock below.
        unix_s: At the start; makes times of successive coordinators comparable.

    >>> times = iter([0.0, 0.1, 9.0])
    >>> clock = AwakeClock(0.2, lambda: next(times), unix_s=100.0)
    >>> round(clock.now_s(), 3), round(clock.now_s(), 3)
    (100.1, 100.3)
    """

    def __init__(
        self,
        longest_step_s: float,
        monotonic_s: Callable[[], float] = time.monotonic,
        *,
        unix_s: float | None = None,
    ) -> None:
        self._longest_step_s = longest_step_s
        self._monotonic_s = monotonic_s
        self._now_s = time.time() if unix_s is None else unix_s
        self._looked_at_s = monotonic_s()

    def now_s(self) -> float:
        """The time; never goes back."""
        looked_at_s = self._monotonic_s()
        passed_s = looked_at_s - self._looked_at_s
        self._looked_at_s = looked_at_s
        self._now_s += min(max(passed_s, 0.0), self._longest_step_s)
        return self._now_s
