"""What the coordinator's decisions are made of: events in, actions out.

The shell around the machine (sockets, clock, files) turns what happens into events and
carries the actions out, strictly in their order: a :class:`Record` is on disk before a
:class:`Send` that follows it leaves.
"""

from __future__ import annotations

from dataclasses import dataclass

from geartrain.elastic.messages import CoordinatorMessage, MemberMessage, OperatorMessage
from geartrain.elastic.records import JournalRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class Received:
    """A message came."""

    connection: int
    """Number of the connection, never used twice by one coordinator process."""
    message: MemberMessage | OperatorMessage


@dataclass(frozen=True, slots=True, kw_only=True)
class Closed:
    """A connection ended, or what came over it was none of ours."""

    connection: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick:
    """Time has passed. Comes at least every :data:`TICK_S`, else when asked for."""


Event = Received | Closed | Tick

TICK_S = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Send:
    """Send a message; a connection that is gone by then is passed over."""

    connection: int
    message: CoordinatorMessage


@dataclass(frozen=True, slots=True, kw_only=True)
class Close:
    """Close a connection after what was sent on it before; no event comes of it."""

    connection: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """Append to the journal, before the actions after it."""

    record: JournalRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """For the log of the run: something that a person may want to know."""

    kind: str
    """``lost``, ``epoch``, ``refused``, ``diverged``, ``halt``, ``heal`` ..."""
    text: str
    member_id: str = ""


Action = Send | Close | Record | Note
