"""Follows a run that goes on: what a display shows, at a cost that stays constant."""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass
from pathlib import Path

from geartrain.errors import ConfigError
from geartrain.monitoring.run_files import read_plan
from geartrain.monitoring.run_summary import (
    NUM_WARM_UP_STEPS,
    RunSummary,
    bound_of,
    known_total,
    summarise,
)
from geartrain.planner import Plan
from geartrain.telemetry import RunEvent, RunLogReader, StepRecord

logger = logging.getLogger(__name__)

_WINDOW_STEPS = 20
"""Rates are those of the last steps: they follow a re-plan and still are steady."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgressSnapshot:
    """A run as it stands."""

    num_steps: int
    last_step: int | None
    recent: RunSummary
    """The last steps only."""
    epoch: int | None
    total_steps: int | None
    remaining_s: float | None
    """Estimated time to the last step; None where the run did not say how many."""
    last_event: RunEvent | None


class RunProgress:
    """Reads what is new in a run log, and keeps the last steps."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._reader = RunLogReader(run_dir)
        self._window: deque[list[StepRecord]] = deque(maxlen=_WINDOW_STEPS)
        self._num_steps = 0
        self._bound_event: RunEvent | None = None
        self._last_event: RunEvent | None = None
        self._losses: list[RunEvent] = []
        self._new_events: list[RunEvent] = []
        self._total_steps: int | None = None
        self._epoch: int | None = None
        self._plan: Plan | None = None
        self._is_broken = False

    def poll(self) -> bool:
        """Read on; whether there was anything new.

        A log that can't be read ends the display, never the training it shows.
        """
        if self._is_broken:
            return False
        try:
            events, records = self._reader.new_events(), self._reader.new_steps()
            if self._plan is None and (events or records):
                self._plan = read_plan(self._run_dir)
        except ConfigError as error:
            logger.warning("the display stops: %s", error)
            self._is_broken = True
            return False
        for event in events:
            self._take_event(event)
        for record in records:
            if not self._window or self._window[-1][0].step != record.step:
                self._window.append([])
                self._num_steps += 1
            self._window[-1].append(record)
        return bool(events or records)

    def snapshot(self) -> ProgressSnapshot:
        """The run as it stands."""
        warm_up = max(0, NUM_WARM_UP_STEPS - (self._num_steps - len(self._window)))
        recent = summarise(
            [record for group in self._window for record in group],
            [
                *self._losses,
                *([] if self._bound_event is None else [self._bound_event]),
            ],
            self._plan,
            num_warm_up_steps=warm_up,
        )
        last_step = self._window[-1][0].step if self._window else None
        return ProgressSnapshot(
            num_steps=self._num_steps,
            last_step=last_step,
            recent=recent,
            epoch=self._epoch,
            total_steps=self._total_steps,
            remaining_s=self._remaining_s(last_step, recent, warm_up),
            last_event=self._last_event,
        )

    def take_events(self) -> tuple[RunEvent, ...]:
        """What happened since this was last asked."""
        taken, self._new_events = tuple(self._new_events), []
        return taken

    def close(self) -> None:
        """Close the log."""
        self._reader.close()

    def _take_event(self, event: RunEvent) -> None:
        self._last_event = event
        self._new_events.append(event)
        if event.kind == "lost":
            self._losses.append(event)
        if bound_of(event, self._plan) is not None:
            self._bound_event = event
        self._total_steps = known_total([event]) or self._total_steps
        if "epoch" in event.values:
            self._epoch = round(event.values["epoch"])

    def _remaining_s(
        self, last_step: int | None, recent: RunSummary, warm_up: int
    ) -> float | None:
        if self._total_steps is None or last_step is None:
            return None
        if len(self._window) <= warm_up:
            return None
        # From end to end of steps, so that what lies between steps counts as well.
        ends = [group[0].at_s for group in self._window][warm_up:]
        step_s = recent.wall_s / len(self._window)
        if len(ends) > 1:
            step_s = (ends[-1] - ends[0]) / (len(ends) - 1)
        return max(0, self._total_steps - last_step - 1) * step_s
