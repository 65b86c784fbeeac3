"""What trainers, agents and their peers say to each other.

Every message is a length (4 bytes, big-endian) and JSON of that length; states and
gradients follow as bare bytes, as many as the message before says. Nothing is unpickled.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from geartrain.checkpoint.manifest import TensorFacts
from geartrain.checkpoint.ranges import StateRange

FRAME_LIMIT_BYTES = 64 << 20
"""Longest message; a state of 500,000 chunks fits."""

Json = Any  # what JSON can hold
Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 53)]
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=200)]
Path = Annotated[str, msgspec.Meta(min_length=1, max_length=4096)]


class ShardChunk(msgspec.Struct, frozen=True, array_like=True):
    """Elements of a tensor and where their bytes lie in the buffer."""

    name: Name
    start: Count
    stop: Count
    offset: Count
    num_bytes: Count

    @property
    def range(self) -> StateRange:
        """The elements that it holds."""
        return StateRange(name=self.name, start=self.start, stop=self.stop)


class SnapshotFacts(msgspec.Struct, frozen=True, kw_only=True):
    """One member's part of one version of the state."""

    member_id: Name
    incarnation: Name
    """The process that took it."""
    step: Count
    lineage: str
    num_bytes: Count
    """Of the buffer that is used."""
    tensors: dict[str, TensorFacts]
    """The whole tensors, of which the chunks are parts."""
    chunks: tuple[ShardChunk, ...]
    extras: dict[str, Json] = {}
    """What belongs to the state and is no tensor."""
    crc32s: tuple[int, ...] = ()
    """One a chunk; empty until an agent has taken them."""


class LogEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One step in a gradient log."""

    member_id: Name
    incarnation: Name
    step: Count
    """After it was applied."""
    previous_lineage: str
    lineage: str
    num_bytes: Count
    """As kept, coded."""
    crc32: int


class SlotPart(msgspec.Struct, frozen=True, array_like=True):
    """A part of a reduced gradient and where its bytes lie in a log slot."""

    name: Name
    start: Count
    stop: Count
    dtype: str
    offset: Count
    num_bytes: Count


class PeerAddress(msgspec.Struct, frozen=True, kw_only=True):
    """A node that may keep copies, and where its agent listens."""

    node_id: Name
    host_id: Name
    rack_id: str = ""
    address: str
    """``HOST:PORT``."""


# -- asked by anybody who may ------------------------------------------------------


class Describe(msgspec.Struct, frozen=True, tag=True):
    """Asks which node this is and what it has free."""


class NodeDescription(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Answer."""

    node_id: str
    host_id: str
    rack_id: str
    free_bytes: int


class ListHeld(msgspec.Struct, frozen=True, tag=True):
    """Asks for all complete snapshots and logs that the agent holds."""


class Held(msgspec.Struct, frozen=True, tag=True):
    """Answer."""

    snapshots: tuple[SnapshotFacts, ...]
    log: tuple[LogEntry, ...]


