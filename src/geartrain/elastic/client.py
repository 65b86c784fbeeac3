"""A worker's side of the membership: joins, votes, waits for commits, hears of epochs.

The main loop calls; one control thread (:mod:`geartrain.elastic.control`) listens and
beats. When the coordinator is gone, no step is applied: the calls that wait go on waiting
until it is back, up to their deadline.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterable
from dataclasses import replace

from geartrain.checkpoint.ranges import StateRange
from geartrain.elastic.control import ControlSettings
from geartrain.elastic.link import Callbacks, Identity, MemberLink, Phase
from geartrain.elastic.messages import (
    Healed,
    Holds,
    LostMember,
    MemberMessage,
    NewEpoch,
    NotRestored,
    Ready,
    Suspect,
    Vote,
    Welcome,
)
from geartrain.elastic.outcome import Committed, Interrupted, MembershipEnded
from geartrain.elastic.view import HeldState, Voted
from geartrain.errors import CommunicationError

_LONGEST_REASON = 2000


class Client:
    """One worker's membership; belongs to the process that made it, not to forked ones.

    Args:
        identity: Who joins.
        control: How the coordinator is reached.
        callbacks: Told at once, from the control thread.
    """

    def __init__(
        self, identity: Identity, control: ControlSettings, callbacks: Callbacks
    ) -> None:
        self._link = MemberLink(identity, control, callbacks)
        self._process_id = os.getpid()
        _living.add(self)

    # -- without waiting ----------------------------------------------------------------

    def start(self, held: HeldState) -> None:
        """Begin to join, with this state; ``next_epoch`` waits for the result."""
        self._link.view.held = held
        self._link.control.start()

    def progress(self) -> None:
        """Tell that the main loop gets on. Call it often: it costs next to nothing."""
        self._link.num_progress += 1

    def enter(self, phase: Phase) -> None:
        """Tell what the main loop is about to do; see ``messages.Beat``."""
        self._link.num_progress += 1
        self._link.phase = phase

    def note_step(self, step_s: float) -> None:
        """Tell how long a whole step took, from which the limits of patience follow."""
        self._link.num_progress += 1
        self._link.step_s = max(self._link.step_s, step_s)

    def interruption(self, epoch: int) -> str | None:
        """Why an epoch is over; None while it is in force."""
        view = self._link.view
        return view.over_reason or "over" if view.over_epoch >= epoch else None

    @property
    def held(self) -> HeldState:
        """The state that this process holds, or is about to: a commit counts at once."""
        return self._link.view.held

    @property
    def welcome(self) -> Welcome | None:
        """The limits that the coordinator has told."""
        return self._link.view.welcome

    @property
    def drain_reason(self) -> str | None:
        """Why this process will be left out of the next epoch; None if it will not."""
        return self._link.view.drain_reason

    def lost(self) -> dict[str, LostMember]:
        """All that were lost or have left since this process joined, by incarnation."""
        with self._link.changed:
            return dict(self._link.view.lost)

    @property
    def is_connected(self) -> bool:
        """Whether the coordinator is there."""
        return self._link.is_connected

    def vote(self, epoch: int, step: int, lineage: str) -> None:
        """Tell that this process has all that it needs to apply the step.

        A vote in an epoch that is over is not sent: ``wait_commit`` tells.
        """
        self._check_process()
        link = self._link
        with link.changed:
            link.num_progress += 1
            parent = link.view.held.lineage
            if link.view.vote(Voted(epoch=epoch, step=step, lineage=lineage)):
                link.send(Vote(epoch=epoch, step=step, lineage=lineage, parent=parent))

    def ready(self, epoch: int) -> None:
        """Tell that the epoch's exchange stands and that this process holds its state."""
        self._tell(lambda held: Ready(epoch=epoch, step=held.step, lineage=held.lineage))

    def suspect(self, epoch: int, member_ids: Iterable[str], reason: str) -> None:
        """Tell that an exchange or its build failed here, and who did not answer."""
        names = tuple(member_ids)
        self._tell(
            lambda held: Suspect(
                epoch=epoch,
                step=held.step,
                lineage=held.lineage,
                member_ids=names,
                reason=reason[:_LONGEST_REASON],
            )
        )

    def healed(self, step: int, lineage: str) -> None:
        """Tell that this process holds another state now, as far as it was asked to."""
        link = self._link
        with link.changed:
            ranges = link.identity.wants
            held = HeldState(step=step, lineage=lineage, ranges=ranges)
            link.view.replace_state(held)
            epoch = link.view.taken_epoch
            self._tell(lambda _: Healed(epoch=epoch, step=step, lineage=lineage))

    def holds(self, ranges: Iterable[StateRange]) -> None:
        """Tell which ranges of its state this process holds from now on."""
        link = self._link
        with link.changed:
            held = link.view.held = replace(link.view.held, ranges=tuple(ranges))
            self._tell(
                lambda _: Holds(
                    epoch=link.view.taken_epoch,
                    step=held.step,
                    lineage=held.lineage,
                    ranges=held.ranges,
                )
            )

    def not_restored(self, epoch: int, ranges: Iterable[StateRange], reason: str) -> None:
        """Tell that a lower tier does not have these ranges at the step asked for."""
        missing = tuple(ranges)
        self._tell(
            lambda held: NotRestored(
                epoch=epoch,
                step=held.step,
                lineage=held.lineage,
                ranges=missing,
                reason=reason[:_LONGEST_REASON],
            )
        )

    def leave(self, reason: str) -> None:
        """Ask to be left out after the step that runs; said again after a reconnection."""
        with self._link.changed:
            self._link.leaving = reason[:_LONGEST_REASON]
            self._tell(lambda _: self._link.make_leave())

    def close(self) -> None:
        """End the connection and the thread, within a second."""
        if os.getpid() == self._process_id:
            self._link.close()

    # -- waiting ------------------------------------------------------------------------

    def next_epoch(self, after: int, limit_s: float) -> NewEpoch:
        """Wait for an epoch beyond ``after`` that is in force; the main loop takes it up.

        Raises:
            MembershipEnded: If this process takes part no more.
            CommunicationError: After the deadline.
        """
        return self._await_epoch(after, limit_s, is_main_loop=True)

    def find_epoch(self, after: int, limit_s: float) -> NewEpoch:
        """As ``next_epoch``, for threads that prepare what the main loop takes up later.

        Raises:
            MembershipEnded: If this process takes part no more.
            CommunicationError: After the deadline.
        """
        return self._await_epoch(after, limit_s, is_main_loop=False)

    def peek_epoch(self, after: int) -> NewEpoch | None:
        """An epoch beyond ``after`` that is in force, without waiting or taking it up.

        Raises:
            MembershipEnded: If this process takes part no more.
        """
        link = self._link
        with link.changed:
            found = link.view.epoch_in_force(after)
            if found is None and link.view.ending is not None:
                raise MembershipEnded(link.view.ending)
            return found

    def wait_for_news(self, limit_s: float) -> None:
        """Wait until the coordinator says something, whatever it is."""
        self.progress()
        with self._link.changed:
            self._link.changed.wait(limit_s)

    def wait_commit(self, epoch: int, step: int, limit_s: float) -> Committed | Interrupted:
        """Wait for the others' votes for the step that this process voted for.

        Returns:
            Whether to apply the step, or why never to.

        Raises:
            MembershipEnded: If this process takes part no more; do not apply the step.
            CommunicationError: After the deadline; do not apply the step.
        """
        self._check_process()
        outcome: Committed | Interrupted | None = None

        def is_settled() -> bool:
            nonlocal outcome
            outcome = self._outcome(epoch, step)
            return outcome is not None

        failure = f"step {step} of epoch {epoch} was not committed"
        self._wait_in_main_loop(is_settled, limit_s, failure)
        assert outcome is not None
        return outcome

    def _await_epoch(self, after: int, limit_s: float, *, is_main_loop: bool) -> NewEpoch:
        self._check_process()
        found: NewEpoch | None = None
        view = self._link.view

        def is_there() -> bool:
            nonlocal found
            found = view.epoch_in_force(after)
            if found is not None and is_main_loop:
                view.taken_epoch = found.epoch
            return found is not None

        wait = self._wait_in_main_loop if is_main_loop else self._link.wait
        wait(is_there, limit_s, f"no epoch beyond {after}")
        assert found is not None
        return found

    def _outcome(self, epoch: int, step: int) -> Committed | Interrupted | None:
        committed = self._link.view.committed
        if committed is not None and (committed.epoch, committed.step) == (epoch, step):
            return Committed(step=step, lineage=committed.lineage)
        reason = self.interruption(epoch)
        if reason is None or self._link.view.ending is not None:
            return None  # the wait goes on, or raises how it ended
        return Interrupted(reason=reason)

    def _wait_in_main_loop(
        self, is_done: Callable[[], bool], limit_s: float, failure: str
    ) -> None:
        phase = self._link.phase
        self.enter("waiting")
        try:
            # Its own waking counts as progress: a main loop that hangs does not wake.
            self._link.wait(is_done, limit_s, failure, self.progress)
        finally:
            self.enter(phase)

    def _tell(self, make: Callable[[HeldState], MemberMessage]) -> None:
        self._check_process()
        with self._link.changed:
            self._link.num_progress += 1
            self._link.send(make(self._link.view.held))

    def _check_process(self) -> None:
        if os.getpid() != self._process_id:
            msg = (
                f"the membership belongs to process {self._process_id}, this is "
                f"{os.getpid()}, forked from it; make a new Client here"
            )
            raise CommunicationError(msg)

    def abandon(self) -> None:
        """In a forked child: leave the membership to the parent."""
        self._link.control.abandon()


_living: weakref.WeakSet[Client] = weakref.WeakSet()


def _abandon_all() -> None:
    for client in list(_living):
        client.abandon()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_abandon_all)
