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
    "left",
    "joined",
    "epoch",
    "shrunk",
    "saved",
    "unsaved",
    "resumed",
    "stopped",
    "note",
]
# linked: the links were probed. exchange: how gradients are exchanged was decided.
# unsaved: a save failed; training goes on. resumed: it goes on from a save.
# relinked: a link was off and was probed again. lost: a device is gone.
# left: a device left in order. joined: a device takes part from now on.
# epoch: those left go on; its values are a RecoveryReport's. shrunk: a step was made
# without the samples of whoever was lost.


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
class RecoveryReport:
    """What the loss of devices cost, as the event ``epoch`` tells it."""

    detect_s: float
    """How long it had lasted when it was noticed: the silence of a frozen device; 0 for a
    killed one, whose connections its kernel closes within milliseconds."""
    replan_s: float
    """From then until those left had gathered, were in step, and had a plan."""
    restore_s: float
    """From then until the next step was applied."""
    lost_samples: int
    """Of the interrupted step: computed in vain by those left, or left out of it."""

    @property
    def interruption_s(self) -> float:
        """From the notice until the next step was applied."""
        return self.replan_s + self.restore_s

    def as_values(self) -> dict[str, float]:
        """The values of the event."""
        return {
            "interruption_s": self.interruption_s,
            "detect_s": self.detect_s,
            "replan_s": self.replan_s,
            "restore_s": self.restore_s,
            "lost_samples": float(self.lost_samples),
        }

    @classmethod
    def of_event(cls, event: RunEvent) -> RecoveryReport | None:
        """The report that an event carries; None for other events."""
        if event.kind != "epoch" or "detect_s" not in event.values:
            return None
        values = event.values
        return cls(
            detect_s=values["detect_s"],
            replan_s=values["replan_s"],
            restore_s=values["restore_s"],
            lost_samples=round(values["lost_samples"]),
        )


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
