"""What the coordinator must not forget: the facts in its journal, and what they add up to.

Everything else it knows (connections, beats, votes of the running step) comes back by
itself when the members return. :func:`apply` is the only way in which these facts change,
in the running coordinator as well as in a replay, so that a replay can't differ.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Literal

import msgspec

from geartrain.checkpoint.ranges import StateRange, merge_ranges

SCHEMA_VERSION = 1
HISTORY_STEPS = 1024
"""Steps whose lineage is remembered. A member further back than that gets a whole state."""

HaltKind = Literal["no_state", "too_few", "too_many_failures", "diverged"]


class _Record(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One line of the journal."""


class Incarnation(
    msgspec.Struct, frozen=True, order=True, array_like=True, forbid_unknown_fields=True
):
    """One process of one member."""

    member_id: str
    incarnation: str


class RunBegan(_Record, tag="run_began", frozen=True, kw_only=True):
    """The state from which the first epoch starts."""

    step: int
    lineage: str


class EpochSeen(_Record, tag="epoch_seen", frozen=True, kw_only=True):
    """A member knows an epoch that this journal does not: numbers go on beyond it."""

    epoch: int


class EpochFormed(_Record, tag="epoch_formed", frozen=True, kw_only=True):
    """An epoch begins; the one before is over."""

    epoch: int
    members: tuple[Incarnation, ...]
    reason: str


class Committed(_Record, tag="committed", frozen=True, kw_only=True):
    """A step that all members of the epoch have voted for."""

    epoch: int
    step: int
    lineage: str


class MemberLost(_Record, tag="member_lost", frozen=True, kw_only=True):
    """A failure of a member; leaving in order is none."""

    member_id: str
    incarnation: str
    reason: str
    at_s: float
    """Of the coordinator's clock, which only orders failures."""


class RangesKnown(_Record, tag="ranges_known", frozen=True, kw_only=True):
    """Parts that the state has."""

    ranges: tuple[StateRange, ...]


class MembersLimited(_Record, tag="members_limited", frozen=True, kw_only=True):
    """The operator wants no more members than this."""

    num_members: int


class DrainBegan(_Record, tag="drain_began", frozen=True, kw_only=True):
    """This process is to be left out of the next epoch."""

    who: Incarnation


class Halted(_Record, tag="halted", frozen=True, kw_only=True):
    """The run can't go on by itself."""

    kind: HaltKind
    reason: str
    ranges: tuple[StateRange, ...] = ()


class Rewound(_Record, tag="rewound", frozen=True, kw_only=True):
    """The run goes on from another state: the only record with which a step goes back."""

    step: int
    lineage: str
    reason: str


class Facts(_Record, tag="facts", frozen=True, kw_only=True):
    """All that the records so far add up to; first line of a journal that was cut short."""

    schema_version: int = SCHEMA_VERSION
    epoch: int = 0
    """Highest one so far."""
    members: tuple[Incarnation, ...] = ()
    """Of that epoch."""
    step: int = 0
    lineage: str = ""
    """Of the last committed step; empty before the run began."""
    history: tuple[str, ...] = ()
    """Lineages of the steps up to ``step``, itself included, the last ones."""
    known_ranges: tuple[StateRange, ...] = ()
    failures: dict[str, tuple[float, ...]] = {}
    """When each member failed, the latest last."""
    num_failures: int = 0
    most_members: int | None = None
    draining: tuple[Incarnation, ...] = ()
    halted: Halted | None = None

    def lineage_at(self, step: int) -> str | None:
        """The lineage of a committed step; None where it is not known."""
        index = len(self.history) - 1 - (self.step - step)
        return self.history[index] if 0 <= index < len(self.history) else None


JournalRecord = (
    RunBegan
    | EpochSeen
    | EpochFormed
    | Committed
    | MemberLost
    | RangesKnown
    | MembersLimited
    | DrainBegan
    | Halted
    | Rewound
    | Facts
)


def apply(facts: Facts, record: JournalRecord) -> Facts:
    """What is known after one more record.

    >>> began = apply(Facts(), RunBegan(step=0, lineage="00" * 8))
    >>> apply(began, Committed(epoch=1, step=1, lineage="01" * 8)).step
    1
    """
    return _APPLY[type(record)](facts, record)


def replay(records: Iterable[JournalRecord]) -> Facts:
    """What a journal adds up to."""
    facts = Facts()
    for record in records:
        facts = apply(facts, record)
    return facts


_replace = msgspec.structs.replace


def _begin(facts: Facts, record: RunBegan | Rewound) -> Facts:
    return _replace(
        facts,
        step=record.step,
        lineage=record.lineage,
        history=(record.lineage,),
        halted=None,
    )


def _see(facts: Facts, record: EpochSeen) -> Facts:
    return _replace(facts, epoch=max(facts.epoch, record.epoch), members=())


def _form(facts: Facts, record: EpochFormed) -> Facts:
    return _replace(facts, epoch=record.epoch, members=record.members)


def _commit(facts: Facts, record: Committed) -> Facts:
    return _replace(
        facts,
        step=record.step,
        lineage=record.lineage,
        history=(*facts.history[1 - HISTORY_STEPS :], record.lineage),
    )


def _lose(facts: Facts, record: MemberLost) -> Facts:
    times = facts.failures.get(record.member_id, ())
    kept = (*times[1 - _MOST_FAILURE_TIMES :], record.at_s)
    return _replace(
        facts,
        failures={**facts.failures, record.member_id: kept},
        num_failures=facts.num_failures + 1,
    )


def _know(facts: Facts, record: RangesKnown) -> Facts:
    known = merge_ranges((*facts.known_ranges, *record.ranges))
    return _replace(facts, known_ranges=known)


def _limit(facts: Facts, record: MembersLimited) -> Facts:
    return _replace(facts, most_members=record.num_members)


def _drain(facts: Facts, record: DrainBegan) -> Facts:
    return _replace(facts, draining=(*facts.draining[1 - _MOST_DRAINED :], record.who))


def _halt(facts: Facts, record: Halted) -> Facts:
    return _replace(facts, halted=record)


def _restore(_facts: Facts, record: Facts) -> Facts:
    return record


_MOST_FAILURE_TIMES = 64
_MOST_DRAINED = 1024

# Any: each function takes the one kind of record that it stands beside.
_APPLY: dict[type, Callable[[Facts, Any], Facts]] = {
    RunBegan: _begin,
    EpochSeen: _see,
    EpochFormed: _form,
    Committed: _commit,
    MemberLost: _lose,
    RangesKnown: _know,
    MembersLimited: _limit,
    DrainBegan: _drain,
    Halted: _halt,
    Rewound: _begin,
    Facts: _restore,
}
