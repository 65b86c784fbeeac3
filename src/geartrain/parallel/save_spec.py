"""What a run saves, how often and where to, and what it goes on from. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from geartrain.checkpoint.cadence import Cadence
from geartrain.checkpoint.retention import RetentionPolicy

# In a run directory: the versions that were saved while it went on...
CHECKPOINTS_NAME = "checkpoints"
# ...and the whole state, written when the run was asked to stop.
SNAPSHOT_NAME = "checkpoint"


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveSpec:
    """Saves beside the training."""

    directory: str
    """Of versions on the local disk."""
    durable_url: str | None = None
    """Of a store that outlives this host; None: there is none."""
    cadence: Cadence = field(default_factory=Cadence)
    retention: RetentionPolicy = field(default_factory=RetentionPolicy)
    """Of the local disk; a durable store keeps all until it is pruned."""
    config: dict[str, Any] = field(default_factory=dict)  # Any: JSON
    """What the run was started with, to name what differs when it is resumed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumeSpec:
    """Where a run goes on from; the launcher has found out which."""

    snapshot: str | None = None
    """A folder that ``Session.save`` wrote."""
    stores: tuple[str, ...] = ()
    """Otherwise the version lies in these, the preferred one first."""
    version: str = ""
    """Its name there."""
    step: int = 0
