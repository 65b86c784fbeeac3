"""What a tier of checkpoints is to a background writer, and how it is doing."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from geartrain.errors import CheckpointError, ConfigError

State = TypeVar("State")


@dataclass(frozen=True, slots=True, kw_only=True)
class WriterLimits:
    """How long and how much."""

    deadline_s: float = 1200.0
    """Of one save, all its tries together; the next one takes its place then."""
    first_pause_s: float = 1.0
    longest_pause_s: float = 60.0
    """Between tries; each is twice as long as the one before."""
    max_states: int = 2
    """Frozen states held at once, over all tiers."""

    def __post_init__(self) -> None:
        positive = (
            self.deadline_s,
            self.first_pause_s,
            self.longest_pause_s,
            self.max_states,
        )
        if any(value <= 0 for value in positive):
            msg = f"{self} must hold values > 0; leave out what you don't want to set"
            raise ConfigError(msg)


class SaveAttempt:
    """What a tier's function asks between two objects, so that it ends in time."""

    def __init__(self, end_clock_s: float, ends: Callable[[], str | None]) -> None:
        self._end_clock_s = end_clock_s
        self._ends = ends

    def check(self) -> None:
        """Go on, or raise.

        Raises:
            CheckpointError: If the deadline is over or the writer is being closed.
        """
        reason = self._ends()
        if reason is None and time.monotonic() >= self._end_clock_s:
            reason = "its deadline is over"
        if reason is not None:
            msg = f"the save was given up: {reason}; the version before it is intact"
            raise CheckpointError(msg)


@dataclass(frozen=True, slots=True, kw_only=True)
class TierTarget(Generic[State]):
    """One tier: its name for people, and the function that writes a state to it."""

    tier: str
    place: str
    write: Callable[[State, SaveAttempt], None]
    """Any exception counts as a failure of the store. Must be safe to repeat."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TierStatus:
    """How a tier is doing. Times are Unix times; None: not yet."""

    tier: str
    place: str
    saved_step: int | None = None
    saved_at_s: float | None = None
    save_s: float | None = None
    """How long the last good save took, its failed tries included."""
    writing_step: int | None = None
    writing_since_s: float | None = None
    waiting_step: int | None = None
    last_error: str | None = None
    """Of the newest try that failed; stays when a later one works."""
    failed_at_s: float | None = None
    num_saved: int = 0
    num_failed_tries: int = 0
    num_skipped: int = 0
    """Saves given up, or replaced by newer ones before they began."""
    is_failing: bool = False
