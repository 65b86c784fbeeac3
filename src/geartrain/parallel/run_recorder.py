"""Turns what the ranks exchanged into StepRecords and events on disk."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from geartrain.errors import ConfigError
from geartrain.parallel.trailer import RankFigures
from geartrain.telemetry import RunEvent, RunLogWriter, StepRecord, write_document

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from geartrain.planner import Plan

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFacts:
    """A step as all ranks know it right after its exchange."""

    step: int
    at_s: float
    step_s: float
    loss: float
    figures: tuple[RankFigures, ...]


def split_waits(waits_s: Sequence[float]) -> list[tuple[float, float]]:
    """Split each rank's wait into transfer and idle time.

    The rank that waited least came last: its wait is the transfer, and what the
    others waited longer they waited for it.

    Returns:
        (comm_s, idle_s) a rank.

    >>> split_waits([0.5, 0.1])
    [(0.1, 0.4), (0.1, 0.0)]
    """
    transfer_s = min(waits_s)
    return [(transfer_s, wait_s - transfer_s) for wait_s in waits_s]


@dataclass(slots=True)
class RunRecorder:
    """Writes a run log; on ranks without one it does nothing.

    How long a rank waited in a step is known to the others one step later, so a
    step's records are written when the next one ends.
    """

    device_ids: tuple[str, ...]
    run_dir: Path | None = None
    _writer: RunLogWriter | None = None
    _held: StepFacts | None = field(default=None)
    _lost: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        if self.run_dir is not None:
            self._writer = RunLogWriter(self.run_dir)

    def add_step(self, facts: StepFacts) -> None:
        """Take a step; writes the one before, whose waits have come with it."""
        if self._held is not None:
            waits_s = [f.previous_wait_s for f in facts.figures]
            self._write(self._held, waits_s, facts.figures)
        self._held = facts

    def add_event(
        self,
        step: int,
        kind: str,
        message: str,
        device_id: str = "",
        values: dict[str, float] | None = None,
    ) -> None:
        """Write an event."""
        if self._writer is None:
            return
        event = RunEvent(
            step=step,
            at_s=time.time(),
            kind=kind,  # type: ignore[arg-type]  # one of EventKind, checked on reading
            message=message,
            device_id=device_id,
            values=values or {},
        )
        self._writer.add_event(event)

    def lose(self, ranks: Sequence[int]) -> None:
        """Write no more steps of these ranks, from the step under way on."""
        self._lost.update(ranks)

    def write_plan(self, plan: Plan) -> None:
        """Keep ``plan.json`` the plan in force, so that it can be given to a later run."""
        if self._writer is None or self.run_dir is None:
            return
        try:
            write_document(self.run_dir / "plan.json", plan)
        except ConfigError as error:  # a full disk does not end the training
            logger.warning("the new plan is carried out but not recorded: %s", error)

    def flush(self, waits_s: Sequence[float]) -> None:
        """Write the last step, whose waits were gathered separately."""
        if self._held is not None:
            self._write(self._held, waits_s)
            self._held = None

    def close(self) -> None:
        """Close the log."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _write(
        self,
        facts: StepFacts,
        waits_s: Sequence[float],
        following: Sequence[RankFigures] = (),
    ) -> None:
        """Write a step; what its exchange took comes with the figures of the next one."""
        if self._writer is None:
            return
        exchanges = following or [RankFigures()] * len(facts.figures)
        # How long lost ranks waited in their last step will never be known.
        least_s = min(w for r, w in enumerate(waits_s) if r not in self._lost)
        waits_s = [least_s if r in self._lost else w for r, w in enumerate(waits_s)]
        splits = split_waits(waits_s)
        self._writer.add_steps(
            [
                StepRecord(
                    step=facts.step,
                    device_id=device_id,
                    at_s=facts.at_s,
                    step_s=facts.step_s,
                    num_samples=round(figures.num_samples),
                    compute_s=figures.compute_s,
                    comm_s=comm_s,
                    idle_s=idle_s,
                    data_s=figures.data_s,
                    peak_memory_bytes=round(figures.peak_memory_bytes),
                    loss=facts.loss,
                    exchange_s=exchange.exchange_s,
                    exchange_predicted_s=exchange.exchange_predicted_s,
                )
                for rank, (device_id, figures, exchange, (comm_s, idle_s)) in enumerate(
                    zip(self.device_ids, facts.figures, exchanges, splits, strict=True)
                )
                if rank not in self._lost or figures.compute_s > 0
            ]
        )
