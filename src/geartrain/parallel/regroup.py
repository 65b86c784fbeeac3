"""After a loss: those that are left agree on how far they are, and go on from there.

All members of an exchange have given their part before anyone can have its sum. So when a
step is interrupted, some may have applied it and others not, but nobody is further than
that. Who has applied it hands its state on to who has not; where nobody has, all do the
step again. See docs/explanation/faults.md.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from geartrain.checkpoint.tree_file import tree_from_bytes, tree_to_bytes
from geartrain.errors import CommunicationError
from geartrain.parallel.plan_director import KnownRates
from geartrain.parallel.state_sync import broadcast_bytes
from geartrain.parallel.survivors_buffers import BufferKeeper
from geartrain.parallel.worker_spec import GoingOn, WorkerLoss
from geartrain.telemetry import write_document
from geartrain.units import format_seconds

if TYPE_CHECKING:
    from geartrain.parallel.plan_director import PlanDirector
    from geartrain.parallel.process_group import RankGroups
    from geartrain.parallel.run_recorder import RunRecorder
    from geartrain.parallel.saved_state import TrainState
    from geartrain.parallel.step_engine import StepEngine
    from geartrain.parallel.step_update import StepOutcome
    from geartrain.parallel.survivors import Gathering, Survivors

logger = logging.getLogger(__name__)

T = TypeVar("T")

_GOODBYE_S = 30.0
_POLL_S = 0.01


class PlacesDifferError(CommunicationError):
    """The survivors know each other, but can't go on together; all of them raise it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lineage:
    """How far a rank is."""

    rank: int
    num_steps: int
    """Optimizer steps that were applied, or on a rank that is left out seen."""
    holds_state: bool
    """Whether its model is up to date; a rank that is left out has an old one."""
    num_together: int
    """Evaluations and reduced metrics that it has finished."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Handover:
    """Who gives the state of the last step to whom."""

    num_steps: int
    """That all have applied afterwards."""
    source: int
    to: tuple[int, ...]
    """Ranks, rising; empty where all are equally far."""
    holders: tuple[int, ...]
    """Ranks whose model is up to date afterwards."""


def plan_handover(lineages: list[Lineage]) -> Handover:
    """Decide whose state the survivors go on with.

    Raises:
        PlacesDifferError: If they can't all get there: somebody is further than those
            that hold the state, or they are at different places of the script.

    >>> behind = Lineage(rank=0, num_steps=7, holds_state=True, num_together=0)
    >>> ahead = Lineage(rank=2, num_steps=8, holds_state=True, num_together=0)
    >>> plan_handover([behind, ahead])
    Handover(num_steps=8, source=2, to=(0,), holders=(0, 2))
    """
    holding = [lineage for lineage in lineages if lineage.holds_state]
    furthest = max(holding, key=lambda lineage: lineage.num_steps)
    steps = {lineage.num_steps for lineage in lineages}
    strange = steps - {furthest.num_steps, furthest.num_steps - 1}
    if strange or len({lineage.num_together for lineage in lineages}) > 1:
        places = ", ".join(
            f"rank {lineage.rank}: {lineage.num_steps} steps and "
            f"{lineage.num_together} evaluations"
            for lineage in lineages
        )
        msg = f"those that are left are at different places of the run ({places})"
        raise PlacesDifferError(msg)
    return Handover(
        num_steps=furthest.num_steps,
        source=furthest.rank,
        to=tuple(li.rank for li in lineages if li.num_steps < furthest.num_steps),
        holders=tuple(lineage.rank for lineage in holding),
    )


@dataclass(slots=True)
class Regrouper:
    """Brings the training on this rank back in step with those that are left.

    Args:
        survivors: Finds out who they are.
        groups: The ranks; changed to those that are left.
        director: Plans anew.
        engine: Told whom it exchanges gradients with.
        recorder: Told what happened.
        state: The training state as it is now.
        run_dir: Where rank 0 says that the run goes on; None elsewhere.
    """

    survivors: Survivors
    groups: RankGroups
    director: PlanDirector
    engine: StepEngine
    recorder: RunRecorder
    state: Callable[[], TrainState]
    run_dir: Path | None
    buffers: BufferKeeper = field(init=False)
    num_together: int = 0
    _noticed_at_s: float = 0.0
    _says_going_on: bool = False

    def __post_init__(self) -> None:
        self.buffers = BufferKeeper(self.engine.model)

    def begin_step(self, num_steps: int) -> None:
        """A step begins: from the first one on a loss does not end the run."""
        self.survivors.check()
        self.buffers.keep()
        if self.run_dir is not None and not self._says_going_on:
            self._says_going_on = True
            write_document(self.run_dir / GoingOn.FILE_NAME, GoingOn(since_step=num_steps))

    def applied(self, num_steps: int) -> None:
        """A step was applied."""
        self.buffers.applied()
        if self._noticed_at_s:
            took_s = time.time() - self._noticed_at_s
            self._noticed_at_s = 0.0
            names = [self.groups.device_ids[r] for r in self.groups.members]
            self.recorder.add_event(
                num_steps,
                "epoch",
                f"goes on with {', '.join(names)}: the first step was applied "
                f"{format_seconds(took_s)} after the loss was noticed",
                values={"interruption_s": took_s},
            )

    def settle(self, error: CommunicationError, num_steps: int) -> StepOutcome | None:
        """Come back in step with those that are left; all of them call it.

        Args:
            error: What made the caller ask.
            num_steps: Optimizer steps that were applied here.

        Returns:
            What the step came to that others had applied and this rank has been given the
            state of; None where it was as far as they.

        Raises:
            CommunicationError: The one given, if nobody was lost; another, if they can't
                go on.
            PlacesDifferError: On all of them, if they can't go on from one place.
            InfeasiblePlanError: If no plan exists for the devices that are left.
        """
        while True:
            gathering = self.gather(error, num_steps)
            try:
                return self._settle(gathering, num_steps)
            except CommunicationError as again:
                if self.survivors.interruption() is None:
                    raise
                error = again  # another one was lost meanwhile

    def gather(self, error: CommunicationError, num_steps: int) -> Gathering:
        """Wait for who is left and point all groups at them.

        Raises:
            CommunicationError: The one given, if nobody was lost; another, if they can't
                go on.
        """
        try:
            gathering = self.survivors.gathered()
        except CommunicationError as failure:
            raise failure from error
        if gathering is None:
            raise error
        self._noticed_at_s = self._noticed_at_s or gathering.noticed_at_s
        lost = tuple(r for r in self.groups.members if r not in gathering.ranks)
        for rank in lost:
            self.recorder.add_event(
                num_steps,
                "lost",
                f"was lost: {gathering.reason_of(rank)}; "
                f"{len(gathering.ranks)} devices go on",
                self.groups.device_ids[rank],
            )
        self.recorder.lose(lost)
        self.groups.regroup(
            gathering.ranks, gathering.generation, gathering.hub, gathering.collective
        )
        return gathering

    def report(self, gathering: Gathering, lost: tuple[int, ...]) -> None:
        """Tell the launcher whom to give up; called from the survivors' thread."""
        if self.run_dir is None:
            return
        for rank in lost:
            loss = WorkerLoss(
                rank=rank,
                device_id=self.groups.device_ids[rank],
                at_s=gathering.noticed_at_s,
                step=self.state().step_index,
                reason=gathering.reason_of(rank),
            )
            write_document(self.run_dir / WorkerLoss.file_name(rank), loss)

    def say_goodbye(self, num_steps: int) -> None:
        """Wait until all have made their last step: one of them may need this state."""
        deadline_s = time.monotonic() + _GOODBYE_S
        while time.monotonic() < deadline_s:
            try:
                if self._are_all_done(deadline_s):
                    return
                self.survivors.check()
            except CommunicationError as error:
                try:
                    self.settle(error, num_steps)
                except CommunicationError as failure:
                    logger.debug("left the others: %s", failure)
                    return

    def close(self) -> None:
        """Gather no more."""
        self.survivors.close()
        if self.run_dir is not None:
            (self.run_dir / GoingOn.FILE_NAME).unlink(missing_ok=True)

    # -- settling -----------------------------------------------------------------------

    def _settle(self, gathering: Gathering, num_steps: int) -> StepOutcome | None:
        rendezvous = self.groups.rendezvous
        own = Lineage(
            rank=self.groups.rank,
            num_steps=num_steps,
            holds_state=self.director.holds_state,
            num_together=self.num_together,
        )
        lineages = rendezvous.gather("place in the run", own, Lineage)
        handover = plan_handover(lineages)
        outcome = self._hand_over(handover) if handover.to else None
        rates = rendezvous.broadcast("rates", self.director.known_rates(), KnownRates)
        self.engine.regroup(self.groups.collective(), gathering.ranks)
        self.director.regroup(rates, handover.holders)
        self._tell_plan(handover.num_steps)
        return outcome

    def _tell_plan(self, num_steps: int) -> None:
        plan = self.director.plan
        assert plan is not None
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

    def _hand_over(self, handover: Handover) -> StepOutcome | None:
        """Give the state after the last step to those that have not applied it."""
        members = tuple(sorted({handover.source, *handover.to}))
        group = self.groups.process_group(members, "handover")
        if group is None:
            return None
        data = None
        if self.groups.rank == handover.source:
            tree: dict[str, Any] = {
                "state": self.state().components(),
                "trailer": self.engine.last_vector,
            }
            data = tree_to_bytes(tree)
        received = broadcast_bytes(data, group, members.index(handover.source))
        if self.groups.rank == handover.source:
            return None
        parts: Any = tree_from_bytes(received)  # the tree made above
        if self.groups.rank in handover.holders:
            self.state().restore(parts["state"])
        return self.engine.outcome_of(parts["trailer"])

    def _are_all_done(self, deadline_s: float) -> bool:
        store = self.groups.store
        assert store is not None
        prefix = f"end/{self.groups.generation}"
        keys = [f"{prefix}/{r}" for r in self.groups.members]
        try:
            store.set(f"{prefix}/{self.groups.rank}", "1")
            while time.monotonic() < deadline_s and self.survivors.interruption() is None:
                if store.check(keys):
                    return True
                time.sleep(_POLL_S)
        except (RuntimeError, ConnectionError):
            return True  # the store is gone, and with it the launcher
        return False
