"""How a process comes to take part in a training that is under way.

It runs the script from its start, as after ``--resume``, with the state that a member gave
it at a step boundary. While its script prepares, the steps that the others apply are
passed on to it; it applies the same sums of gradients, so that it holds the same bits. At
its first batch it offers itself, and the coordinator lets it in after a step.

What the others did together outside of steps (evaluations, reduced metrics) it does not do
again: it reads what came of it. So its script takes the same way as theirs.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

from geartrain.data.loader import EpochOver
from geartrain.errors import CommunicationError
from geartrain.parallel.commit import ReducedStep, StepName
from geartrain.parallel.device_rates import KnownRates
from geartrain.parallel.memory_restore import apply_again
from geartrain.parallel.memory_setup import make_memory
from geartrain.parallel.saved_state import copy_tree, whole_state
from geartrain.parallel.trainer_setup import install_leave_handler

if TYPE_CHECKING:
    from geartrain.data.loader import ShareLoader
    from geartrain.parallel.membership import Gathering, JoiningMembership
    from geartrain.parallel.trainer import Trainer
    from geartrain.planner.model_profile import ComputeCurve

Tree = Mapping[str, Any]  # Any: what checkpoint.tree keeps

_LAST_STEPS_S = 2.0
"""For the last steps before this rank takes part; they are on their way."""
_PAUSE_S = 0.002


@dataclass(slots=True)
class Donor:
    """Gives this rank's state to those that join, at its step boundaries.

    Args:
        membership: Knows who waits for it.
        trainer: Whose state it is.
    """

    membership: JoiningMembership
    trainer: Trainer

    def serve(self) -> None:
        """Give the state to whoever waits for it; between steps only."""
        if self.membership.wants_state():
            self.membership.give(
                {
                    "state": copy_tree(whole_state(self.trainer.state(), ())),
                    "place": self.place(),
                }
            )

    def pass_on(self, step: ReducedStep) -> None:
        """Pass on a step that is about to be applied."""
        if not self.membership.has_followers():
            return
        self.membership.pass_on(
            {
                "vector": step.vector,
                "factor": step.factor,
                "flats": [flat.detach().to("cpu", copy=True) for flat in step.flats],
                "step": step.name.step,
                "lineage": step.name.lineage,
                "positions": [dict(position) for position in self.trainer.positions()],
            }
        )

    def place(self) -> dict[str, Any]:  # Any: plain numbers and names
        """Where in the run this rank is."""
        trainer = self.trainer
        return {
            "step": trainer.step_index,
            "lineage": trainer.engine.name.lineage,
            "positions": [dict(position) for position in positions_before(trainer)],
            "ahead_by": self.membership.ahead_by,
            "last_loss": trainer.last_loss,
            "term_names": list(trainer.engine.term_names),
            "bucket_bytes": trainer.engine.settings.bucket_bytes,
            "devices": [
                name
                for name in trainer.place.groups.device_ids
                if trainer.director.knows(name)
            ],
            "rates": msgspec.json.encode(trainer.director.known_rates()).decode(),
        }


@dataclass(slots=True)
class Joiner:
    """Brings this rank into step with the others, and then in among them.

    Args:
        membership: Of the job.
        trainer: Of this rank.
        limit_s: For the state to come.
    """

    membership: JoiningMembership
    trainer: Trainer
    limit_s: float
    enter_others: Callable[[Gathering, tuple[ComputeCurve, ...]], None]
    """Called once this rank is let in."""
    _pending: deque[Tree] = field(default_factory=deque)
    _curves: tuple[ComputeCurve, ...] | None = None
    _devices: tuple[str, ...] = ()
    _rates: KnownRates | None = None
    """By what the giver plans: all who know it otherwise may be lost while this rank
    enters, and to measure the model again takes seconds."""
    _gathering: Gathering | None = None
    _has_offered: bool = False
    _is_torn: bool = False
    """A step is missing: the state is given anew."""

    def receive(self) -> None:
        """Take on the state of a member.

        Raises:
            CheckpointError: If it is of another model.
            CommunicationError: If nobody gives it.
        """
        given = self.membership.receive_state(self.limit_s)
        self.trainer.state().restore(dict(given["state"]))
        take_place(self.trainer, given["place"])
        self._devices = tuple(given["place"]["devices"])
        self._rates = msgspec.json.decode(given["place"]["rates"], type=KnownRates)
        self._pending.clear()
        self._has_offered = self._is_torn = False

    def knows_later(self) -> bool:
        """Whether the others have made a step that this rank has not."""
        self._pending.extend(self.membership.passed_on())
        return bool(self._pending) or self._is_torn

    def enter(self, loader: ShareLoader) -> None:
        """Take part from the next batch of this loader on.

        Raises:
            EpochOver: If the others are in another epoch by then.
            CommunicationError: If this rank is not let in.
        """
        epoch = loader.position[0]
        self.trainer.director.adopting = loader
        if self._rates is not None:
            self.trainer.director.adopt(self._rates)
        if self._curves is None:
            own = self.trainer.place.groups.device_ids[self.trainer.place.rank]
            is_known = own in self._devices
            self._curves = () if is_known else self.trainer.director.measure(loader)
        while self._gathering is None:
            if self.membership.must_receive():
                self.receive()
            self._catch_up(loader, epoch)
            if not self._has_offered:
                self.membership.offer(self.trainer.engine.name)
                self._has_offered = True
            self._gathering = self.membership.poll_gathering()
        self._make_last_steps(loader, epoch, self._gathering)
        self.enter_others(self._gathering, self._curves)
        self.trainer.joiner = None
        self._check_epoch(loader, epoch)

    def _make_last_steps(
        self, loader: ShareLoader, epoch: int, gathering: Gathering
    ) -> None:
        """Apply what the others have applied before this rank was let in."""
        deadline_s = time.monotonic() + _LAST_STEPS_S
        while self.trainer.step_index < (gathering.num_steps or 0) and not self._is_torn:
            if time.monotonic() > deadline_s:
                return  # the rest is handed over as one
            self._catch_up(loader, epoch)
            time.sleep(_PAUSE_S)
        if self.trainer.step_index == gathering.num_steps:
            self.membership.offer(self.trainer.engine.name)

    def _catch_up(self, loader: ShareLoader, epoch: int) -> None:
        self._pending.extend(self.membership.passed_on())
        while self._pending and not self._is_torn:
            self._apply(self._pending.popleft())
            self._check_epoch(loader, epoch)

    def _apply(self, step: Tree) -> None:
        trainer = self.trainer
        if step["step"] <= trainer.step_index:
            return
        if step["step"] != trainer.step_index + 1:
            self._is_torn = True
            return
        apply_again(
            trainer,
            ReducedStep(
                vector=step["vector"],
                factor=step["factor"],
                flats=step["flats"],
                name=StepName(step=step["step"], lineage=step["lineage"]),
            ),
            list(step["positions"]),
        )
        if trainer.engine.name.lineage != step["lineage"]:
            msg = (
                f"step {step['step']} leads to another history here than where it came "
                "from; this process ends, and its device may join again"
            )
            raise CommunicationError(msg)

    @staticmethod
    def _check_epoch(loader: ShareLoader, epoch: int) -> None:
        if loader.position[0] != epoch:
            raise EpochOver


def exchange_states(trainer: Trainer, membership: JoiningMembership) -> None:
    """Who takes part gives the state to who joins, and may be one of those."""
    spec, regrouper = trainer.spec, trainer.regrouper
    assert spec is not None
    assert regrouper is not None
    trainer.donor = Donor(membership, trainer)
    trainer.memory = make_memory(trainer)
    trainer.engine.on_reduced = trainer.before_update
    if membership.can_leave:
        install_leave_handler(membership.leave)
    if spec.joins:
        trainer.joiner = Joiner(membership, trainer, spec.timeout_s, regrouper.enter)


def take_place(trainer: Trainer, place: Mapping[str, Any]) -> None:  # Any: see Donor.place
    """Be where another rank is, whose state this one has taken on."""
    trainer.step_index, trainer.last_loss = place["step"], place["last_loss"]
    trainer.engine.name = StepName(step=place["step"], lineage=place["lineage"])
    if trainer.regrouper is not None:
        trainer.regrouper.membership.ahead_by = place["ahead_by"]
    trainer.engine.take_shape(tuple(place["term_names"]), place["bucket_bytes"])
    trainer.move_to(list(place["positions"]))
    if trainer.saves is not None:
        trainer.saves.resume_at(trainer.step_index)


def positions_before(trainer: Trainer) -> list[dict[str, int | bool]]:
    """Positions of the loaders at the state as it is, also while a step is open."""
    found, loader = trainer.positions(), trainer.active_loader
    if not trainer.is_step_open or loader is None:
        return found
    after, before = loader.state_dict(), loader.state_before()
    return [before if position == after else position for position in found]
