"""One connection at the coordinator: greets, reads messages, never waits for its peer."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import Protocol

from geartrain.elastic.greeting import (
    LONGEST_GREETING_BYTES,
    Accepted,
    Challenge,
    Credentials,
    Hello,
    Refused,
    challenge,
    decode_greeting,
    encode_greeting,
    judge,
)
from geartrain.elastic.lines import LineBuffer
from geartrain.elastic.messages import (
    LINE_LIMIT_BYTES,
    CoordinatorMessage,
    MemberMessage,
    OperatorMessage,
    decode_to_coordinator,
    encode,
)
from geartrain.errors import CommunicationError

logger = logging.getLogger(__name__)

# A few of the longest messages. A peer that is so far behind reads nothing any more.
MOST_UNSENT_BYTES = 2 * LINE_LIMIT_BYTES
_LINGER_S = 1.0


class Reception(Protocol):
    """Where callers arrive; called from the event loop."""

    credentials: Credentials

    def arrived(self, caller: Caller) -> None:
        """Somebody has connected, and may be anybody."""

    def admitted(self, caller: Caller) -> None:
        """It has proved that it belongs to the run."""

    def received(self, caller: Caller, message: MemberMessage | OperatorMessage) -> None:
        """An admitted one says something."""

    def gone(self, caller: Caller, reason: str) -> None:
        """It is gone, or is none of ours; comes once."""


class Caller(asyncio.Protocol):
    """One connection.

    Callbacks instead of a task with streams: nothing is scheduled between a byte's arrival
    and the decision, and what a peer can make us keep is bounded in both directions.

    Args:
        number: Of the connection.
        reception: Told of everything.
    """

    def __init__(self, number: int, reception: Reception) -> None:
        self.number = number
        self._reception = reception
        self._lines = LineBuffer(LONGEST_GREETING_BYTES)
        self._transport: asyncio.Transport | None = None
        self._challenge: Challenge = challenge()
        self._is_admitted = False
        self._is_gone = False

    # -- from the event loop ------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Ask who it is."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        transport.set_write_buffer_limits(high=MOST_UNSENT_BYTES)
        self._reception.arrived(self)
        if not self._is_gone:
            transport.write(encode_greeting(self._challenge))

    def data_received(self, data: bytes) -> None:
        """Take what is whole."""
        try:
            for line in self._lines.feed(data):
                if self._is_gone:
                    break
                self._take(line)
        except CommunicationError as error:
            self._reject(str(error))

    def connection_lost(self, exc: Exception | None) -> None:
        """It has closed, or its host has."""
        self._leave(f"its connection broke ({exc})" if exc else "it closed the connection")

    def pause_writing(self) -> None:
        """It does not read what it is sent."""
        self._leave(f"it left {MOST_UNSENT_BYTES} bytes unread")
        self.abort()

    # -- from the reception -------------------------------------------------------------

    def send(self, message: CoordinatorMessage) -> None:
        """Queue a message; who leaves too many unread is dropped instead."""
        if self._transport is None or self._is_gone:
            return
        try:
            self._transport.write(encode(message))
        except CommunicationError as error:  # too long for whoever it may be
            self._leave(str(error))
            self.abort()

    def close(self) -> None:
        """Close after what was sent; nothing is told of it."""
        self._is_gone = True
        if self._transport is None or self._transport.is_closing():
            return
        self._transport.close()
        # Whoever reads nothing would keep it open for ever.
        asyncio.get_running_loop().call_later(_LINGER_S, self.abort)

    def abort(self) -> None:
        """Close now."""
        if self._transport is not None:
            self._transport.abort()

    @property
    def name(self) -> str:
        """For logs."""
        peer = self._transport.get_extra_info("peername") if self._transport else None
        return f"connection {self.number} from {peer[0] if peer else 'unknown'}"

    def _take(self, line: bytes) -> None:
        if self._is_admitted:
            self._reception.received(self, decode_to_coordinator(line))
            return
        hello = decode_greeting(line)
        if not isinstance(hello, Hello):
            msg = f"a worker greets with hello, not {type(hello).__name__}"
            raise CommunicationError(msg)
        verdict = judge(self._challenge, hello, self._reception.credentials)
        assert self._transport is not None
        self._transport.write(encode_greeting(verdict))
        if isinstance(verdict, Accepted):
            self._is_admitted = True
            self._lines.longest_bytes = LINE_LIMIT_BYTES
            self._reception.admitted(self)
        else:
            logger.warning("%s refused: %s", self.name, verdict.reason)
            self._leave(verdict.reason)
            self.close()

    def _reject(self, reason: str) -> None:
        logger.warning("%s dropped: %s", self.name, reason)
        if not self._is_admitted and self._transport is not None:
            with contextlib.suppress(RuntimeError):
                self._transport.write(encode_greeting(Refused(reason=reason)))
        self._leave(reason)
        self.close()

    def _leave(self, reason: str) -> None:
        if not self._is_gone:
            self._is_gone = True
            self._reception.gone(self, reason)
