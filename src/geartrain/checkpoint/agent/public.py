"""What an agent answers to whoever may ask: its trainer, other trainers, its peers."""

from __future__ import annotations

import socket
import zlib
from dataclasses import dataclass

import msgspec

from geartrain.checkpoint.agent.messages import (
    Accepted,
    Describe,
    FetchChunks,
    FetchLog,
    Held,
    ListHeld,
    NodeDescription,
    Offer,
    OfferLog,
    Payload,
    PublicRequest,
    Refused,
    SnapshotFacts,
    Stored,
)
from geartrain.checkpoint.agent.settings import AgentSettings
from geartrain.checkpoint.agent.shared_buffer import SharedBuffer
from geartrain.checkpoint.agent.shelf import Kept, Shelf, check_layout
from geartrain.checkpoint.agent.wire import receive_into, send_bytes, send_message
from geartrain.errors import CheckpointError

STALL_LIMIT_S = 10.0
"""A transfer in which nothing moves for so long is given up."""
_LARGEST_LOG_STEP_BYTES = 1 << 34


@dataclass(frozen=True, slots=True, kw_only=True)
class PublicDesk:
    """Answers requests on one connection after the other."""

    settings: AgentSettings
    shelf: Shelf

    def answer(self, sock: socket.socket, request: PublicRequest) -> None:
        """Answer a request, bytes included.

        Raises:
            OSError: If the connection fails.
            CommunicationError: Likewise.
        """
        try:
            match request:
                case Describe():
                    self._send(sock, self.describe())
                case ListHeld():
                    self._send(sock, self.shelf.held())
                case FetchChunks():
                    self._send_chunks(sock, request)
                case FetchLog():
                    self._send_log(sock, request)
                case Offer():
                    self._receive_snapshot(sock, request.facts)
                case OfferLog():
                    self._receive_log(sock, request)
        except CheckpointError as error:
            self._send(sock, Refused(reason=str(error)))

    def describe(self) -> NodeDescription:
        """Which node this is and what it has free."""
        return NodeDescription(
            node_id=self.settings.node_id,
            host_id=self.settings.host_id,
            rack_id=self.settings.rack_id,
            free_bytes=self.shelf.free_bytes,
        )

    def held(self) -> Held:
        """What can be fetched."""
        return self.shelf.held()

    def _send(self, sock: socket.socket, message: msgspec.Struct) -> None:
        send_message(sock, message, STALL_LIMIT_S)

    def _send_chunks(self, sock: socket.socket, request: FetchChunks) -> None:
        with self.shelf.reading(request.member_id, request.step, request.lineage) as kept:
            chunks = kept.facts.chunks
            if any(index >= len(chunks) for index in request.indexes):
                msg = (
                    f"chunk {max(request.indexes)} of step {request.step} does not exist, "
                    f"there are {len(chunks)}; list again"
                )
                raise CheckpointError(msg)
            total = sum(chunks[index].num_bytes for index in request.indexes)
            self._send(sock, Payload(num_bytes=total))
            for index in request.indexes:
                send_bytes(sock, kept.chunk(index), STALL_LIMIT_S)

    def _send_log(self, sock: socket.socket, request: FetchLog) -> None:
        data = self.shelf.log_bytes(request.member_id, request.step, request.lineage)
        self._send(sock, Payload(num_bytes=len(data)))
        send_bytes(sock, memoryview(data), STALL_LIMIT_S)

    def _receive_snapshot(self, sock: socket.socket, facts: SnapshotFacts) -> None:
        check_layout(facts, facts.num_bytes)
        if len(facts.crc32s) != len(facts.chunks):
            msg = f"step {facts.step} of {facts.member_id} came without checksums; seal it"
            raise CheckpointError(msg)
        buffer = self.shelf.take_guest_buffer(facts)
        is_whole = False
        try:
            self._send(sock, Accepted())
            damaged = _receive_chunks(sock, facts, buffer)
            is_whole = not damaged
        finally:
            if not is_whole:  # never served; the next try may have the memory
                self.shelf.give_back(facts.member_id, buffer)
        if damaged:
            names = ", ".join(damaged[:5])
            msg = f"{len(damaged)} chunks arrived damaged ({names}); send them again"
            raise CheckpointError(msg)
        self.shelf.add(Kept(facts=facts, buffer=buffer))
        self._send(sock, Stored())

    def _receive_log(self, sock: socket.socket, request: OfferLog) -> None:
        entry = request.entry
        if entry.num_bytes > min(self.shelf.free_bytes, _LARGEST_LOG_STEP_BYTES):
            msg = (
                f"step {entry.step} of the log of {entry.member_id} has {entry.num_bytes} "
                f"bytes, {self.shelf.free_bytes} are free; take a snapshot, or raise the "
                "agent's memory limit"
            )
            raise CheckpointError(msg)
        self._send(sock, Accepted())
        data = bytearray(entry.num_bytes)
        receive_into(sock, memoryview(data), STALL_LIMIT_S)
        if zlib.crc32(data) != entry.crc32:
            msg = f"step {entry.step} of the log arrived damaged; send it again"
            raise CheckpointError(msg)
        if not self.shelf.add_log(entry, bytes(data)):
            msg = (
                f"step {entry.step} of the log of {entry.member_id} follows from nothing "
                "that is held here; send a snapshot first"
            )
            raise CheckpointError(msg)
        self._send(sock, Stored())


def _receive_chunks(
    sock: socket.socket, facts: SnapshotFacts, buffer: SharedBuffer
) -> list[str]:
    """Fill a buffer; returns the names of chunks that are not what was sealed."""
    damaged = []
    for chunk, crc32 in zip(facts.chunks, facts.crc32s, strict=True):
        target = buffer.view[chunk.offset : chunk.offset + chunk.num_bytes]
        receive_into(sock, target, STALL_LIMIT_S)
        if zlib.crc32(target) != crc32:
            damaged.append(str(chunk.range))
    return damaged
