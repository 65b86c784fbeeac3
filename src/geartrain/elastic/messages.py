"""What members and the coordinator say to each other: one JSON object a line.

Everything names the epoch that it belongs to and the state it speaks of, as (step,
lineage): the step alone would not tell two histories apart. Members are named by
``member_id`` (the device) and ``incarnation`` (one process of it), never by rank, since
ranks change with every epoch.
"""

from __future__ import annotations

from typing import Annotated, Literal, TypeVar

import msgspec

from geartrain.checkpoint.ranges import StateRange
from geartrain.errors import CommunicationError, GeartrainError

PROTOCOL_VERSION = 1
LINE_LIMIT_BYTES = 4 << 20
"""Longest line; a new epoch of 10,000 members fits."""

Name = Annotated[str, msgspec.Meta(min_length=1, max_length=200)]
Reason = Annotated[str, msgspec.Meta(max_length=2000)]
Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 53)]
Seconds = Annotated[float, msgspec.Meta(ge=0)]
LineageHash = Annotated[str, msgspec.Meta(pattern="^([0-9a-f]{16,64})?$")]
"""Hash chain over the committed steps; empty for who holds no state."""


WHOLE_STATE = StateRange(name="*", start=0, stop=1)
"""What a data-parallel replica holds: everything, whatever the tensors are called."""


