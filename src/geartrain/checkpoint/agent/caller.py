"""One end of a connection to an agent: asks, and gets bytes."""

from __future__ import annotations

import socket
import zlib
from collections.abc import Sequence
from typing import TypeVar

import msgspec

from geartrain.checkpoint.agent.messages import (
    Accepted,
    Answer,
    Describe,
    FetchChunks,
    FetchLog,
    Held,
    ListHeld,
    LogEntry,
    NodeDescription,
    Offer,
    OfferLog,
    Payload,
    Refused,
    SnapshotFacts,
    Stored,
)
from geartrain.checkpoint.agent.shelf import Kept
from geartrain.checkpoint.agent.wire import (
    receive_into,
    receive_message,
    send_bytes,
    send_message,
    speaking_with,
)
from geartrain.errors import CheckpointError, CommunicationError
from geartrain.topology.agent_protocol import AgentAddress, introduce

CONNECT_LIMIT_S = 2.0
STALL_LIMIT_S = 10.0

Kind = TypeVar("Kind", bound=msgspec.Struct)


class AgentCaller:
    """Speaks with one agent, and names it in every error.

    Args:
        sock: Connected, and introduced where that is asked for.
        label: What to call the agent.
    """

    def __init__(self, sock: socket.socket, label: str) -> None:
        self._sock = sock
        self.label = label

    @classmethod
    def connect(cls, address: str, token: str, label: str) -> AgentCaller:
        """Connect to an agent's TCP port.

        Raises:
            CommunicationError: If it is not there, or refuses the token.
        """
        where = AgentAddress.parse(address)
        whom = f"the agent of {label} at {address}"
        with speaking_with(whom):
            sock = socket.create_connection(
                (where.host, where.port), timeout=CONNECT_LIMIT_S
            )
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with speaking_with(whom):
                introduce(sock, token, CONNECT_LIMIT_S)
        except CommunicationError as error:
            sock.close()
            if whom in str(error):
                raise
            msg = f"{whom}: {error}"
            raise CommunicationError(msg) from error
        return cls(sock, label)

    @classmethod
    def connect_here(cls, local_address: str) -> AgentCaller:
        """Connect to the agent of this host.

        Raises:
            CommunicationError: If it is not there.
        """
        sock = connect_locally(local_address)
        return cls(sock, "this node")

    def describe(self) -> NodeDescription:
        """Which node it is on and what it has free."""
        return self._ask(Describe(), NodeDescription)

    def held(self) -> Held:
        """What it holds."""
        return self._ask(ListHeld(), Held)

    def fetch(
        self, facts: SnapshotFacts, indexes: Sequence[int], targets: Sequence[memoryview]
    ) -> tuple[int, ...]:
        """Fetch chunks of a snapshot.

        Args:
            facts: The snapshot, as it was listed.
            indexes: Which chunks.
            targets: Where to put each, of its size.

        Returns:
            The indexes of those that are not what was sealed.

        Raises:
            CommunicationError: If the agent fails.
            CheckpointError: If it does not hold them any more.
        """
        request = FetchChunks(
            member_id=facts.member_id,
            step=facts.step,
            lineage=facts.lineage,
            indexes=tuple(indexes),
        )
        size = self._ask(request, Payload).num_bytes
        if size != sum(len(target) for target in targets):
            msg = f"{self.label} sends {size} bytes, not those asked for; list again"
            raise CommunicationError(msg)
        damaged = []
        for index, target in zip(indexes, targets, strict=True):
            with speaking_with(self.label):
                receive_into(self._sock, target, STALL_LIMIT_S)
            if zlib.crc32(target) != facts.crc32s[index]:
                damaged.append(index)
        return tuple(damaged)

    def fetch_log(self, entry: LogEntry) -> bytes:
        """Fetch one step of a log.

        Raises:
            CommunicationError: If the agent fails.
            CheckpointError: If it does not hold the step, or it is damaged.
        """
        request = FetchLog(
            member_id=entry.member_id, step=entry.step, lineage=entry.lineage
        )
        size = self._ask(request, Payload).num_bytes
        data = bytearray(min(size, entry.num_bytes))
        with speaking_with(self.label):
            receive_into(self._sock, memoryview(data), STALL_LIMIT_S)
        if size != entry.num_bytes or zlib.crc32(data) != entry.crc32:
            msg = f"step {entry.step} of the log of {entry.member_id} is damaged at "
            msg += f"{self.label}; ask another agent"
            raise CheckpointError(msg)
        return bytes(data)

    def offer(self, kept: Kept) -> None:
        """Send a copy of a snapshot.

        Raises:
            CommunicationError: If the agent fails.
            CheckpointError: If it refuses, or the copy arrived damaged.
        """
        self._ask(Offer(facts=kept.facts), Accepted)
        with speaking_with(self.label):
            for index in range(len(kept.facts.chunks)):
                send_bytes(self._sock, kept.chunk(index), STALL_LIMIT_S)
        self._hear(Stored)

    def offer_log(self, entry: LogEntry, data: bytes) -> None:
        """Send a step of a log.

        Raises:
            CommunicationError: If the agent fails.
            CheckpointError: If it refuses.
        """
        self._ask(OfferLog(entry=entry), Accepted)
        with speaking_with(self.label):
            send_bytes(self._sock, memoryview(data), STALL_LIMIT_S)
        self._hear(Stored)

    def close(self) -> None:
        """End the connection."""
        self._sock.close()

    def _ask(self, request: msgspec.Struct, kind: type[Kind]) -> Kind:
        with speaking_with(self.label):
            send_message(self._sock, request, STALL_LIMIT_S)
        return self._hear(kind)

    def _hear(self, kind: type[Kind]) -> Kind:
        with speaking_with(self.label):
            answer = receive_message(self._sock, Answer, STALL_LIMIT_S)
        if isinstance(answer, Refused):
            msg = f"{self.label} refused: {answer.reason}"
            raise CheckpointError(msg)
        if not isinstance(answer, kind):
            msg = f"{self.label} answered with a {type(answer).__name__}; restart it"
            raise CommunicationError(msg)
        return answer


def connect_locally(local_address: str) -> socket.socket:
    """Connect to the Unix socket of this host's agent.

    Args:
        local_address: As the agent announced it: ``@`` and a name.

    Raises:
        CommunicationError: If it is not there.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.settimeout(CONNECT_LIMIT_S)
        with speaking_with("the agent of this node (is it in this network namespace?)"):
            sock.connect("\0" + local_address.removeprefix("@"))
    except CommunicationError:
        sock.close()
        raise
    return sock
