"""What went wrong in an epoch, as told to whoever decides on members."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

FaultKind = Literal["error", "silence", "deadline", "aborted"]
"""error: a connection broke or a message failed. silence: a member sends no heartbeats.
deadline: all run, but an exchange does not end, or somebody never enters it. aborted:
another member ended the epoch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """Why an epoch ended; one an epoch and member."""

    epoch: int
    kind: FaultKind
    suspects: tuple[int, ...]
    """Global ranks that seem lost; empty where nobody in particular is."""
    detail: str
    at_s: float
    """Unix time at which this process knew."""
    silent_s: float = 0.0
    """How long the suspects had been silent by then; 0 for other kinds."""