class _OfState(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What all messages about an epoch carry."""

    epoch: Count
    """0 before the first one."""
    step: Count
    """Steps committed so far in the state that is meant."""
    lineage: LineageHash
    """Of that state."""


class Join(_OfState, tag="join", frozen=True, kw_only=True):
    """First message on a connection: a process asks to take part, or comes back.

    ``epoch`` is the last one it knew, so that epochs grow also if the journal is gone.
    """

    member_id: Name
    incarnation: Name
    """Unique to the process."""
    host_id: Name
    place: Count = 0
    """Sorts the members of an epoch, before ``member_id``; the rank of the first launch."""
    recent: Annotated[tuple[LineageHash, ...], msgspec.Meta(max_length=1024)] = ()
    """Lineages of the steps before ``step``, the latest last: proof of commits that a
    journal lost with its host. The last 64 are plenty."""
    voted_step: Count = 0
    """Of its vote that has not been answered; 0 for none."""
    voted_lineage: LineageHash = ""
    holds: tuple[StateRange, ...] = (WHOLE_STATE,)
    """Of the state (step, lineage); without meaning where ``lineage`` is empty."""
    wants: tuple[StateRange, ...] = (WHOLE_STATE,)
    """What it must hold before it can take part."""
    address: Annotated[str, msgspec.Meta(max_length=300)] = ""
    """Where it hands its state to others; handed on as it is."""
    facts: dict[str, str] = {}
    """For the other members, handed on as they are."""
    version: Count = PROTOCOL_VERSION


class Ready(_OfState, tag="ready", frozen=True, kw_only=True):
    """The main loop has taken the epoch up, its exchange stands, and it holds the state."""


class Beat(_OfState, tag="beat", frozen=True, kw_only=True):
    """Sign of life. ``epoch`` is the one that the *main loop* has taken up."""

    progress: Count
    """Grows whenever the main loop gets on; nothing else may bump it."""
    phase: Literal["step", "waiting", "away"] = "step"
    """``waiting``: in an exchange, for the others, or for a commit; ``away``: in the user's
    own code between steps."""
    step_s: Seconds = 0.0
    """Duration of the latest whole step; 0 for none since the last beat."""


class Vote(_OfState, tag="vote", frozen=True, kw_only=True):
    """The member has all that it needs to apply ``step``, whose lineage would be this."""

    parent: LineageHash
    """Lineage of the state that it would be applied to."""


class Suspect(_OfState, tag="suspect", frozen=True, kw_only=True):
    """An exchange or its build failed here; names those that did not answer, if known."""

    member_ids: tuple[Name, ...]
    reason: Reason


class Healed(_OfState, tag="healed", frozen=True, kw_only=True):
    """The sender now holds this state as far as it was asked to."""


class Holds(_OfState, tag="holds", frozen=True, kw_only=True):
    """Which ranges of this state the sender holds; replaces what it said before."""

    ranges: tuple[StateRange, ...]


class NotRestored(_OfState, tag="not_restored", frozen=True, kw_only=True):
    """Ranges that were to come from a lower tier are not there at this step."""

    ranges: tuple[StateRange, ...]
    reason: Reason


class Leave(_OfState, tag="leave", frozen=True, kw_only=True):
    """The process wants to end: it finishes its step and is left out after it."""

    reason: Reason


MemberMessage = Join | Ready | Beat | Vote | Suspect | Healed | Holds | NotRestored | Leave


class _Asked(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An operator's request; its answer has the same number."""

    request_id: Count


class DrainAsked(_Asked, tag="drain_asked", frozen=True, kw_only=True):
    """Take members, or all of a host, out of the run at the next step boundary."""

    member_ids: tuple[Name, ...] = ()
    host_ids: tuple[Name, ...] = ()
    reason: Reason = "asked to"


class ScaleAsked(_Asked, tag="scale_asked", frozen=True, kw_only=True):
    """Train with at most so many members; those beyond are drained, last places first."""

    num_members: Count


class RewindAsked(_Asked, tag="rewind_asked", frozen=True, kw_only=True):
    """Go on from another state, after the last one was lost; the only way back."""

    step: Count
    lineage: LineageHash
    reason: Reason


class StatusAsked(_Asked, tag="status_asked", frozen=True, kw_only=True):
    """Who takes part, and how far the run is."""


OperatorMessage = DrainAsked | ScaleAsked | RewindAsked | StatusAsked


class MemberPlace(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One member of an epoch; its position in the epoch's list is its rank there."""

    member_id: Name
    incarnation: Name
    host_id: Name
    address: str = ""
    facts: dict[str, str] = {}


class LostMember(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Who was in the epoch before and is not in this one."""

    member_id: Name
    incarnation: Name
    reason: Reason
    noticed_ago_s: Seconds = 0.0
    """Before this message was made; clocks of hosts differ."""
    is_failure: bool = True
    """False for who left in order."""
    silent_s: Seconds = 0.0
    """How long the loss had lasted when it was noticed, where it showed as silence."""


class Transfer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Who gives what to whom."""

    giver: Name
    """member_id; may have left the epoch in order and still serve."""
    giver_address: str
    receiver: Name
    ranges: tuple[StateRange, ...]
    from_step: int = -1
    """What the receiver holds of this lineage already; -1: nothing that can be used."""


class Restore(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Ranges without a live holder, and who loads them from tier 1."""

    receiver: Name
    ranges: tuple[StateRange, ...]


class Welcome(_OfState, tag="welcome", frozen=True, kw_only=True):
    """Answer to a join: known, though not yet in an epoch."""

    beat_interval_s: Seconds
    build_s: Seconds
    """In which an epoch's exchange must stand."""
    min_members: Count
    admitted_after_s: Seconds = 0.0
    """How long a member that failed lately is kept waiting."""


class Heal(_OfState, tag="heal", frozen=True, kw_only=True):
    """To a joiner and its givers: copy this state, while the others train on."""

    transfers: tuple[Transfer, ...]


class Hold(_OfState, tag="hold", frozen=True, kw_only=True):
    """``epoch`` is over; cut its exchange at once, drop the step, keep the state, wait."""

    lost: tuple[LostMember, ...]
    reason: Reason


class NewEpoch(_OfState, tag="new_epoch", frozen=True, kw_only=True):
    """The membership from now on; whatever older epoch there was is over.

    Build the exchange, carry out the transfers and restores, then say :class:`Ready`.
    """

    members: tuple[MemberPlace, ...]
    """In order of rank."""
    lost: tuple[LostMember, ...] = ()
    """Since the last epoch."""
    joined: tuple[Name, ...] = ()
    """member_ids that were not in the last epoch."""
    transfers: tuple[Transfer, ...] = ()
    restores: tuple[Restore, ...] = ()
    reason: Reason
    build_s: Seconds


class Commit(_OfState, tag="commit", frozen=True, kw_only=True):
    """All members of the epoch can apply this step: apply it."""


class Drain(_OfState, tag="drain", frozen=True, kw_only=True):
    """Finish the step; the epoch after it is without you."""

    reason: Reason


class Dismiss(_OfState, tag="dismiss", frozen=True, kw_only=True):
    """You are out; your connection ends. Never apply a step that was not committed."""

    reason: Reason
    is_failure: bool = True
    may_return_after_s: float = -1.0
    """Join again after so long; negative: not at all."""


class Halt(_OfState, tag="halt", frozen=True, kw_only=True):
    """The run can't go on by itself."""

    kind: Literal["no_state", "too_few", "too_many_failures", "diverged"]
    reason: Reason
    ranges: tuple[StateRange, ...] = ()
    """That nobody holds."""


class MemberStatus(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One member, for people."""

    member_id: Name
    incarnation: Name
    host_id: Name
    standing: Literal["member", "joining", "draining", "away"]
    num_failures: Count = 0
    note: Reason = ""


class Status(_OfState, tag="status", frozen=True, kw_only=True):
    """How the run stands."""

    request_id: Count
    phase: str
    members: tuple[MemberStatus, ...]


class Answer(msgspec.Struct, tag="answer", frozen=True, kw_only=True):
    """To an operator's request."""

    request_id: Count
    is_accepted: bool
    text: Reason


CoordinatorMessage = (
    Welcome | Heal | Hold | NewEpoch | Commit | Drain | Dismiss | Halt | Status | Answer
)
Message = MemberMessage | OperatorMessage | CoordinatorMessage

T = TypeVar("T")
_encoder = msgspec.json.Encoder()
_to_coordinator: msgspec.json.Decoder[MemberMessage | OperatorMessage] = (
    msgspec.json.Decoder(MemberMessage | OperatorMessage)
)
_from_coordinator: msgspec.json.Decoder[CoordinatorMessage] = msgspec.json.Decoder(
    CoordinatorMessage
)


def encode(message: Message) -> bytes:
    """The message as one line, its end included.

    Raises:
        CommunicationError: If it is longer than a receiver takes.
    """
    line = _encoder.encode(message)
    _check_length(len(line))
    return line + b"\n"


def decode_to_coordinator(line: bytes) -> MemberMessage | OperatorMessage:
    """Read what a member or an operator sent, without its line's end.

    Raises:
        CommunicationError: If it is no such message.

    >>> decode_to_coordinator(b'{"type":"ready","epoch":1,"step":0,"lineage":""}')
    Ready(epoch=1, step=0, lineage='')
    """
    _check_length(len(line))
    return _decode(_to_coordinator, line)


def decode_from_coordinator(line: bytes) -> CoordinatorMessage:
    """Read what the coordinator sent, without its line's end.

    Raises:
        CommunicationError: If it is no such message.
    """
    _check_length(len(line))
    return _decode(_from_coordinator, line)


def _check_length(num_bytes: int) -> None:
    if num_bytes > LINE_LIMIT_BYTES:
        msg = (
            f"a message of {num_bytes} bytes, at most {LINE_LIMIT_BYTES} are allowed; is "
            "the other side a geartrain of this version?"
        )
        raise CommunicationError(msg)


def _decode(decoder: msgspec.json.Decoder[T], line: bytes) -> T:
    try:
        return decoder.decode(line)
    except (msgspec.DecodeError, GeartrainError, RecursionError) as error:
        start = line[:80].decode(errors="replace")
        msg = (
            f"a message that is not understood ({error}): {start!r}; use the same "
            "geartrain everywhere"
        )
        raise CommunicationError(msg) from error
