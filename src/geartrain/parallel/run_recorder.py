"""Turns what the ranks exchanged into StepRecords and events on disk."""

from __future__ import annotations

import logging
import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from geartrain.errors import ConfigError
from geartrain.parallel.trailer import RankFigures
from geartrain.telemetry import (
    LogEnd,
    RunEvent,
    RunLogWriter,
    StepRecord,
    write_document,
)

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from geartrain.planner import Plan

logger = logging.getLogger(__name__)

_KEPT_STEPS = 3
"""Nobody is further than a step, and a step's records are written one step later."""


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


@dataclass(frozen=True, slots=True)
class _Complete:
    """A step, and what is known of it one step later."""

    facts: StepFacts
    waits_s: tuple[float, ...]
    following: tuple[RankFigures, ...]


@dataclass(slots=True)
class RunRecorder:
    """Writes a run log where this rank leads; elsewhere it keeps the last steps.

    How long a rank waited in a step is known to the others one step later, so a
    step's records are written when the next one ends. All ranks know the same, so that
    whoever leads next can write what the leader before had not written yet.
    """

    device_ids: tuple[str, ...]
    run_dir: Path | None = None
    """Where this rank writes; None where another one does, or nobody."""
    _writer: RunLogWriter | None = None
    _held: StepFacts | None = field(default=None)
    _lost: set[int] = field(default_factory=set)
    _kept: deque[_Complete] = field(default_factory=lambda: deque(maxlen=_KEPT_STEPS))
    _events: deque[RunEvent] = field(default_factory=deque)
    _found: LogEnd = field(default_factory=LogEnd)
    """What another rank had written of the last steps."""
    _is_retired: bool = False

    def __post_init__(self) -> None:
        if self.run_dir is not None:
            self._writer = RunLogWriter(self.run_dir)

    def lead(self, run_dir: Path) -> None:
        """Go on with the log, where whoever wrote it was lost."""
        if self._writer is not None or self._is_retired:
            return
        try:
            writer = RunLogWriter(run_dir)
            self._found = writer.take_over(self._first_kept_step())
        except ConfigError as error:  # a full disk does not end the training
            logger.warning("the run goes on but is no longer recorded: %s", error)
            self._is_retired = True
            return
        self._writer, self.run_dir = writer, run_dir
        events, self._events = self._events, deque()
        known = self._found.events.copy()
        for event in events:
            key = (event.step, event.kind, event.device_id)
            known[key] -= 1
            if known[key] < 0:
                writer.add_event(event)
        for complete in self._kept:
            self._write(complete)
        self._kept.clear()

    def retire(self) -> None:
        """Write nothing more: the others go on without this rank."""
        self.close()
        self._is_retired = True

    def add_step(self, facts: StepFacts) -> None:
        """Take a step; writes the one before, whose waits have come with it."""
        if self._held is not None:
            waits_s = tuple(f.previous_wait_s for f in facts.figures)
            self._complete(_Complete(self._held, waits_s, facts.figures))
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
        event = RunEvent(
            step=step,
            at_s=time.time(),
            kind=kind,  # type: ignore[arg-type]  # one of EventKind, checked on reading
            message=message,
            device_id=device_id,
            values=values or {},
        )
        if self._writer is not None:
            self._writer.add_event(event)
            return
        self._events.append(event)
        while self._events and self._events[0].step < self._first_kept_step():
            self._events.popleft()

    def change_members(self, ranks: Sequence[int], device_ids: tuple[str, ...]) -> None:
        """Write steps of these ranks alone, from the step under way on.

        Args:
            ranks: That take part.
            device_ids: Of all ranks, with new ones at the end.
        """
        self.device_ids = device_ids
        self._lost = set(range(len(device_ids))) - set(ranks)

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
            self._complete(_Complete(self._held, tuple(waits_s), ()))
            self._held = None

    def close(self) -> None:
        """Close the log."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _first_kept_step(self) -> int:
        if self._kept:
            return self._kept[0].facts.step
        return self._held.step if self._held is not None else 0

    def _complete(self, complete: _Complete) -> None:
        if self._writer is None:
            self._kept.append(complete)
        else:
            self._write(complete)

    def _write(self, complete: _Complete) -> None:
        """Write a step; what its exchange took comes with the figures of the next one."""
        assert self._writer is not None
        facts, waits_s = complete.facts, complete.waits_s
        exchanges = complete.following or (RankFigures(),) * len(facts.figures)
        # How long lost ranks waited in their last step will never be known.
        # The fleet may have grown since, and have members again that were not in it.
        unknown = self._lost | {r for r, f in enumerate(facts.figures) if not f.compute_s}
        known_s = [w for r, w in enumerate(waits_s) if r not in unknown] or [0.0]
        waits_s = tuple(
            min(known_s) if r in unknown else waits_s[r] for r in range(len(facts.figures))
        )
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
                    zip(self.device_ids, facts.figures, exchanges, splits, strict=False)
                )
                if rank not in unknown or figures.compute_s > 0
                if (facts.step, device_id) not in self._found.records
            ]
        )
