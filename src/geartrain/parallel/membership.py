"""What the training asks of whoever knows who takes part: the members of a job.

``Survivors`` finds it out among the ranks themselves; ``elastic.members`` asks the
coordinator of the run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from geartrain.collectives.exchange.scheduled_collective import ScheduledCollective
    from geartrain.collectives.exchange_hub import ExchangeHub
    from geartrain.parallel.commit import Committer, StepName

OnGathered = Callable[["Gathering"], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Gathering:
    """Those that take part from now on, joined by a new exchange."""

    generation: int
    """Grows with each one; attempts that failed leave gaps."""
    ranks: tuple[int, ...]
    """Global ranks, rising."""
    hub: ExchangeHub
    collective: ScheduledCollective | None
    """The exchange of them all; None for a single one."""
    reason: str
    """What was noticed first, in words."""
    suspects: tuple[int, ...] = ()
    """Of whom it was noticed."""
    reasons: Mapping[int, str] = field(default_factory=dict)
    """Why ranks are not among them any more, where it is known of each."""
    left: frozenset[int] = frozenset()
    """Ranks of them that left in order: no failure."""
    joined: frozenset[int] = frozenset()
    """Ranks that were not in the gathering before."""
    noticed_at_s: float
    """Unix time."""
    silent_s: float = 0.0
    """How long the loss had lasted by then, where it showed as silence."""

    @property
    def is_loss(self) -> bool:
        """Whether somebody was lost, and did not only leave or join."""
        return bool(set(self.reasons) - self.left) or not (self.joined or self.left)

    def reason_of(self, rank: int) -> str:
        """Why a rank that is not among them is not."""
        if rank in self.reasons:
            return self.reasons[rank]
        if rank in self.suspects:
            return self.reason
        return f"it did not answer when the others gathered, since {self.reason}"


class Membership(Protocol):
    """The members of a job as one rank knows them."""

    is_left_out: bool
    """Whether the others go on without this rank."""

    def committer(self) -> Committer | None:
        """What decides when steps are applied; None leaves it to the ranks' exchange."""

    def begin(self, name: StepName) -> None:
        """Take part from now on, with this state; all ranks call it.

        Raises:
            CommunicationError: If the others do not come in time.
        """

    def interruption(self) -> str | None:
        """Why nothing more will come of the generation in force; None while all is well."""

    def check(self) -> None:
        """Look whether the generation in force has ended, without waiting.

        Raises:
            CommunicationError: If so.
        """

    def follow(self, on_gathered: OnGathered, on_interrupted: Callable[[], None]) -> None:
        """Have functions called from a thread; what came before is told at once.

        Args:
            on_gathered: Once an exchange among those that take part is open.
            on_interrupted: As soon as a member was lost; must not block.
        """

    def gathered(self) -> Gathering | None:
        """Wait for the others after a failure; the training goes on with what it says.

        Returns:
            Those that take part; None if nobody came or went, so that the failure has
            another reason.

        Raises:
            CommunicationError: If nobody can go on, or not this rank.
        """

    def may_apply(self, name: StepName) -> bool:
        """Whether a step that this rank has voted for is known to be committed.

        Asked after ``gathered``, before the others are asked how far they are.
        """

    def begin_step(self) -> None:
        """The main loop computes a step; until it has ended, standing still is a fault."""

    def end_step(self, step_s: float) -> None:
        """A step was applied, and the main loop may be in the script's own code for long.

        Args:
            step_s: How long it took as a whole.
        """

    def progress(self) -> None:
        """The main loop gets on. Costs next to nothing."""

    def part(self) -> None:
        """All have made their last step, and who ends from now on is not lost."""

    def close(self, *, in_order: bool) -> None:
        """Take part no more: the session ends.

        Args:
            in_order: The script has come to its end here, and at all others.
        """
