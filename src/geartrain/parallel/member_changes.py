"""Tells the run log and the launcher who came and went, and what it cost."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from geartrain.errors import ConfigError
from geartrain.parallel.recovery import Recovery
from geartrain.parallel.worker_spec import WorkerLoss
from geartrain.telemetry import write_document
from geartrain.units import format_seconds

if TYPE_CHECKING:
    from geartrain.parallel.membership import Gathering, Gone
    from geartrain.parallel.process_group import RankGroups
    from geartrain.parallel.run_recorder import RunRecorder
    from geartrain.planner import Plan


logger = logging.getLogger(__name__)


@dataclass(slots=True)
class MemberChanges:
    """What one rank tells of them; only the lead's reaches the log.

    Args:
        groups: Of this rank.
        recorder: Writes events.
        run_dir: Where the launcher finds who is gone.
        step_index: Optimizer steps applied here.
    """

    groups: RankGroups
    recorder: RunRecorder
    run_dir: Path
    step_index: Callable[[], int]
    recovery: Recovery = field(default_factory=Recovery)
    _owed: tuple[Gone, ...] = ()
    """Who could not be told of, since the disk was full."""

    def notice(self, gathering: Gathering) -> None:
        """Something ended the generation before; of several in a row the first counts."""
        first = next(iter(gathering.failures), None)
        if first is not None:
            self.recovery.notice(first.at_s, first.silent_s)
        elif gathering.is_failure:  # a torn link, or an exchange that came to nothing
            self.recovery.notice(time.time(), 0.0)

    def tell(self, gathering: Gathering, num_steps: int) -> None:
        """Record who came and went."""
        names, num_left = self.groups.device_ids, len(gathering.ranks)
        for one in gathering.gone:
            kind = "lost" if one.is_failure else "left"
            text = f"was lost: {one.reason}" if one.is_failure else f"left: {one.reason}"
            self.recorder.add_event(
                num_steps, kind, f"{text}; {num_left} devices go on", names[one.rank]
            )
        for rank in sorted(gathering.joined):
            text = f"takes part from now on, with {num_left - 1} others"
            self.recorder.add_event(num_steps, "joined", text, names[rank])
        self.recorder.change_members(gathering.ranks, names)

    def tell_plan(self, plan: Plan | None, num_steps: int) -> None:
        """Record the plan of those that take part now."""
        if plan is None:
            return
        self.recorder.add_event(
            num_steps,
            "replanned",
            f"{plan.global_batch_size} samples over {len(plan.replicas)} devices of "
            f"the {len(self.groups.members)} left",
            values={
                "predicted_step_s": plan.predicted_step_s,
                "bound_step_s": plan.bound_step_s,
            },
        )

    def tell_left_out(self, num_samples: int, num_left: int, num_steps: int) -> None:
        """Record that the step is made without the samples of whoever was lost.

        Args:
            num_samples: That are left out.
            num_left: Of the global batch.
            num_steps: Optimizer steps applied before.
        """
        self.recovery.lost_samples += num_samples
        self.recorder.add_event(
            num_steps,
            "shrunk",
            f"the step is made with {num_left} samples, without {num_samples} of whoever "
            "was lost",
            values={"effective_batch_size": num_left, "lost_samples": num_samples},
        )

    def applied(self, num_steps: int) -> None:
        """A step was applied: a recovery under way has ended."""
        if self._owed:
            self.report(())
        report = self.recovery.finish(time.time())
        if report is None:
            return
        names = [self.groups.device_ids[r] for r in self.groups.members]
        self.recorder.add_event(
            num_steps,
            "epoch",
            f"goes on with {', '.join(names)}: the first step was applied "
            f"{format_seconds(report.interruption_s)} after the loss was noticed",
            values=report.as_values(),
        )

    def report(self, gone: Sequence[Gone]) -> None:
        """Tell the launcher whom to give up; from any thread.

        Where the disk is full it is told after a later step: training goes on.
        """
        owed = []
        for one in (*self._owed, *gone):
            path = self.run_dir / WorkerLoss.file_name(one.incarnation)
            if path.exists():
                continue
            loss = WorkerLoss(
                rank=one.rank,
                device_id=self.groups.device_ids[one.rank],
                at_s=one.at_s,
                step=self.step_index(),
                reason=one.reason,
                incarnation=one.incarnation,
                is_failure=one.is_failure,
            )
            try:
                write_document(path, loss)
            except ConfigError as error:
                if one not in owed:
                    logger.warning("the launcher is not told yet who is lost: %s", error)
                    owed.append(one)
        self._owed = tuple(owed)
