"""What an exchange took, beside what it was predicted to take."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeObservation:
    """One all-reduce that was done."""

    index: int
    """Counts the all-reduces of this epoch, from 0."""
    num_bytes: int
    """float32 bytes, or those of a float64 tensor."""
    algorithm: str
    codec: str
    fingerprint: str
    """Of the schedule."""
    key: str | None
    """The gradient's name, where it has one."""
    queued_at_s: float
    """When it was asked for, on ``time.monotonic``'s clock, like the next two."""
    started_at_s: float
    """When all members had entered it, and the one before was done: from here the links
    were its own. Where nobody tells when the others entered, when this member did."""
    done_at_s: float
    predicted_s: float
    stage_s: dict[str, float]
    """By stage: how long its thread worked and waited, over all chunks."""

    @property
    def observed_s(self) -> float:
        """How long the links were busy with it."""
        return self.done_at_s - self.started_at_s
