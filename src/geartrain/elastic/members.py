"""The members of a job as the run's coordinator knows them, for the training.

Threads meet here: the training's own; the control thread of the client, which hears of an
epoch's end and cuts its exchange at once; the one that builds the next exchange; and those
that hand the state to processes that join.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from geartrain.elastic.client import Client
from geartrain.elastic.coordinator_committer import CoordinatorCommitter, known_lineage
from geartrain.elastic.epoch_builder import EpochBuilder, check_built
from geartrain.elastic.link import Callbacks
from geartrain.elastic.outcome import MembershipEnded
from geartrain.elastic.state_search import StateSearch
from geartrain.elastic.view import HeldState
from geartrain.errors import CommunicationError, LeftTraining
from geartrain.parallel.commit import StepName
from geartrain.parallel.membership import Gathering, OnGone

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

    from geartrain.collectives.exchange_hub import ExchangeHub
    from geartrain.elastic.greeting import Credentials
    from geartrain.elastic.messages import Heal, NewEpoch
    from geartrain.elastic.state_giver import StateGiver

_NOTICE_S = 2.0
"""An exchange that failed by a fault has been reported before, or is within moments."""
_SETTLE_S = 120.0
"""For a new epoch to come, as long as the coordinator is there or may come back."""
_LOOK_S = 0.05

Tree = Mapping[str, Any]  # Any: what checkpoint.tree keeps
MakeClient = Callable[[Callbacks], Client]


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnPlace:
    """This process among the members."""

    rank: int
    member_id: str
    timeout_s: float
    """Outer limit of waits for the others."""
    fleet_path: Path
    credentials: Credentials
    """Of the run, for whom the state is asked of."""


class Members:
    """Who takes part, by the coordinator's word.

    Args:
        store: Shared by all ranks, under a prefix of the session; it is cloned.
        place: This process.
        hub: Of all ranks; its faults are told to the coordinator from now on.
        giver: Hands out this rank's state.
        make_client: Of the coordinator, with these callbacks; it is not started yet.
    """

    def __init__(
        self,
        store: Store,
        place: OwnPlace,
        hub: ExchangeHub,
        giver: StateGiver,
        make_client: MakeClient,
    ) -> None:
        self.is_left_out = False
        self.can_leave = True
        self._place = place
        self._giver = giver
        self._client = make_client(
            Callbacks(on_interruption=self._interrupted, on_heal=self._told_to_heal)
        )
        self._builder = EpochBuilder(store, self._client, hub, place.fleet_path)
        self._committer = CoordinatorCommitter(self._client, self._epoch, place.timeout_s)
        self._on_idle: Callable[[], None] = lambda: None
        self._has_begun = False
        self._settled = 0  # epoch that the training goes on with
        self._incarnations: Mapping[int, str] = {}  # of its members, by rank
        self._num_told = 0  # of those that are gone
        self._search = StateSearch(place.member_id, place.credentials, self._client)

    # -- taking part --------------------------------------------------------------------

    def committer(self) -> CoordinatorCommitter:
        """The coordinator decides."""
        return self._committer

    def begin(self, name: StepName) -> None:
        """Join with this state, and take up the first epoch.

        Raises:
            CommunicationError: If the others do not come in time.
        """
        self.ahead_by = 0
        self._client.enter("away")
        self._client.start(HeldState(step=name.step, lineage=known_lineage(name)))
        epoch = self._client.next_epoch(0, self._place.timeout_s)
        names = list(self._builder.names)
        if {member.member_id for member in epoch.members} == set(names):
            self._settled = epoch.epoch
            self._incarnations = {
                names.index(member.member_id): member.incarnation
                for member in epoch.members
            }
            self.ready()
        # Else somebody was lost already, and another exchange is to be built.
        self._has_begun = True
        self._builder.start(self._settled)

    def interruption(self) -> str | None:
        """Why nothing more will come of the epoch in force; None while all is well."""
        if not self._has_begun:
            return None
        reason = self._client.interruption(self._settled)
        return reason if reason is not None else self._builder.fault(self._settled)

    def check(self) -> None:
        """Look whether the epoch in force has ended, without waiting.

        Raises:
            CommunicationError: If so.
        """
        self._client.progress()
        reason = self.interruption()
        if reason is not None:
            raise CommunicationError(reason)

    def follow(
        self,
        on_gone: OnGone,
        on_interrupted: Callable[[], None],
        on_idle: Callable[[], None],
    ) -> None:
        """Have functions called from threads; what came before is told at once."""
        self._on_idle = on_idle
        self._builder.on_gone, self._builder.on_interrupted = on_gone, on_interrupted
        if self.interruption() is not None:
            on_interrupted()
        gone = self._builder.gone()
        if gone:
            on_gone(gone)

    def gathered(self) -> Gathering | None:
        """Wait for the next epoch, and the exchange of it that stands.

        Raises:
            CommunicationError: If nobody can go on, or not this rank.
            LeftTraining: If this rank was to leave, and has.
        """
        if not self._is_interrupted_within(_NOTICE_S):
            return None
        deadline_s = time.monotonic() + _SETTLE_S
        after = self._settled
        try:
            while True:
                epoch = self._next_epoch(after, deadline_s)
                gathering = self._await_built(epoch)
                if gathering is not None:
                    return self._settle(gathering)
                after = epoch.epoch
        except MembershipEnded as ended:
            self.is_left_out = True
            raise self._error(ended) from ended

    def ready(self) -> None:
        """The exchange of the epoch in force stands, and this rank holds its state."""
        self._client.ready(self._settled)

    def may_apply(self, name: StepName) -> bool:
        """Whether the coordinator has committed this step."""
        held, step = self._client.held, name.step + self.ahead_by
        return (held.step, held.lineage) == (step, name.lineage)

    @property
    def ahead_by(self) -> int:
        """Steps that the coordinator has counted beyond the training's own count."""
        return self._committer.ahead_by

    @ahead_by.setter
    def ahead_by(self, num_steps: int) -> None:
        self._committer.ahead_by = num_steps

    def reset(self, name: StepName) -> None:
        """All ranks have taken on another state, by loading it."""
        self.ahead_by = self._client.held.step - name.step

    def begin_step(self) -> None:
        """From now on standing still is a fault."""
        self._client.enter("step")

    def end_step(self, step_s: float) -> None:
        """The script may do what it likes until the next step."""
        self._client.note_step(step_s)
        self._client.enter("away")

    def progress(self) -> None:
        """The main loop gets on."""
        self._client.progress()

    def part(self) -> None:
        """All have made their last step: who ends now breaks nothing."""
        self._builder.is_quiet = True

    def leave(self, reason: str) -> None:
        """Ask to be left out of the epoch after the step that runs."""
        self._client.leave(reason)

    def close(self, *, in_order: bool) -> None:
        """Leave the others."""
        self._builder.close()
        if in_order:
            self._client.leave("its script has ended")
        self._client.close()
        self._giver.close()
        self._search.close()

    # -- giving the state ---------------------------------------------------------------

    def wants_state(self) -> bool:
        """Whether somebody waits for this rank's state."""
        return self._giver.has_waiting

    def give(self, state: Tree) -> None:
        """Give it to them."""
        self._giver.give(state)

    def has_followers(self) -> bool:
        """Whether steps are to be passed on."""
        return self._giver.has_followers

    def pass_on(self, step: Tree) -> None:
        """Pass a step on."""
        self._giver.pass_on(step)

    def drop_followers(self) -> None:
        """The state here changed by something else than a step."""
        self._giver.drop_followers()

    # -- joining ------------------------------------------------------------------------

    def join(self) -> None:
        """Ask to take part, without a state so far."""
        self._client.enter("away")
        self._client.start(HeldState(ranges=()))
        self._has_begun = True
        self._builder.start(0)

    def receive_state(self, limit_s: float) -> Tree:
        """Wait for the state of a giver.

        Raises:
            CommunicationError: If nobody gives it in time.
        """
        try:
            return self._search.receive(limit_s)
        except MembershipEnded as ended:
            self.is_left_out = True
            raise self._error(ended) from ended

    def must_receive(self) -> bool:
        """Whether this rank is to get a newer state."""
        return self._search.is_asked_again

    def passed_on(self) -> Sequence[Tree]:
        """Steps that have come since the last call, in order."""
        self._client.progress()
        return self._search.take_steps()

    def offer(self, name: StepName) -> None:
        """This rank holds that state, and can take part after the next step."""
        self._client.healed(name.step + self.ahead_by, known_lineage(name))

    def poll_gathering(self) -> Gathering | None:
        """The first gathering with this rank, once it is there.

        Raises:
            CommunicationError: If this rank will not be let in.
        """
        try:
            if self._client.peek_epoch(self._settled) is None:
                self._client.wait_for_news(_LOOK_S)
                return None
        except MembershipEnded as ended:
            self.is_left_out = True
            raise self._error(ended) from ended
        return self.gathered()

    # -- inside -------------------------------------------------------------------------

    def _epoch(self) -> int:
        return self._settled

    def _settle(self, gathering: Gathering) -> Gathering:
        """Say what is new in it for the training, which goes on with it."""
        before, now = self._incarnations, gathering.incarnations
        gone = self._builder.gone()
        news, self._num_told = gone[self._num_told :], len(gone)
        self._settled, self._incarnations = gathering.generation, now
        num_steps = gathering.num_steps
        self._client.enter("away")  # until the next step begins
        return replace(
            gathering,
            num_steps=None if num_steps is None else num_steps - self.ahead_by,
            gone=tuple(one for one in news if one.incarnation in before.values()),
            joined=frozenset(r for r, name in now.items() if before.get(r) != name),
        )

    def _is_interrupted_within(self, limit_s: float) -> bool:
        deadline_s = time.monotonic() + limit_s
        latest_s = deadline_s + _SETTLE_S
        while self.interruption() is None:
            now_s = time.monotonic()
            if not self._client.is_connected:  # it can say so only when it is back
                deadline_s = min(now_s + limit_s, latest_s)
            if now_s >= deadline_s:
                return False
            self._client.progress()
            with self._builder.changed:
                self._builder.changed.wait(min(deadline_s - now_s, _LOOK_S))
        return True

    def _next_epoch(self, after: int, deadline_s: float) -> NewEpoch:
        """Wait for it, and look now and then whether somebody wants the state.

        Raises:
            CommunicationError: After the deadline; MembershipEnded where this rank takes
                part no more.
        """
        while True:
            left_s = deadline_s - time.monotonic()
            try:
                return self._client.next_epoch(after, min(max(left_s, 0.0), _LOOK_S))
            except MembershipEnded:
                raise
            except CommunicationError:
                if left_s <= 0:
                    raise
            self._on_idle()

    def _await_built(self, epoch: NewEpoch) -> Gathering | None:
        """Wait for the epoch's exchange; None where it came to nothing."""
        builder = self._builder
        while True:
            self._client.progress()
            check_built(builder)
            with builder.changed:
                built = builder.built
                if built is not None and built.generation == epoch.epoch:
                    is_in_force = self._client.interruption(epoch.epoch) is None
                    return built if is_in_force else None
                if builder.is_over(epoch.epoch):
                    return None
                builder.changed.wait(_LOOK_S)

    def _error(self, ended: MembershipEnded) -> CommunicationError | LeftTraining:
        ending, own = ended.ending, self._place.member_id
        if ending.kind == "dismissed" and not ending.is_failure:
            return LeftTraining(f"{own} has left ({ending.reason}); the others go on")
        if ending.kind == "dismissed":
            return CommunicationError(
                f"the others go on without {own} ({ending.reason}); what it computed since "
                "was not applied"
            )
        return CommunicationError(
            f"the run can't go on ({ending.kind}): {ending.reason}; start again with "
            "--resume, which loads the last save"
        )

    # -- the control thread -------------------------------------------------------------

    def _interrupted(self, reason: str) -> None:
        self._builder.interrupted(reason)

    def _told_to_heal(self, heal: Heal) -> None:
        self._search.told(heal)
