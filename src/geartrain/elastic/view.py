"""What one member knows of the run: its own state, and what the coordinator has said.

Pure: the client feeds it under its lock, from the control thread and the main one.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from geartrain.checkpoint.ranges import StateRange
from geartrain.elastic.messages import (
    WHOLE_STATE,
    Commit,
    CoordinatorMessage,
    Dismiss,
    Drain,
    Halt,
    Heal,
    Hold,
    LostMember,
    NewEpoch,
    Welcome,
)

_MOST_RECENT = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldState:
    """The state that a process holds: how many steps are in it, and which."""

    step: int = 0
    lineage: str = ""
    """Empty: none that can be used."""
    ranges: tuple[StateRange, ...] = (WHOLE_STATE,)


@dataclass(frozen=True, slots=True, kw_only=True)
class Voted:
    """A step that this process could apply, and has told the coordinator so."""

    epoch: int
    step: int
    lineage: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """Why this process takes part no more."""

    kind: str
    """``dismissed``, ``unreachable``, ``refused``, ``diverged``, or that of a
    :class:`Halt`."""
    reason: str
    is_failure: bool = True
    ranges: tuple[StateRange, ...] = ()
    """That nobody holds."""


@dataclass(slots=True, kw_only=True)
class MemberView:
    """One member's side of the protocol."""

    held: HeldState = field(default_factory=HeldState)
    recent: tuple[str, ...] = ()
    """Lineages of the steps before the held one, the latest last: they prove to a
    coordinator without its journal what was committed."""
    taken_epoch: int = 0
    """The main loop has seen it."""
    newest: NewEpoch | None = None
    over_epoch: int = 0
    """It, and all before it, are over."""
    over_reason: str = ""
    pending: Voted | None = None
    """Voted, and not answered."""
    committed: Voted | None = None
    """The latest of our votes that all others joined in."""
    welcome: Welcome | None = None
    drain_reason: str | None = None
    lost: dict[str, LostMember] = field(default_factory=dict)
    """All that were lost or have left, by incarnation; an epoch tells of its own only."""
    return_after_s: float | None = None
    """When to join again after a dismissal."""
    ending: Ending | None = None

    @property
    def known_epoch(self) -> int:
        """The last one heard of, in force or not."""
        return max(self.newest.epoch if self.newest is not None else 0, self.over_epoch)

    def epoch_in_force(self, after: int) -> NewEpoch | None:
        """The newest epoch if it is beyond ``after`` and not over."""
        newest = self.newest
        if newest is None or newest.epoch <= max(after, self.over_epoch):
            return None
        return newest

    def replace_state(self, held: HeldState) -> None:
        """The process holds another state now, by a copy and not by a step."""
        self.held, self.recent, self.pending = held, (), None

    def vote(self, voted: Voted) -> bool:
        """Whether the vote should go out; not if its epoch is over."""
        if self.over_epoch >= voted.epoch or self.ending is not None:
            return False
        self.pending = voted
        return True

    def take(self, message: CoordinatorMessage) -> str | None:
        """Note what the coordinator says.

        Returns:
            Why the epoch that was in force is over; None if it is not.
        """
        self._settle(message)
        if isinstance(message, Hold | NewEpoch):
            self.lost |= {one.incarnation: one for one in message.lost}
        if isinstance(message, Welcome):
            self.welcome = message
        if isinstance(message, Welcome | Heal):
            # An epoch of which this process is no member has followed on its own.
            reason = "the others went on in a later epoch without this process"
            return self._end_epoch(message.epoch - 1, reason)
        if isinstance(message, Hold):
            return self._end_epoch(message.epoch, message.reason)
        if isinstance(message, NewEpoch):
            return self._take_epoch(message)
        if isinstance(message, Drain):
            self.drain_reason = message.reason
        return self._take_ending(message)

    def end(self, ending: Ending) -> str | None:
        """Take part no more; why the epoch is over if one was in force."""
        self.ending = self.ending or ending
        return self._end_epoch(self.known_epoch, ending.reason)

    def _settle(self, message: CoordinatorMessage) -> None:
        """Whatever names the state that our pending vote leads to says that all voted."""
        voted = self.pending
        if voted is None or not isinstance(message, Welcome | Hold | NewEpoch | Commit):
            return
        if (message.step, message.lineage) == (voted.step, voted.lineage):
            self.committed, self.pending = voted, None
            self.recent = (*self.recent[1 - _MOST_RECENT :], self.held.lineage)
            self.held = HeldState(
                step=voted.step, lineage=voted.lineage, ranges=self.held.ranges
            )
        elif isinstance(message, Commit) and (message.epoch, message.step) == (
            voted.epoch,
            voted.step,
        ):
            reason = (
                f"the others committed step {voted.step} as {message.lineage}, this "
                f"process voted for {voted.lineage}: its state is another one and must "
                "be replaced"
            )
            self.end(Ending(kind="diverged", reason=reason))

    def _take_epoch(self, message: NewEpoch) -> str | None:
        if message.epoch <= self.known_epoch:
            return None  # outdated by what came before
        reason = self._end_epoch(message.epoch - 1, message.reason)
        self.newest = message
        if self.ending is not None and self.ending.kind != "diverged":
            self.ending = None  # an operator found a way on
        return reason

    def _take_ending(self, message: CoordinatorMessage) -> str | None:
        if isinstance(message, Halt):
            ending = Ending(kind=message.kind, reason=message.reason, ranges=message.ranges)
            return self.end(ending)
        if not isinstance(message, Dismiss):
            return None
        if message.may_return_after_s >= 0:
            self.return_after_s = message.may_return_after_s
            return self._end_epoch(self.known_epoch, message.reason)
        return self.end(
            Ending(kind="dismissed", reason=message.reason, is_failure=message.is_failure)
        )

    def _end_epoch(self, epoch: int, reason: str) -> str | None:
        if epoch <= self.over_epoch:
            return None
        newest = self.newest
        was_in_force = newest is not None and newest.epoch > self.over_epoch
        self.over_epoch, self.over_reason = epoch, reason
        if self.pending is not None and self.pending.epoch <= epoch:
            self.pending = None
        return reason if was_in_force else None
