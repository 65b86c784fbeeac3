"""One connection between two members, never blocking."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass, field

from geartrain.collectives.faults.frames import Frame, pack, unpack
from geartrain.collectives.faults.silence import Silence
from geartrain.errors import CommunicationError

_READ_BYTES = 1 << 16
# A peer that reads nothing gets no more heartbeats than this; it is silent anyway.
_MOST_QUEUED_BYTES = 1 << 16


@dataclass(slots=True, eq=False)
class Link:
    """A connection and what waits to go out or to be read whole."""

    connection: socket.socket
    member: int | None = None
    """None until whoever connected has proved who it is."""
    nonce: bytes = b""
    opened_at_s: float = 0.0
    silence: Silence = field(default_factory=Silence)
    _incoming: bytearray = field(default_factory=bytearray)
    _outgoing: bytearray = field(default_factory=bytearray)

    def __post_init__(self) -> None:
        self.connection.setblocking(False)
        self.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, frame: Frame, *, must_go: bool = False) -> None:
        """Queue a frame and send what the connection takes; heartbeats may be dropped.

        Raises:
            OSError: If the connection is broken.
        """
        if must_go or len(self._outgoing) < _MOST_QUEUED_BYTES:
            self._outgoing += pack(frame)
        self.flush()

    def send_bytes(self, data: bytes) -> None:
        """Queue bytes that are no frame."""
        self._outgoing += data
        self.flush()

    def flush(self) -> None:
        """Send what the connection takes.

        Raises:
            OSError: If the connection is broken.
        """
        while self._outgoing:
            try:
                sent = self.connection.send(self._outgoing)
            except BlockingIOError:
                return
            del self._outgoing[:sent]

    @property
    def has_more(self) -> bool:
        """Whether something waits to go out."""
        return bool(self._outgoing)

    def receive(self) -> tuple[Sequence[Frame], bool]:
        """Whole frames that have come, and whether the peer has closed.

        Raises:
            CommunicationError: If what came is none of ours.
        """
        closed = False
        while True:
            try:
                data = self.connection.recv(_READ_BYTES)
            except BlockingIOError:
                break
            except OSError:
                data = b""
            if not data:
                closed = True
                break
            self._incoming += data
            if len(data) < _READ_BYTES:
                break
        try:
            return unpack(self._incoming), closed
        except CommunicationError:
            self._incoming.clear()
            raise

    def close(self) -> None:
        """Close it; what was queued and not sent is lost."""
        self.connection.close()
