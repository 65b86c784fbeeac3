"""A trainer's link to its node's agent: buffers to copy into, and notices to read.

Nothing here waits for the agent longer than a moment: a snapshot that can't be taken now
is taken later, and training goes on without an agent that is gone.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from geartrain.checkpoint.agent.caller import connect_locally
from geartrain.checkpoint.agent.messages import (
    Answer,
    Begin,
    BufferFree,
    LogStep,
    PeerAddress,
    ReadStatus,
    Refused,
    Reserve,
    Reserved,
    Seal,
    SetPeers,
    SlotFree,
    SnapshotFacts,
    SnapshotKept,
    Status,
    VersionWritten,
    WriteVersion,
)
from geartrain.checkpoint.agent.shared_buffer import SharedBuffer
from geartrain.checkpoint.agent.wire import (
    receive_message,
    receive_with_descriptors,
    send_message,
    speaking_with,
)
from geartrain.errors import CheckpointError, CommunicationError

_SEND_S = 1.0
_GRANT_S = 0.05
"""A buffer is granted within a millisecond, or later: then the snapshot waits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reservation:
    """What a trainer needs of its agent."""

    member_id: str
    incarnation: str
    snapshot_bytes: int
    """Of the whole shard, laid out; there are two such buffers."""
    slot_bytes: int = 0
    """Of one step's reduced gradient; 0 without a log."""
    num_slots: int = 0
    log_limit_bytes: int = 0
    base: tuple[int, str] = (0, "")
    """Step and lineage of the snapshot that the trainer was restored from, if any."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkState:
    """What the agent has said so far."""

    kept_step: int = -1
    """Newest snapshot that serves."""
    seal_s: float = 0.0
    logged_step: int = -1
    log_bytes: int = 0
    wants_snapshot: bool = False
    log_code_s: float = 0.0
    """Of a processor, that the agent took over the last step of the log."""
    send_s: float = 0.0
    """How long the slowest peer took to get the last snapshot, by the last status."""
    copied_step: int = -1
    """Newest snapshot that every working peer has, by the last status; -1 without one."""
    written: VersionWritten | None = None
    """How writing the last version went."""
    problem: str = ""
    """The last thing that did not go as asked."""


class AgentLink:
    """One trainer's connection; used by one thread.

    Args:
        local_address: Of this node's agent.
        reservation: What is needed.

    Raises:
        CommunicationError: If the agent can't be reached.
        CheckpointError: If it has no room, saying what would help.
    """

    def __init__(self, local_address: str, reservation: Reservation) -> None:
        self.reservation = reservation
        self.state = LinkState()
        self._whom = f"the agent of {reservation.member_id}'s node"
        self._granted: int | None = None
        self._asked = False
        self._newest = 1
        self._answers: list[Status] = []
        self._sock = connect_locally(local_address)
        try:
            self._reserve(reservation)
        except (CommunicationError, CheckpointError):
            self._sock.close()
            raise
        self._free_slots = list(range(reservation.num_slots))

    def ask(self) -> None:
        """Ask for the idle buffer ahead, such as a step before ``begin`` is called.

        The agent lets the trainer have the cores, so its answer may take milliseconds,
        which nobody waits for then. What lay in the buffer is no longer served.

        Raises:
            CommunicationError: If the agent is gone.
        """
        self.poll()
        if self._granted is None and not self._asked:
            self._send(Begin(buffer_index=1 - self._newest))
            self._asked = True

    @property
    def has_buffer(self) -> bool:
        """Whether ``begin`` gives one at once, as far as was polled."""
        return self._granted is not None

    def begin(self) -> memoryview | None:
        """The idle buffer, to copy a shard into; None where it is busy: try again later.

        Raises:
            CommunicationError: If the agent is gone.
        """
        self.ask()
        deadline_at_s = time.monotonic() + _GRANT_S
        while self._granted is None and self._asked:
            left_s = deadline_at_s - time.monotonic()
            if left_s <= 0 or not self._hear(left_s):
                break
        return None if self._granted is None else self._buffers[self._granted].view

    def seal(self, facts: SnapshotFacts) -> None:
        """Say that the buffer of ``begin`` is whole; the other one is idle from now on.

        Raises:
            CommunicationError: If the agent is gone.
            CheckpointError: If ``begin`` gave none.
        """
        if self._granted is None:
            msg = f"step {facts.step} can't be sealed: ask begin() for a buffer first"
            raise CheckpointError(msg)
        self._newest, self._granted = self._granted, None
        self._send(Seal(buffer_index=self._newest, facts=facts))

    def log_slot(self) -> tuple[int, memoryview] | None:
        """A slot to copy a gradient into; None where the agent has not caught up.

        A step that is not logged breaks the log: it goes on after the next snapshot.

        Raises:
            CommunicationError: If the agent is gone.
        """
        self.poll()
        if not self._free_slots:
            self.state = replace(self.state, wants_snapshot=True)
            return None
        index = self._free_slots[0]
        return index, self._slots[index].view

    def log(self, step: LogStep) -> None:
        """Say that the slot of ``log_slot`` is filled.

        Raises:
            CommunicationError: If the agent is gone.
        """
        self._free_slots.remove(step.slot_index)
        self._send(step)

    def set_peers(self, peers: Sequence[PeerAddress], num_copies: int) -> None:
        """Say which nodes there are and how many copies to keep."""
        self._send(SetPeers(peers=tuple(peers), num_copies=num_copies))

    def write_version(self, order: WriteVersion) -> None:
        """Have a sealed state written to disk; ``state.written`` tells how it went.

        Raises:
            CommunicationError: If the agent is gone.
        """
        self._send(order)

    def request_status(self) -> None:
        """Ask how the copies are doing; ``state.copied_step`` follows once that was said.

        Raises:
            CommunicationError: If the agent is gone.
        """
        self._answers.clear()
        self._send(ReadStatus())

    def read_status(self, limit_s: float = 5.0) -> Status:
        """Ask how the copies are doing.

        Raises:
            CommunicationError: If the agent is gone, or does not say in time.
        """
        self.request_status()
        deadline_at_s = time.monotonic() + limit_s
        while not self._answers:
            left_s = deadline_at_s - time.monotonic()
            if left_s <= 0 or not self._hear(left_s):
                msg = f"{self._whom} said nothing for {limit_s:g} s; see whether it hangs"
                raise CommunicationError(msg)
        return self._answers.pop()

    def poll(self) -> LinkState:
        """Read what the agent has said meanwhile; does not wait.

        Raises:
            CommunicationError: If the agent is gone.
        """
        while self._hear(0.0):
            pass
        return self.state

    def wait_kept(self, step: int, limit_s: float) -> LinkState:
        """Wait until a snapshot serves; for the end of a run, not for each step.

        Raises:
            CommunicationError: If the agent is gone, or it takes longer.
            CheckpointError: If the snapshot was refused.
        """
        deadline_at_s = time.monotonic() + limit_s
        while self.state.kept_step < step:
            if self.state.problem:
                raise CheckpointError(self.state.problem)
            left_s = deadline_at_s - time.monotonic()
            if left_s <= 0 or not self._hear(left_s):
                msg = f"{self._whom} did not keep step {step} within {limit_s:g} s"
                raise CommunicationError(msg)
        return self.state

    def close(self) -> None:
        """Leave; the agent keeps what was sealed."""
        self._sock.close()

    def _reserve(self, reservation: Reservation) -> None:
        request = Reserve(
            member_id=reservation.member_id,
            incarnation=reservation.incarnation,
            snapshot_bytes=reservation.snapshot_bytes,
            slot_bytes=reservation.slot_bytes,
            num_slots=reservation.num_slots,
            log_limit_bytes=reservation.log_limit_bytes,
            base_step=reservation.base[0],
            base_lineage=reservation.base[1],
        )
        count = 2 + reservation.num_slots
        with speaking_with(self._whom):
            send_message(self._sock, request, _SEND_S)
            answer, descriptors = receive_with_descriptors(self._sock, Answer, count)
        buffers = [SharedBuffer(descriptor) for descriptor in descriptors]
        if isinstance(answer, Refused):
            raise CheckpointError(answer.reason)
        if not isinstance(answer, Reserved) or len(buffers) != count:
            msg = f"{self._whom} gave {len(buffers)} buffers, expected {count}; restart it"
            raise CommunicationError(msg)
        self._buffers, self._slots = buffers[:2], buffers[2:]

    def _send(
        self, message: Begin | Seal | LogStep | SetPeers | ReadStatus | WriteVersion
    ) -> None:
        with speaking_with(self._whom):
            send_message(self._sock, message, _SEND_S)

    def _hear(self, limit_s: float) -> bool:
        """Take one notice; False where none came in time."""
        with speaking_with(self._whom):
            self._sock.settimeout(limit_s)
            try:
                if not self._sock.recv(1, socket.MSG_PEEK):
                    msg = "it closed the connection"
                    raise ConnectionError(msg)
            except (TimeoutError, BlockingIOError):
                return False
            self._take(receive_message(self._sock, Answer, _SEND_S))
        return True

    def _take(self, notice: object) -> None:
        match notice:
            case BufferFree():
                self._asked = False
                self._granted = notice.buffer_index if notice.is_free else None
            case SnapshotKept(problem=""):
                self.state = replace(
                    self.state,
                    kept_step=notice.step,
                    seal_s=notice.seal_s,
                    wants_snapshot=False,
                    problem="",
                )
            case SnapshotKept() as refused:
                self._newest = 1 - self._newest  # the other buffer still serves
                self.state = replace(self.state, problem=refused.problem)
            case SlotFree():
                self._free_slots.append(notice.slot_index)
                self.state = replace(
                    self.state,
                    logged_step=notice.step if notice.is_logged else self.state.logged_step,
                    log_bytes=notice.log_bytes,
                    wants_snapshot=notice.wants_snapshot,
                    log_code_s=notice.code_s,
                )
            case Status():
                working = [copy for copy in notice.copies if not copy.problem]
                self.state = replace(
                    self.state,
                    send_s=max((copy.send_s for copy in working), default=0.0),
                    copied_step=min((copy.snapshot_step for copy in working), default=-1),
                )
                self._answers.append(notice)
            case VersionWritten():
                self.state = replace(self.state, written=notice)
            case Refused():
                self._asked = False
                self.state = replace(self.state, problem=notice.reason)
            case _:
                msg = f"{self._whom} said {type(notice).__name__} unasked; restart it"
                raise CommunicationError(msg)
