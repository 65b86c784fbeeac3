"""What the training asks of whoever knows who takes part: the members of a job.

``Survivors`` finds it out among the ranks themselves; ``elastic.members`` asks the
coordinator of the run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from geartrain.errors import CommunicationError

if TYPE_CHECKING:
    from geartrain.collectives.exchange.scheduled_collective import ScheduledCollective
    from geartrain.collectives.exchange_hub import ExchangeHub
    from geartrain.collectives.job_network import JobNetwork
    from geartrain.devices import Fleet
    from geartrain.parallel.commit import Committer, StepName

OnGone = Callable[[Sequence["Gone"]], None]
Tree = Mapping[str, Any]
"""What ``checkpoint.tree`` keeps: tensors, numbers, names, in dicts and lists."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gone:
    """One process that takes part no more."""

    rank: int
    incarnation: str
    reason: str
    at_s: float
    """Unix time at which it was noticed."""
    silent_s: float = 0.0
    """How long the loss had lasted by then, where it showed as silence."""
    is_failure: bool = True
    """False for who left in order."""


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
    num_steps: int | None = None
    """Steps of the state that they go on from; None: they are to find out."""
    incarnations: Mapping[int, str] = field(default_factory=dict)
    """Which process of each rank takes part, where that is known."""
    gone: tuple[Gone, ...] = ()
    """Who took part before; a rank may be among them and come back at once."""
    joined: frozenset[int] = frozenset()
    """Ranks whose process did not take part before."""
    grown: Growth | None = None
    """Devices that the job did not know before."""

    @property
    def failures(self) -> tuple[Gone, ...]:
        """Who was lost, the first noticed first."""
        lost = (one for one in self.gone if one.is_failure)
        return tuple(sorted(lost, key=lambda one: one.at_s))

    @property
    def is_failure(self) -> bool:
        """Whether something broke, and nobody only left or joined."""
        return bool(self.failures) or not (self.gone or self.joined)


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """A fleet with more devices at its end, and where they are."""

    fleet: Fleet
    network: JobNetwork


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

    def follow(
        self,
        on_gone: OnGone,
        on_interrupted: Callable[[], None],
        on_idle: Callable[[], None],
    ) -> None:
        """Have functions called from a thread; what came before is told at once.

        Args:
            on_gone: With all that are gone by now, once the others have an exchange
                without them.
            on_interrupted: As soon as a member was lost; must not block.
            on_idle: Now and then while the training's own thread waits for the others,
                by that thread.
        """

    def gathered(self) -> Gathering | None:
        """Wait for the others after a failure; the training goes on with what it says.

        Returns:
            Those that take part; None if nobody came or went, so that the failure has
            another reason.

        Raises:
            CommunicationError: If nobody can go on, or not this rank.
            LeftTraining: If this rank was to leave, and has.
        """

    def ready(self) -> None:
        """This rank has the gathering's exchange, and holds the state it goes on from."""

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


class ClosedMembership:
    """The part of a membership that nobody can join: nobody asks for anything."""

    can_leave = False
    ahead_by = 0

    def reset(self, name: StepName) -> None:
        """Nothing: only places in the run are compared."""

    def leave(self, reason: str) -> None:
        """Nothing: nobody could be told."""

    def wants_state(self) -> bool:
        """Nobody does."""
        return False

    def give(self, state: Tree) -> None:
        """Nothing: nobody waits for it."""

    def has_followers(self) -> bool:
        """Nobody follows."""
        return False

    def pass_on(self, step: Tree) -> None:
        """Nothing: nobody follows."""

    def drop_followers(self) -> None:
        """Nothing: nobody follows."""

    def join(self) -> None:
        """Refuse.

        Raises:
            CommunicationError: Always.
        """
        msg = "this run has no coordinator, so nobody can join it; start it again"
        raise CommunicationError(msg)

    def receive_state(self, limit_s: float) -> Tree:  # noqa: ARG002 - protocol
        """Nobody gives any."""
        return {}

    def must_receive(self) -> bool:
        """Nobody joins."""
        return False

    def passed_on(self) -> Sequence[Tree]:
        """Nothing comes."""
        return ()

    def offer(self, name: StepName) -> None:
        """Nothing: nobody joins."""

    def poll_gathering(self) -> Gathering | None:
        """Nobody joins."""
        return None


class JoiningMembership(Membership, Protocol):
    """A membership that processes join and leave while the others train.

    Who joins is given the state by a giver: at one of its step boundaries, and from then on
    each step that is applied, until the joiner takes part itself.
    """

    can_leave: bool
    """Whether a rank may leave while the others go on."""
    ahead_by: int
    """What is added to the training's count of steps where members speak of them; who
    joins takes it on from whoever gives it the state."""

    def reset(self, name: StepName) -> None:
        """All ranks have taken on another state, by loading it."""

    def leave(self, reason: str) -> None:
        """Ask to be left out after the step that runs."""

    # -- on a giver ---------------------------------------------------------------------

    def wants_state(self) -> bool:
        """Whether somebody waits for this rank's state. Costs next to nothing."""

    def give(self, state: Tree) -> None:
        """Give the state to those that wait for it; nobody may change it any more."""

    def has_followers(self) -> bool:
        """Whether steps are to be passed on."""

    def pass_on(self, step: Tree) -> None:
        """Pass a step on to those that have been given the state before it."""

    def drop_followers(self) -> None:
        """The state here changed by something else than a step; they are told later."""

    # -- on a joiner --------------------------------------------------------------------

    def join(self) -> None:
        """Ask to take part, without a state so far."""

    def receive_state(self, limit_s: float) -> Tree:
        """Wait for the state of a giver.

        Raises:
            CommunicationError: If nobody gives it in time.
        """

    def must_receive(self) -> bool:
        """Whether this rank is to get a newer state: the others are too far ahead."""

    def passed_on(self) -> Sequence[Tree]:
        """Steps that have come since the last call, in order."""

    def offer(self, name: StepName) -> None:
        """This rank holds that state, and can take part after the next step."""

    def poll_gathering(self) -> Gathering | None:
        """The first gathering with this rank, once it is there.

        Raises:
            CommunicationError: If this rank will not be let in.
        """
