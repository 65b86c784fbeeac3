"""All that the coordinator knows at one moment, as values that do not change.

Structs and not dataclasses, whose ``replace`` takes ten times as long: each vote and beat
makes new ones, and the last vote of a step is waited for by everybody.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal

import msgspec

from geartrain.elastic.holdings import Ranges
from geartrain.elastic.limits import Limits, Pace
from geartrain.elastic.messages import WHOLE_STATE, Vote
from geartrain.elastic.records import Facts, Incarnation, JournalRecord, replay

Phase = Literal["gathering", "holding", "building", "running", "halted"]
NO_STATE = -1
"""Step of a member that holds nothing that can be used."""


class Healing(msgspec.Struct, frozen=True, kw_only=True):
    """A copy of the state to a joiner, beside the training."""

    step: int
    lineage: str
    since_s: float
    givers: tuple[str, ...]
    ranges: Ranges


class Peer(msgspec.Struct, frozen=True, kw_only=True):
    """A connected process that has joined; a member of the epoch or not."""

    connection: int
    member_id: str
    incarnation: str
    host_id: str
    place: int = 0
    address: str = ""
    facts: Mapping[str, str] = msgspec.field(default_factory=dict)
    step: int = NO_STATE
    """Of the state that it holds, whose lineage has been checked."""
    lineage: str = ""
    holds: Ranges = ()
    wants: Ranges = (WHOLE_STATE,)
    voted_epoch: int = 0
    """Of a vote that it brought along when it joined, with the next two."""
    voted_step: int = 0
    voted_lineage: str = ""
    heard_at_s: float = 0.0
    progress: int = -1
    progress_at_s: float = 0.0
    activity: Literal["step", "waiting", "away"] = "step"
    main_epoch: int = 0
    """That its main loop has taken up."""
    taken_up_at_s: float = 0.0
    pace: Pace = msgspec.field(default_factory=Pace)
    has_trained: bool = False
    """It came back to a coordinator that had: its first steps are behind it."""
    must_move: bool = False
    """Its process was given up before: its main loop has to show first that it goes on."""
    admitted_at_s: float = 0.0
    """Not before; later than now for who failed often of late."""
    eligible_at_s: float | None = None
    """Since when it could take part."""
    healing: Healing | None = None
    num_heals: int = 0
    drain_reason: str | None = None
    drain_until_s: float = 0.0

    @property
    def who(self) -> Incarnation:
        """Its process."""
        return Incarnation(self.member_id, self.incarnation)

    @property
    def is_draining(self) -> bool:
        """Whether the next epoch is without it."""
        return self.drain_reason is not None

    def may_enter(self, now_s: float) -> bool:
        """Whether it could take part, as far as it is concerned itself."""
        return self.admitted_at_s <= now_s and not self.is_draining and not self.must_move

    @property
    def order(self) -> tuple[int, str]:
        """Sorts members into ranks."""
        return self.place, self.member_id


class Lost(msgspec.Struct, frozen=True, kw_only=True):
    """A member of the epoch before that is not there any more."""

    who: Incarnation
    reason: str
    at_s: float
    is_failure: bool
    silent_s: float = 0.0
    """How long it had been silent, or its main loop stood still; 0 for a broken
    connection, which shows at once."""


class Accusation(msgspec.Struct, frozen=True, kw_only=True):
    """A member says that another one does not answer."""

    by: str
    of: str
    at_s: float
    epoch: int


class State(msgspec.Struct, frozen=True, kw_only=True):
    """The coordinator at one moment. ``facts`` is what its journal says as well."""

    limits: Limits
    facts: Facts
    phase: Phase
    seen_at_s: float
    """Of the latest event."""
    since_s: float
    """Begin of the phase."""
    gather_until_s: float
    hold_until_s: float
    reason: str
    """Why the next epoch is needed."""
    peers: Mapping[str, Peer] = msgspec.field(default_factory=dict)
    """By member_id."""
    connections: Mapping[int, str] = msgspec.field(default_factory=dict)
    """To member_id."""
    members: tuple[str, ...] = ()
    """member_ids of the epoch, in order of rank, without those lost since."""
    ready: frozenset[str] = frozenset()
    votes: Mapping[str, Vote] = msgspec.field(default_factory=dict)
    to_get: Mapping[str, Ranges] = msgspec.field(default_factory=dict)
    """What members of a new epoch get by transfers and restores."""
    givers: tuple[str, ...] = ()
    """Who has left in order and still hands its state over."""
    awaited: frozenset[Incarnation] = frozenset()
    """Members of the last epoch that this coordinator has not seen since it came back."""
    lost: tuple[Lost, ...] = ()
    """Since the last epoch began."""
    accusations: tuple[Accusation, ...] = ()
    num_barren: int = 0
    """Epochs in a row that ended without a step, and without a loss to explain it."""
    num_disagreements: int = 0
    """Times in a row that members had different sums."""
    build_s: float = 0.0
    failed: frozenset[str] = frozenset()
    """Incarnations that were given up."""
    superseded: frozenset[str] = frozenset()
    """Incarnations that a later process of the same member has replaced."""

    @property
    def has_begun(self) -> bool:
        """Whether there is a state that the fleet has agreed on."""
        return bool(self.facts.lineage)

    def holds_state(self, peer: Peer) -> bool:
        """Whether a peer is at the last committed step, with the fleet's lineage."""
        return (
            self.has_begun
            and peer.step == self.facts.step
            and peer.lineage == self.facts.lineage
        )

    def holders(self) -> tuple[Peer, ...]:
        """All that hold any of the fleet's state: members first, then who is leaving."""
        found = (peer for peer in self.peers.values() if self.holds_state(peer))
        return tuple(
            sorted(
                (peer for peer in found if peer.holds),
                key=lambda p: (p.member_id not in self.members, p.is_draining, p.order),
            )
        )


def begin(limits: Limits, now_s: float) -> State:
    """Return the state of a coordinator that starts a run."""
    return resume((), limits, now_s)


def resume(records: Iterable[JournalRecord], limits: Limits, now_s: float) -> State:
    """Return the state of a coordinator that comes back, from its journal.

    An empty journal is the begin of a run.
    """
    facts = replay(records)
    is_return = facts.epoch > 0
    wait_s = limits.rejoin_s if is_return else limits.start_s
    return State(
        limits=limits,
        facts=facts,
        phase="halted" if facts.halted else "gathering",
        seen_at_s=now_s,
        since_s=now_s,
        gather_until_s=now_s + wait_s,
        hold_until_s=now_s + limits.hold_s,
        reason="the coordinator came back" if is_return else "the run begins",
        awaited=frozenset(facts.members),
        build_s=limits.build_s,
    )
