"""After a loss: those that are left agree on how far they are, and go on from there.

Who has applied the interrupted step hands its state on to who has not; where nobody has,
all do the step again. The lowest rank that is left leads from then on: it records, saves
and prints for all. See docs/explanation/faults.md.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from geartrain.checkpoint.snapshot import read_manifest
from geartrain.checkpoint.tree_file import tree_from_bytes, tree_to_bytes
from geartrain.errors import CheckpointError, CommunicationError
from geartrain.parallel.device_rates import KnownRates
from geartrain.parallel.goodbye import Goodbye
from geartrain.parallel.handover import (
    Handover,
    Lineage,
    PlacesDifferError,
    describe_transfer,
    plan_handover,
)
from geartrain.parallel.member_changes import MemberChanges
from geartrain.parallel.ranks import publish_job
from geartrain.parallel.state_sync import broadcast_bytes
from geartrain.parallel.survivors_buffers import BufferKeeper
from geartrain.parallel.worker_spec import GoingOn
from geartrain.telemetry import write_document

if TYPE_CHECKING:
    from geartrain.parallel.membership import Gathering, Gone, Growth, JoiningMembership
    from geartrain.parallel.plan_director import PlanDirector
    from geartrain.parallel.process_group import RankGroups
    from geartrain.parallel.run_recorder import RunRecorder
    from geartrain.parallel.saved_state import TrainState
    from geartrain.parallel.step_engine import StepEngine
    from geartrain.parallel.step_update import StepOutcome
    from geartrain.planner.model_profile import ComputeCurve

logger = logging.getLogger(__name__)

_GOODBYE_S = 30.0
_POLL_S = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class Save:
    """A call of ``session.save`` that this rank has returned from."""

    path: Path
    step: int
    """Optimizer steps applied before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Word:
    """What the lead tells the others once it is known who is how far."""

    rates: KnownRates
    saves_again: bool
    """A lead was lost before its last save was whole."""