class FetchChunks(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Asks for chunks of a snapshot by their place in it."""

    member_id: str
    step: int
    lineage: str
    indexes: tuple[Count, ...]


class FetchLog(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Asks for one step of a log."""

    member_id: str
    step: int
    lineage: str


class Payload(msgspec.Struct, frozen=True, tag=True):
    """Answer; so many bytes follow."""

    num_bytes: int


class Offer(msgspec.Struct, frozen=True, tag=True):
    """Offers a copy of a snapshot; its bytes follow once it is accepted."""

    facts: SnapshotFacts


class OfferLog(msgspec.Struct, frozen=True, tag=True):
    """Offers a step of a log; its bytes follow once it is accepted."""

    entry: LogEntry


class Accepted(msgspec.Struct, frozen=True, tag=True):
    """Send it."""


class Stored(msgspec.Struct, frozen=True, tag=True):
    """It has arrived, was checked, and is held."""


class Refused(msgspec.Struct, frozen=True, tag=True):
    """Why something was not done."""

    reason: str


# -- asked by the trainer of this host only ----------------------------------------


class Reserve(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Asks for two snapshot buffers and some log slots; the answer has descriptors."""

    member_id: Name
    incarnation: Name
    snapshot_bytes: Count
    slot_bytes: Count = 0
    num_slots: Annotated[int, msgspec.Meta(ge=0, le=16)] = 0
    log_limit_bytes: Count = 0
    """The log is at most this long, as kept."""
    base_step: Count = 0
    base_lineage: str = ""
    """Of the snapshot that the trainer was restored from, which stays until there is a new
    one; where empty that is the newest."""


class Reserved(msgspec.Struct, frozen=True, tag=True):
    """Answer, with descriptors: of two buffers, then of the slots."""


class Begin(msgspec.Struct, frozen=True, tag=True):
    """Asks to write to a snapshot buffer; a ``BufferFree`` answers."""

    buffer_index: Count


class Seal(msgspec.Struct, frozen=True, tag=True):
    """Says that a buffer is whole."""

    buffer_index: Count
    facts: SnapshotFacts


class LogStep(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Says that a log slot holds the gradient of a step."""

    slot_index: Count
    step: Count
    previous_lineage: str
    lineage: str
    update: dict[str, Json]
    """How it was applied; see ``gradient_log``."""
    parts: tuple[SlotPart, ...]


class SetPeers(msgspec.Struct, frozen=True, tag=True):
    """Says which nodes there are and how many copies to keep."""

    peers: tuple[PeerAddress, ...]
    num_copies: Count


class ReadStatus(msgspec.Struct, frozen=True, tag=True):
    """Asks how the copies are doing."""


class WriteVersion(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Asks to write what agents hold to the local disk; a ``VersionWritten`` answers."""

    step: Count
    lineage: str
    directory: Path
    """Of versions; see ``LocalTier``."""
    created_at_s: float
    keep_last: Annotated[int, msgspec.Meta(ge=1)]
    """Versions that stay."""
    config: dict[str, Json] = {}
    others: tuple[PeerAddress, ...] = ()
    """Agents that may hold parts of it."""


class VersionWritten(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Notice: a version was written, or why it was not."""

    step: int
    save_s: float
    problem: str = ""


class CopyStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The copies at one peer."""

    node_id: str
    snapshot_step: int
    """-1 where it has none."""
    log_step: int
    send_s: float
    """The last snapshot's."""
    problem: str


class Status(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Answer."""

    copies: tuple[CopyStatus, ...]
    warning: str
    free_bytes: int
    log_bytes: int


class BufferFree(msgspec.Struct, frozen=True, tag=True):
    """Answer: whether the trainer may write to this snapshot buffer."""

    buffer_index: int
    is_free: bool
    """False while a reader has it, or while it holds the only complete snapshot."""


class SnapshotKept(msgspec.Struct, frozen=True, tag=True):
    """Notice: a sealed snapshot was checked and now serves; or why it does not."""

    step: int
    seal_s: float
    problem: str = ""


class SlotFree(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Notice: a log slot was taken."""

    slot_index: int
    step: int
    is_logged: bool
    """False where the log has no room or a gap: take a snapshot."""
    log_bytes: int
    """All steps that are kept."""
    wants_snapshot: bool
    """The log is more than half full, or broken."""
    code_s: float = 0.0
    """Of a processor, for coding and keeping the step."""


PublicRequest = Describe | ListHeld | FetchChunks | FetchLog | Offer | OfferLog
LocalRequest = (
    PublicRequest | Reserve | Begin | Seal | LogStep | SetPeers | ReadStatus | WriteVersion
)
Answer = (
    NodeDescription
    | Held
    | Payload
    | Accepted
    | Stored
    | Refused
    | Reserved
    | Status
    | BufferFree
    | SnapshotKept
    | SlotFree
    | VersionWritten
)
