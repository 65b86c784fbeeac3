"""Carries a plan out on one rank: set-up, steps, re-plans, saving."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from geartrain.data.sampler import ShareView
from geartrain.errors import CommunicationError
from geartrain.parallel.commit import ReducedStep, StepName
from geartrain.parallel.joining import Donor, Joiner, exchange_states
from geartrain.parallel.link_watch import LinkWatcher, make_watcher
from geartrain.parallel.meetings import Meetings
from geartrain.parallel.memory_restore import LoggedSteps
from geartrain.parallel.memory_setup import settle_memory
from geartrain.parallel.model_calls import ModelCalls
from geartrain.parallel.open_step import OpenStep
from geartrain.parallel.own_forward import OwnForward
from geartrain.parallel.peer_memory import PeerMemory
from geartrain.parallel.plan_director import PlanDirector
from geartrain.parallel.ranks import publish_job
from geartrain.parallel.regroup import Regrouper
from geartrain.parallel.regroup_training import (
    check_members,
    do_again,
    retried,
)
from geartrain.parallel.residual_state import ResidualState
from geartrain.parallel.run_recorder import RunRecorder, StepFacts
from geartrain.parallel.saved_state import LoadedState, TrainState, load_state
from geartrain.parallel.state_sync import broadcast_buffers
from geartrain.parallel.step_engine import StepEngine
from geartrain.parallel.step_update import StepOutcome
from geartrain.parallel.step_work import MicroBatch
from geartrain.parallel.tiered_saves import TieredSaves
from geartrain.parallel.tracked_objects import TrackedObjects
from geartrain.parallel.trailer import RankFigures
from geartrain.parallel.trainer_parts import make_director, make_regrouper, tell_algorithm
from geartrain.parallel.trainer_settings import TrainerSettings, UserParts
from geartrain.parallel.trainer_setup import (
    MakeMembers,
    install_stop_handler,
    make_calls,
    make_committer,
    make_engine,
    make_hub,
    make_membership,
    make_residuals,
    no_members,
    prepare_model,
)
from geartrain.parallel.training_end import end, stop
from geartrain.parallel.training_saves import (
    figures_of,
    make_saves,
    save,
    save_again,
    save_in_tiers,
)
from geartrain.parallel.worker_spec import WorkerSpec

if TYPE_CHECKING:
    from geartrain.data.loader import ShareLoader
    from geartrain.parallel.membership import Growth
    from geartrain.parallel.ranks import RankPlace

logger = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(slots=True)
class Trainer:
    """One rank's trainer.

    Args:
        place: This rank among the others.
        parts: The user's model and functions.
        settings: How to train.
        spec: What the launcher said; None without one.
    """

    place: RankPlace
    parts: UserParts
    settings: TrainerSettings
    spec: WorkerSpec | None
    make_members: MakeMembers = no_members
    """Makes the membership that the coordinator of a run decides on."""
    model: torch.nn.Module = field(init=False)
    step_index: int = 0
    calls: ModelCalls = field(init=False)
    is_evaluating: bool = False
    positions: Callable[[], list[dict[str, int | bool]]] = list
    """Positions of all the session's loaders, for saving when asked to stop."""
    engine: StepEngine = field(init=False)
    residuals: ResidualState = field(init=False)
    recorder: RunRecorder = field(init=False)
    director: PlanDirector = field(init=False)
    opened: OpenStep = field(init=False)
    _stop_requested: bool = False
    own_forward: OwnForward = field(init=False)
    _watcher: LinkWatcher | None = None
    _finished_at_s: float = 0.0
    saves: TieredSaves | None = None
    """None where nothing is saved while the training goes on."""
    regrouper: Regrouper | None = None
    """None where a lost rank ends the training."""
    is_step_open: bool = False
    """Until it is applied."""
    last_loss: float = 0.0
    move_to: Callable[[list[dict[str, int | bool]]], None] = lambda _positions: None
    """Moves all the session's loaders."""
    joiner: Joiner | None = None
    """While this rank does not take part yet."""
    donor: Donor | None = None
    """None where nobody can join."""
    memory: PeerMemory | None = None
    """None where no agent keeps the state in memory."""
    logged_steps: LoggedSteps | None = None
    """Still to be applied, where the training goes on from memory."""
    meetings: Meetings = field(init=False)
    tracked: TrackedObjects = field(default_factory=TrackedObjects)

    def __post_init__(self) -> None:
        if self.spec is not None:
            install_stop_handler(self._request_stop)
        place, parts, settings = self.place, self.parts, self.settings
        spec, groups = self.spec, place.groups
        run_dir = Path(spec.run_dir) if spec is not None else None
        self.recorder = RunRecorder(
            device_ids=groups.device_ids, run_dir=run_dir if groups.is_lead else None
        )
        place.groups.hub = make_hub(place, settings, self.spec)
        membership = make_membership(place.groups, self.spec, settings, self.make_members)
        self.model = prepare_model(place, parts, settings)
        self.calls = make_calls(place, parts, settings, self.model)
        self.engine = make_engine(place, parts, settings, self.model)
        tell_algorithm(self)
        self.residuals = make_residuals(place.groups, self.engine)
        self.director = make_director(self)
        self._watcher = make_watcher(place.groups, self.director, self.recorder)
        self.opened = OpenStep(place, self.calls, self.engine, self.director, settings.seed)
        self.saves = make_saves(self)
        self.meetings, self.own_forward = Meetings(self), OwnForward(self)
        if membership is not None and run_dir is not None:
            self.regrouper = make_regrouper(self, membership, run_dir)
            self.engine.committer = membership.committer() or make_committer(
                groups, self.engine
            )
            exchange_states(self, membership)

    def begin(self) -> None:
        """The state is there: take part from now on; all ranks call it.

        Raises:
            CommunicationError: If the others do not come in time.
        """
        if self.joiner is not None:
            self.joiner.membership.join()
            self.joiner.receive()
        elif self.regrouper is not None:
            self.regrouper.begin()

    # -- what the session asks ----------------------------------------------------

    @property
    def active_loader(self) -> ShareLoader | None:
        """The one whose batch was asked for last, or is the open step's."""
        return self.opened.active_loader

    def assign(self, loader: ShareLoader) -> ShareView:
        """The shares in force for a loader's next batch; plans at the first one."""
        if self.is_evaluating:
            return self.director.evaluation_shares()
        planned_at_s = self.director.planned_at_s
        if self.joiner is not None:
            self.joiner.enter(loader)
        if self.logged_steps is not None:
            self.logged_steps.apply(loader)
        view = retried(self, lambda: self._assign(loader))
        if self.director.planned_at_s != planned_at_s:
            self._finished_at_s = self.director.planned_at_s  # no step took that time
        self.opened.follow(loader)
        return view

    def step(self, batch: Any) -> float:  # Any: the user's batch
        """Make one optimizer step; see ``Session.step``."""
        self.calls.require_loss()  # also where this rank's share is empty
        first = self.step_index
        while True:
            try:
                return self._make_step(batch)
            except CommunicationError as error:
                batch = do_again(self, error, batch)
                if self.step_index > first:  # it had been applied, here or elsewhere
                    return self.last_loss

    def _make_step(self, batch: Any) -> float:  # Any: the user's batch
        try:
            for micro in self.open_step(batch):
                check_members(self)
                with self.micro_context(micro):
                    terms = self.calls.loss_terms(micro.batch)
                    self.engine.accumulate(terms, last=micro.is_last, ghost=micro.is_ghost)
                self.count(micro)
        except BaseException:
            self.engine.abandon()
            raise
        return self.finish_step()

    def together(self, operation: Callable[[], T]) -> T:
        """Do what needs all ranks; again with those left, where one is lost meanwhile.

        Raises:
            CommunicationError: If the others can't go on.
        """
        return self.meetings.hold(operation)

    def save(self, path: Path, positions: list[dict[str, int | bool]]) -> None:
        """Save everything on the lead; see ``Session.save``."""
        save(self, path, positions)

    def load(self, path: Path) -> list[dict[str, int | bool]]:
        """Load everything; returns the loaders' positions."""
        settle_memory(self)
        self.logged_steps = None
        return self.go_on_from(load_state(path, self.state()))

    def go_on_from(self, loaded: LoadedState) -> list[dict[str, int | bool]]:
        """Go on from a state that the model has taken on; returns as ``load`` does."""
        self.step_index = loaded.step_index
        self.engine.name = StepName(step=self.step_index, lineage=loaded.lineage)
        if self.saves is not None:
            self.saves.resume_at(self.step_index)
        if self.regrouper is not None:
            self.regrouper.membership.reset(self.engine.name)
        retried(self, lambda: self.residuals.restore(loaded.residuals))
        return loaded.positions

    def average_models(self) -> None:
        """Give all ranks one model, where steps are not exact; all ranks must call it."""
        if self.engine.averager is not None:
            self.engine.averager.settle()

    def sync_buffers(self) -> None:
        """Before evaluating: running statistics may differ between ranks."""
        self.average_models()
        broadcast_buffers(self.place.groups, self.model)

    def evaluation_micro_batch_size(self) -> int:
        """Samples a forward pass without gradients may take."""
        replica = self.director.replica
        return replica.micro_batch_size if replica is not None else 0

    def close(self, *, gather_waits: bool) -> None:
        """Write the last step's records."""
        end(self, gather_waits=gather_waits)

    # -- a step ---------------------------------------------------------------------

    def open_step(self, batch: Any) -> Iterator[MicroBatch]:  # Any: the user's batch
        """Begin a step; returns this rank's micro-batches of it."""
        self.is_step_open = True
        if self.regrouper is not None:
            self.regrouper.begin_step()
        return self.opened.open(batch, self.step_index)

    def finish_step(self) -> float:
        """Exchange and apply the open step; returns the mean loss."""
        outcome = self.engine.finish(figures_of(self), stop=self._stop_requested)
        seen = self._record(outcome)
        self.step_scheduler(outcome.loss)
        self._count_step(outcome)
        save_again(self)
        save_in_tiers(self, outcome)
        if outcome.trailer.stop_requested:
            stop(self)
        self.serve()
        if self.active_loader is not None:
            self.director.observe(self.step_index, seen)
            if self._watcher is not None:
                self._watcher.after_step(self.step_index, seen)
        return outcome.loss

    def after_regrouping(self, outcome: StepOutcome | None) -> None:
        """Those that are left are in step again.

        Args:
            outcome: Of a step that others had applied, and whose state was taken over.

        Raises:
            TrainingStopped: If a stop was asked for in that step.
        """
        self.opened.num_opened = 0
        self._watcher = None  # links are watched among all ranks or not at all
        if outcome is None:
            return
        self._record(outcome)
        self._count_step(outcome)
        save_in_tiers(self, outcome)
        if outcome.trailer.stop_requested:
            stop(self)

    def grow(self, growth: Growth) -> None:
        """There are more devices than before."""
        self.place.grow(growth.fleet, growth.network)
        if self.place.groups.is_lead:
            publish_job(self.place.groups)

    def micro_context(self, micro: MicroBatch) -> AbstractContextManager[None]:
        """What modules may ask for while a micro-batch is computed."""
        return self.opened.context(micro, self.step_index)

    def count(self, micro: MicroBatch) -> None:
        """A micro-batch has been computed."""
        self.opened.count(micro)

    def _record(self, outcome: StepOutcome) -> tuple[RankFigures, ...]:
        """Write the step down; returns the figures of all ranks."""
        now_s = time.time()
        step_s = now_s - self._finished_at_s if self._finished_at_s else 0.0
        self._finished_at_s = now_s
        facts = StepFacts(
            step=self.step_index,
            at_s=now_s,
            step_s=step_s,
            loss=outcome.loss,
            figures=tuple(outcome.trailer.ranks),
        )
        self.recorder.add_step(facts)
        return facts.figures

    def _count_step(self, outcome: StepOutcome) -> None:
        self.step_index += 1
        self.last_loss = outcome.loss
        self.is_step_open = False
        if self.regrouper is not None:
            self.regrouper.applied(self.step_index)

    def step_scheduler(self, loss: float) -> None:
        """Move the schedule and the averages on, after a step with this mean loss."""
        scheduler = self.parts.lr_scheduler
        if self.engine.gradient_group is None:
            return
        if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
            scheduler.step(loss)
        elif scheduler is not None:
            scheduler.step()
        self.tracked.after_step()

    def _assign(self, loader: ShareLoader) -> ShareView:
        if self.director.plan is not None:
            check_members(self)
            self.serve()
        return self.director.assign(loader)

    # -- set-up -------------------------------------------------------------------------

    def serve(self) -> None:
        """Give the state to those that wait for it, between two steps."""
        if self.donor is not None and self.joiner is None:
            self.donor.serve()

    def before_update(self, step: ReducedStep) -> None:
        """A committed step is about to be applied here."""
        if self.donor is not None:
            self.donor.pass_on(step)
        if self.memory is not None:
            self.memory.before_update(step)

    def _request_stop(self) -> None:
        self._stop_requested = True

    def state(self) -> TrainState:
        """What makes up the training as it is now."""
        return TrainState(
            model=self.model,
            optimizer=self.parts.optimizer,
            lr_scheduler=self.parts.lr_scheduler,
            scaler=self.engine.scaler,
            step_index=self.step_index,
            seed=self.settings.seed,
            averager=self.engine.averager,
            lineage=self.engine.name.lineage,
            tracked=self.tracked,
        )
