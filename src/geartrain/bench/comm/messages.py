"""What the benchmark and its worker processes tell each other. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from geartrain.planner.exchange import CommSchedule

Verb = Literal["join", "measure", "overlap", "watch_begin", "watch_steps"]

GIVEN_RING = "given_ring"
"""Gloo's ring in the order of the ranks, as launchers hand them out."""
BEST_RING = "best_ring"
"""Gloo's ring with each rack's hosts side by side: it is told the racks."""
STOCK = "stock_hierarchy"
"""Torch's reduce-scatter in the rack, all-reduce across, all-gather; told the racks."""
OURS = "geartrain"
OURS_INT8 = "geartrain_int8"
OURS_INT4 = "geartrain_int4"

CODEC_OF = {OURS: None, OURS_INT8: "int8", OURS_INT4: "int4"}
"""Compression of geartrain's schemes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One worker process."""

    rank: int
    world_size: int
    address: str
    store_address: str
    store_port: int
    racks: tuple[tuple[int, ...], ...]
    """The lab's racks as ranks: for the baselines, never for geartrain."""
    namespace: str = ""
    """The network namespace that is its host; "" stays where it is."""

    @property
    def best_ring(self) -> tuple[int, ...]:
        """Ranks, rack by rack."""
        return tuple(rank for rack in self.racks for rank in rack)


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What a worker is asked to do."""

    verb: Verb
    schemes: tuple[str, ...] = ()
    num_bytes: int = 0
    """Of float32 values."""
    repeats: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """One all-reduce as one member saw it."""

    scheme: str
    seconds: float
    """From a barrier to its own result."""
    checksum: int
    """Of the result's bits."""
    relative_error: float | None = None
    """Norm of (result - exact sum) / norm of the sum; rank 0 only."""
    cpu_s: float = 0.0
    """Processor time of the member meanwhile, all its threads."""
    stage_s: dict[str, float] = field(default_factory=dict)
    """geartrain's schemes: how long each stage worked and waited."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What a worker answers."""

    error: str = ""
    timings: tuple[Timing, ...] = ()
    schedules: dict[str, CommSchedule] = field(default_factory=dict)
    """By scheme, of the size that was asked for; rank 0 only."""
    predicted_s: dict[str, float] = field(default_factory=dict)
    """By scheme, of the size that was asked for; rank 0 only."""
    found_racks: tuple[tuple[int, ...], ...] = ()
    """What geartrain's probe found, as ranks; rank 0 only."""
    num_hosts: int = 0
    probe_s: float = 0.0
    probe_bytes: int = 0
    steps_s: tuple[float, ...] = ()
    figures: dict[str, float] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
