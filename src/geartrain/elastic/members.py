"""The members of a job as the run's coordinator knows them, for the training.

Three threads meet here: the training's own, the control thread of the client, which hears
of an epoch's end and cuts its exchange at once, and one that builds the exchange of the
next epoch while the training may still be in a long computation.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from torch._C._distributed_c10d import PrefixStore

from geartrain.collectives.faults.bounded import within
from geartrain.elastic.client import Client
from geartrain.elastic.lineage import first_lineage
from geartrain.elastic.link import Callbacks
from geartrain.elastic.outcome import Interrupted, MembershipEnded
from geartrain.elastic.view import HeldState
from geartrain.errors import CommunicationError, GeartrainError
from geartrain.parallel.commit import StepName
from geartrain.parallel.membership import Gathering, OnGathered

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

    from geartrain.collectives.exchange_hub import ExchangeHub
    from geartrain.collectives.faults.fault import Fault
    from geartrain.elastic.messages import LostMember, NewEpoch

logger = logging.getLogger(__name__)

_NOTICE_S = 2.0
"""An exchange that failed by a fault has been reported before, or is within moments."""
_SETTLE_S = 120.0
"""For a new epoch to come, as long as the coordinator is there or may come back."""
_LOOK_S = 0.05
_STORE_S = 20.0
_LONGEST_EPOCH_WAIT_S = 3600.0

MakeClient = Callable[[Callbacks], Client]


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnPlace:
    """This process among the members."""

    rank: int
    timeout_s: float
    """Outer limit of waits for the others."""


class Members:
    """Who takes part, by the coordinator's word.

    Args:
        store: Shared by all ranks, under a prefix of the session; it is cloned.
        place: This process.
        hub: Of all ranks; its faults are told to the coordinator from now on.
        make_client: Of the coordinator, with these callbacks; it is not started yet.
    """

    def __init__(
        self, store: Store, place: OwnPlace, hub: ExchangeHub, make_client: MakeClient
    ) -> None:
        self.is_left_out = False
        self._store = store
        self._place = place
        self._names = hub.place.device_ids
        self._hub = hub  # that opens the exchange in force
        self._client = make_client(Callbacks(on_interruption=self._interrupted))
        self._changed = threading.Condition()
        self._on_gathered: OnGathered | None = None
        self._on_interrupted: Callable[[], None] | None = None
        self._settled = 0  # epoch that the training goes on with
        self._has_begun = False
        self._built: Gathering | None = None
        self._untold: Gathering | None = None
        self._fault: tuple[int, str] | None = None  # the latest, by epoch
        self._failure: str | None = None
        self._is_parting = self._is_closed = False
        hub.on_fault = partial(self._faulted, 0)

    # -- the training's thread ----------------------------------------------------------

    def committer(self) -> CoordinatorCommitter:
        """The coordinator decides."""
        return CoordinatorCommitter(self._client, self._epoch, self._place.timeout_s)

    def begin(self, name: StepName) -> None:
        """Join with this state, and take up the first epoch.

        Raises:
            CommunicationError: If the others do not come in time.
        """
        self._client.enter("away")
        self._client.start(HeldState(step=name.step, lineage=known_lineage(name)))
        epoch = self._client.next_epoch(0, self._place.timeout_s)
        is_whole = {m.member_id for m in epoch.members} == set(self._names)
        if is_whole:  # else somebody was lost already, and the exchange is another
            self._hub.on_fault = partial(self._faulted, epoch.epoch)
            self._settled = epoch.epoch
            self._client.ready(epoch.epoch)
        self._has_begun = True
        threading.Thread(
            target=self._build_epochs, args=(self._settled,), name="members", daemon=True
        ).start()

    def interruption(self) -> str | None:
        """Why nothing more will come of the epoch in force; None while all is well."""
        if not self._has_begun:
            return None
        reason = self._client.interruption(self._settled)
        if reason is not None:
            return reason
        fault = self._fault
        return fault[1] if fault is not None and fault[0] == self._settled else None

    def check(self) -> None:
        """Look whether the epoch in force has ended, without waiting.

        Raises:
            CommunicationError: If so.
        """
        self._client.progress()
        reason = self.interruption()
        if reason is not None:
            raise CommunicationError(reason)

    def follow(self, on_gathered: OnGathered, on_interrupted: Callable[[], None]) -> None:
        """Have functions called from threads; what came before is told at once."""
        with self._changed:
            self._on_gathered, self._on_interrupted = on_gathered, on_interrupted
            untold, self._untold = self._untold, None
        if self.interruption() is not None:
            on_interrupted()
        if untold is not None:
            on_gathered(untold)

    def gathered(self) -> Gathering | None:
        """Wait for the next epoch, and the exchange of it that stands.

        Raises:
            CommunicationError: If nobody can go on, or not this rank.
        """
        if not self._is_interrupted_within(_NOTICE_S):
            return None
        deadline_s = time.monotonic() + _SETTLE_S
        after = self._settled
        try:
            while True:
                left_s = max(deadline_s - time.monotonic(), 0.0)
                epoch = self._client.next_epoch(after, left_s)
                gathering = self._await_built(epoch)
                if gathering is not None:
                    self._settled = gathering.generation
                    self._client.enter("away")  # until the next step begins
                    self._client.ready(gathering.generation)
                    return gathering
                after = epoch.epoch
        except MembershipEnded as ended:
            self.is_left_out = True
            raise CommunicationError(self._describe(ended)) from ended

    def may_apply(self, name: StepName) -> bool:
        """Whether the coordinator has committed this step."""
        held = self._client.held
        return (held.step, held.lineage) == (name.step, name.lineage)

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
        self._is_parting = True

    def close(self, *, in_order: bool) -> None:
        """Leave the others."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        if in_order:
            self._client.leave("its script has ended")
        self._client.close()

    def _epoch(self) -> int:
        return self._settled

    def _is_interrupted_within(self, limit_s: float) -> bool:
        deadline_s = time.monotonic() + limit_s
        while self.interruption() is None:
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                return False
            self._client.progress()
            with self._changed:
                self._changed.wait(min(left_s, _LOOK_S))
        return True

    def _await_built(self, epoch: NewEpoch) -> Gathering | None:
        """Wait for the epoch's exchange; None where it came to nothing."""
        while True:
            self._client.progress()
            if self._failure is not None:
                raise CommunicationError(self._failure)
            with self._changed:
                built = self._built
                if built is not None and built.generation == epoch.epoch:
                    if self._client.interruption(epoch.epoch) is None:
                        return built
                    return None
                if self._is_over(epoch.epoch):
                    return None
                self._changed.wait(_LOOK_S)

    def _is_over(self, epoch: int) -> bool:
        """Whether an epoch whose exchange is not there will have none."""
        fault = self._fault
        is_broken = fault is not None and fault[0] >= epoch
        return is_broken or self._client.interruption(epoch) is not None

    def _describe(self, ended: MembershipEnded) -> str:
        ending = ended.ending
        own = self._names[self._place.rank]
        if ending.kind == "dismissed":
            return (
                f"the others go on without {own} ({ending.reason}); what it computed "
                "since was not applied"
            )
        return (
            f"the run can't go on ({ending.kind}): {ending.reason}; start again with "
            "--resume, which loads the last save"
        )

    # -- the other threads --------------------------------------------------------------

    def _interrupted(self, reason: str) -> None:
        """The epoch in force is over: cut its exchange. Called by the control thread."""
        if not self._is_parting:
            self._hub.abort(reason)
            if self._on_interrupted is not None:
                self._on_interrupted()
        with self._changed:
            self._changed.notify_all()

    def _faulted(self, epoch: int, fault: Fault) -> None:
        """An exchange broke here, before the coordinator knew of it."""
        if self._is_closed or self._client.interruption(epoch) is not None:
            return
        reason = fault.detail.partition(" ended it: ")[2] or fault.detail
        with self._changed:
            if self._fault is not None and self._fault[0] >= epoch:
                return
            self._fault = (epoch, reason)
            self._changed.notify_all()
        self._client.suspect(epoch, [self._names[r] for r in fault.suspects], reason)
        if self._on_interrupted is not None:
            self._on_interrupted()

    def _build_epochs(self, after: int) -> None:
        try:
            while not self._is_closed:
                try:
                    epoch = self._client.find_epoch(after, _LONGEST_EPOCH_WAIT_S)
                except MembershipEnded:
                    return  # the training hears of it when it asks
                self._build(epoch)
                after = epoch.epoch
        except Exception as error:
            if self._is_closed:
                return
            logger.exception("no epochs are built any more")
            with self._changed:
                self._failure = f"no exchange can be built any more: {error}"
                self._changed.notify_all()

    def _build(self, epoch: NewEpoch) -> None:
        received_at_s = time.time()
        self._hub.abort(epoch.reason)  # whatever of an older one still stands
        ranks = self._ranks_of(epoch)
        try:
            hub = self._hub.successor(
                _clone(self._store, f"epoch/{epoch.epoch}"),
                partial(self._faulted, epoch.epoch),
                partial(self._client.interruption, epoch.epoch),
            )
            self._hub = hub
            limit_s = max(epoch.build_s, 1.0)
            collective = hub.open(ranks, "gradients", limit_s) if ranks[1:] else None
        except (GeartrainError, RuntimeError, ConnectionError) as error:
            self._give_up(epoch.epoch, str(error))
            return
        gathering = self._describe_epoch(epoch, ranks, received_at_s, hub, collective)
        with self._changed:
            on_gathered = self._on_gathered
            if on_gathered is None:
                self._untold = gathering
        if on_gathered is not None:
            on_gathered(gathering)
        with self._changed:
            self._built = gathering
            self._changed.notify_all()

    def _give_up(self, epoch: int, reason: str) -> None:
        self._hub.abort(reason)
        with self._changed:
            is_new = self._fault is None or self._fault[0] < epoch
            if is_new:
                self._fault = (epoch, reason)
            self._changed.notify_all()
        # Else the fault was told already, or the coordinator knows more than this rank.
        if is_new and self._client.interruption(epoch) is None:
            self._client.suspect(epoch, (), reason)

    def _ranks_of(self, epoch: NewEpoch) -> tuple[int, ...]:
        return tuple(sorted(self._names.index(m.member_id) for m in epoch.members))

    def _describe_epoch(
        self,
        epoch: NewEpoch,
        ranks: tuple[int, ...],
        received_at_s: float,
        hub: ExchangeHub,
        collective: object,
    ) -> Gathering:
        lost = {self._names.index(one.member_id): one for one in epoch.lost}
        failures = [one for one in lost.values() if one.is_failure]
        first = max(failures, key=lambda one: one.noticed_ago_s, default=None)
        return Gathering(
            generation=epoch.epoch,
            ranks=ranks,
            hub=hub,
            collective=collective,  # type: ignore[arg-type]  # as opened
            reason=epoch.reason,
            suspects=tuple(rank for rank, one in lost.items() if one.is_failure),
            reasons={rank: one.reason for rank, one in lost.items()},
            left=frozenset(rank for rank, one in lost.items() if not one.is_failure),
            joined=frozenset(self._names.index(name) for name in epoch.joined),
            noticed_at_s=received_at_s - _ago_s(first),
            silent_s=first.silent_s if first is not None else 0.0,
        )


