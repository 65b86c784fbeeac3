"""The records of a run."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

EventKind = Literal[
    "linked",
    "exchange",
    "profiled",
    "planned",
    "slowdown",
    "replanned",
    "relinked",
    "lost",
    "epoch",
    "saved",
    "stopped",
    "note",
]
# linked: the links were probed. exchange: how gradients are exchanged was decided.
# relinked: a link was off and was probed again. lost: a device is gone for good.


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """What one device did in one optimizer step.

    ``compute_s`` is the time in forward, backward and the optimizer; ``comm_s`` the
    transfer of gradients that compute did not hide; ``idle_s`` the wait for slower
    devices; ``data_s`` the wait for input. The three-way split of waiting follows
    from the waits alone: the device that waits least is the one all wait for, so
    ``comm_s`` is the least wait of all devices and ``idle_s`` what is above it.
    """

    step: int
    device_id: str
    at_s: float
    step_s: float
    num_samples: int
    compute_s: float
    comm_s: float
    idle_s: float
    data_s: float
    peak_memory_bytes: int
    loss: float
    exchange_s: float = 0.0
    """From when all devices had begun to exchange until it was done, overlap included."""
    exchange_predicted_s: float = 0.0
    """What the schedule in force predicts for it; 0 where nothing is exchanged."""
    schema_version: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEvent:
    """Something that happened once: a plan, a slow-down, a save."""

    step: int
    at_s: float
    kind: EventKind
    message: str
    device_id: str = ""
    values: dict[str, float] = field(default_factory=dict)
    schema_version: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class RunManifest:
    """What a run was started with, in its directory as ``run.json``."""

    run_id: str
    started_at_s: float
    script: str
    arguments: tuple[str, ...]
    fleet_spec: str
    labels: tuple[str, ...]
    """Words that results must carry, such as ``emulated`` and ``oversubscribed``."""
    versions: dict[str, str]
    schema_version: int = 1