@dataclass(slots=True)
class Regrouper:
    """Brings the training on this rank back in step with those that are left.

    Args:
        membership: Knows who they are.
        groups: The ranks; changed to those that are left.
        director: Plans anew.
        engine: Told whom it exchanges gradients with.
        recorder: Told what happened; given the run log where this rank comes to lead.
        state: The training state as it is now.
        run_dir: Where the lead says that the run goes on, and without whom.
    """

    membership: JoiningMembership
    groups: RankGroups
    director: PlanDirector
    engine: StepEngine
    recorder: RunRecorder
    state: Callable[[], TrainState]
    run_dir: Path
    num_in_vain: Callable[[], int]
    """Samples of the open step that were computed here."""
    is_step_open: Callable[[], bool]
    place: Callable[[], dict[str, Any]]
    """Where in the run this rank is, beside its state; ``take_place`` takes it on."""
    take_place: Callable[[dict[str, Any]], None]
    grow: Callable[[Growth], None]
    """Called when there are more devices than before."""
    on_idle: Callable[[], None]
    """Called now and then while this rank waits for the others."""
    step_scheduler: Callable[[float], None]
    """Called with the loss of a step that was applied while settling."""
    buffers: BufferKeeper = field(init=False)
    changes: MemberChanges = field(init=False)
    goodbye: Goodbye = field(init=False)
    num_together: int = 0
    last_save: Save | None = None
    have_all_begun: bool = False
    """Whether all ranks had begun the step that was interrupted last, with one batch."""
    _cut_step: int = -1
    """Whose batch was cut anew, and the generation by whose shares."""
    _cut_in: int = 0
    owes_save: bool = False
    """The last save is to be made again after the next step, by all ranks alike."""
    _lead: int = 0
    """Who led when the ranks were in step last."""
    _began_at_s: float = 0.0
    _joins: bool = False
    """Until it has come in step with the others for the first time."""
    _curves: tuple[ComputeCurve, ...] = ()
    _outcome: StepOutcome | None = None
    """Of the interrupted step, once it was applied while settling."""

    def __post_init__(self) -> None:
        self.buffers = BufferKeeper(self.engine.model)
        self._lead = self.groups.lead
        self.changes = MemberChanges(
            self.groups, self.recorder, self.run_dir, lambda: self.state().step_index
        )
        self.goodbye = Goodbye(
            self.groups, self.membership, lambda error: self.settle(error, 0)
        )

    def begin(self) -> None:
        """From now on a lost rank does not end the training; all ranks call it.

        Raises:
            CommunicationError: If the others do not come in time.
        """
        self.membership.begin(self.engine.name)
        if self.groups.is_lead:
            publish_job(self.groups)
            write_document(self.run_dir / GoingOn.FILE_NAME, GoingOn())
        self._follow()

    def _follow(self) -> None:
        self.membership.follow(self.report, self.groups.interrupt, self.on_idle)

    def enter(self, gathering: Gathering, curves: tuple[ComputeCurve, ...]) -> None:
        """Take part from now on, in a training that is under way.

        Args:
            gathering: The first one with this rank.
            curves: How fast its device computes, where the others may not know.

        Raises:
            CommunicationError: If the others can't go on, or not with this rank.
        """
        self._joins, self._curves = True, curves
        self._follow()
        num_steps = self.state().step_index
        self._point_at(gathering)
        try:
            self._settle(gathering, num_steps)
        except PlacesDifferError as error:
            if self.membership.interruption() is None:
                raise
            self.settle(error, num_steps)
        except CommunicationError as error:
            self.settle(error, num_steps)

    def begin_step(self) -> None:
        """A step begins."""
        self.membership.check()
        self._began_at_s = time.monotonic()
        self.membership.begin_step()
        self.buffers.keep()

    def applied(self, num_steps: int) -> None:
        """A step was applied."""
        self.membership.end_step(time.monotonic() - self._began_at_s)
        self.buffers.applied()
        self.groups.fresh = frozenset()
        self.changes.applied(num_steps)

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
                self._settle(gathering, num_steps + (self._outcome is not None))
                break
            except PlacesDifferError as again:
                if self.membership.interruption() is None:
                    raise
                error = again
            except CommunicationError as again:
                # Another one was lost meanwhile. An exchange may show that before the
                # coordinator says so, for whom gathering waits.
                error = again
        outcome, self._outcome = self._outcome, None
        return outcome

    def gather(self, error: CommunicationError, num_steps: int) -> Gathering:
        """Wait for who is left and point all groups at them.

        Raises:
            CommunicationError: The one given, if nobody was lost; another, if they can't
                go on.
        """
        try:
            gathering = self.membership.gathered()
        except CommunicationError as failure:
            raise failure from error
        if gathering is None:
            raise error
        self.changes.notice(gathering)
        self._point_at(gathering)
        if not self._joins:
            self.membership.ready()
        if self.groups.is_lead:
            self.recorder.lead(self.run_dir)
        self.changes.tell(gathering, num_steps)
        return gathering

    def _point_at(self, gathering: Gathering) -> None:
        if gathering.grown is not None:
            self.grow(gathering.grown)
        self.groups.regroup(
            gathering.ranks,
            gathering.generation,
            gathering.hub,
            gathering.collective,
            gathering.joined,
        )
        if self.membership.interruption() is not None:
            self.groups.interrupt()  # it came before there was a new generation to wake

    def report(self, gone: Sequence[Gone]) -> None:
        """Tell the launcher whom to give up; called from the membership's thread."""
        if not self.goodbye.is_over:  # else they only ended before this rank did
            self.changes.report(gone)

    def say_goodbye(self, num_steps: int, finish: Callable[[], None]) -> None:
        """Wait until all have made their last step: one of them may need this state.

        Args:
            num_steps: Optimizer steps that were applied here.
            finish: What the lead does last; the next one does it, if it is lost.
        """
        self.goodbye.settle = lambda error: self.settle(error, num_steps)
        self.goodbye.say(finish)

    def close(self) -> None:
        """Gather no more."""
        self.membership.close(in_order=self.goodbye.has_begun)
        if self.membership.is_left_out:
            self.recorder.retire()  # another rank writes the log by now
        elif self.groups.is_lead:
            (self.run_dir / GoingOn.FILE_NAME).unlink(missing_ok=True)

    # -- settling -----------------------------------------------------------------------

    def _settle(self, gathering: Gathering, num_steps: int) -> None:
        rendezvous = self.groups.rendezvous
        voted = self.engine.voted_name
        if voted is not None and not self.membership.may_apply(voted):
            voted = None
        own = Lineage(
            rank=self.groups.rank,
            num_steps=num_steps,
            holds_state=self._joins or self.director.holds_state,
            num_together=self.num_together,
            planned_sizes=self.director.planned_sizes,
            num_in_vain=self.num_in_vain(),
            has_begun=self.is_step_open(),
            cut_in=self._cut_in if self._cut_step == num_steps else 0,
            name=self.engine.name.lineage,
            voted=voted.lineage if voted is not None else "",
            joins=self._joins,
            lead=self.groups.lead,
            curves=self._curves,
        )
        lineages = rendezvous.gather("place in the run", own, Lineage)
        handover = plan_handover(lineages)
        self.groups.lead = handover.lead
        self._apply(handover)
        if handover.to:
            told, values = describe_transfer(handover, lineages, self.groups.device_ids)
            self.recorder.add_event(handover.num_steps, "note", told, values=values)
        self.director.keep_only(handover.planned_sizes)
        self.director.rates.learn([curve for li in lineages for curve in li.curves])
        word = rendezvous.broadcast("rates", self._word(), _Word, self.groups.lead_index)
        num_ranks = len(self.groups.device_ids)
        self.engine.regroup(self.groups.collective(), gathering.ranks, num_ranks)
        self.director.regroup(word.rates, handover.holders)
        if self._joins:
            self._entered(handover)
        self._lead, self.owes_save = self.groups.lead, word.saves_again
        self.have_all_begun = handover.have_all_begun
        self.changes.recovery.planned(time.time(), handover.num_in_vain)
        self.changes.tell_plan(self.director.plan, handover.num_steps)

    def _entered(self, handover: Handover) -> None:
        """This rank holds what the others do, and is one of them."""
        self.num_together = handover.num_together
        if self.groups.rank in handover.to:
            self.membership.offer(self.engine.name)
        self._joins = False
        self.membership.ready()

    def cut_anew(self, num_steps: int) -> None:
        """The batch of the open step was handed out again, by the shares in force.

        Args:
            num_steps: Optimizer steps applied before.
        """
        self._cut_step, self._cut_in = num_steps, self.groups.generation

    def _apply(self, handover: Handover) -> None:
        """Apply the interrupted step, or take on the state after it, or undo it."""
        if self.groups.rank in handover.applies:
            self.buffers.applied()
            self._outcome = self.engine.apply_voted()
            self.step_scheduler(self._outcome.loss)
        self.buffers.restore()
        if not handover.to:
            return
        outcome = self._hand_over(handover)
        if not self._joins:
            self._outcome = outcome or self._outcome

    def _word(self) -> _Word:
        return _Word(
            rates=self.director.known_rates(),
            saves_again=self.owes_save or self._has_lost_save(),
        )

    def _has_lost_save(self) -> bool:
        """Whether a lead was lost before the last save was whole."""
        if self.last_save is None or self.groups.lead == self._lead:
            return False
        try:
            found = read_manifest(self.last_save.path).metadata.get("step")
        except CheckpointError:
            return True
        return not isinstance(found, int) or found < self.last_save.step

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
                "place": self.place(),
            }
            data = tree_to_bytes(tree)
        received = broadcast_bytes(
            data,
            group,
            members.index(handover.source),
            self.groups.rendezvous.interruption,
        )
        if self.groups.rank == handover.source:
            return None
        parts: Any = tree_from_bytes(received)  # the tree made above
        if self._joins:
            self.state().restore(parts["state"])
            self.take_place(parts["place"])
            return None
        self.membership.drop_followers()
        if self.groups.rank in handover.holders:
            self.state().restore(parts["state"])
        return self.engine.outcome_of(parts["trailer"])