class CoordinatorCommitter:
    """Votes at the coordinator, and waits for its commits.

    Args:
        client: Of this process.
        epoch: The one in force.
        timeout_s: Outer limit of a wait, within which the coordinator may come back.
    """

    def __init__(self, client: Client, epoch: Callable[[], int], timeout_s: float) -> None:
        self._client = client
        self._epoch = epoch
        self._timeout_s = timeout_s

    def exchanging(self) -> None:
        """Standing still is no fault of this rank now."""
        self._client.enter("waiting")

    def vote(self, name: StepName) -> None:
        """Tell that this rank could apply the step."""
        self._client.vote(self._epoch(), name.step, name.lineage)

    def wait(self, name: StepName) -> None:
        """Wait for the commit.

        Raises:
            CommunicationError: If the step is not to be applied here now.
        """
        outcome = self._client.wait_commit(self._epoch(), name.step, self._timeout_s)
        if isinstance(outcome, Interrupted):
            raise CommunicationError(outcome.reason)


def known_lineage(name: StepName) -> str:
    """The lineage by which the coordinator knows a state, also before the first step."""
    return name.lineage or first_lineage("geartrain", name.step)


def _ago_s(lost: LostMember | None) -> float:
    return lost.noticed_ago_s if lost is not None else 0.0


def _clone(store: Store, prefix: str) -> Store:
    """A client of its own for a thread; a connection may take a while."""
    clone: Callable[[], Store] = store.clone  # type: ignore[attr-defined]  # no stub
    return PrefixStore(prefix, within(_STORE_S, clone, "the store"))
