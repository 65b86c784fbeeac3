"""What a run saves, how often and where to, and what it goes on from. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from geartrain.checkpoint.agent.listing import AgentAccess
from geartrain.checkpoint.agent.recovery import RecoverySource
from geartrain.checkpoint.cadence import Cadence
from geartrain.checkpoint.retention import RetentionPolicy
from geartrain.errors import ConfigError

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
class PeerMemorySettings:
    """How much of a run's memory and time goes into keeping its state there.

    Raises:
        ConfigError: If a number is out of range.
    """

    num_copies: int = 1
    """On other hosts, beside the one of the own host; fewer where there are none."""
    max_cost_fraction: float = 0.01
    """Of the training time, for snapshots: they come as often as that allows."""
    max_log_cost_fraction: float = 0.01
    """Of a step's time, for logging it; where it takes more nothing is logged."""
    memory_limit_bytes: int | None = None
    """Of each node's agent; None: a quarter of the host's memory, shared by its agents."""

    def __post_init__(self) -> None:
        fractions = (self.max_cost_fraction, self.max_log_cost_fraction)
        if self.num_copies < 0 or not all(0 < one < 1 for one in fractions):
            msg = (
                f"num_copies={self.num_copies}, max_cost_fraction="
                f"{self.max_cost_fraction}, max_log_cost_fraction="
                f"{self.max_log_cost_fraction}: expected 0 copies or more, and fractions "
                "between 0 and 1"
            )
            raise ConfigError(msg)
        if self.memory_limit_bytes is not None and self.memory_limit_bytes <= 0:
            msg = (
                f"memory_limit_bytes={self.memory_limit_bytes} must be > 0; to keep no "
                "state in memory switch that off"
            )
            raise ConfigError(msg)


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerMemorySpec:
    """What a worker has to do with its node's agent."""

    access: AgentAccess
    settings: PeerMemorySettings
    node_id: str
    """Whose agent it turns to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemorySource:
    """A state that agents hold."""

    access: AgentAccess
    source: RecoverySource


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumeSpec:
    """Where a run goes on from; the launcher has found out which.

    Memory comes first where it is named; what is on disk serves where it can't be read.
    """

    memory: MemorySource | None = None
    """What peers hold in memory."""
    snapshot: str | None = None
    """A folder that ``Session.save`` wrote."""
    stores: tuple[str, ...] = ()
    """Otherwise the version lies in these, the preferred one first."""
    version: str = ""
    """Its name there."""
    step: int = 0
