"""A worker's connection to the coordinator: opened with a deadline, then never blocks."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Sequence

from geartrain.elastic.greeting import (
    LONGEST_GREETING_BYTES,
    Accepted,
    Challenge,
    Credentials,
    Greeting,
    Refused,
    answer,
    decode_greeting,
    encode_greeting,
    is_genuine,
)
from geartrain.elastic.lines import LineBuffer
from geartrain.errors import CommunicationError, ConfigError

Address = tuple[str, int]

_READ_BYTES = 1 << 16
# A coordinator that reads so little is gone, whatever TCP thinks of it.
_MOST_UNSENT_BYTES = 1 << 22
_SHORTEST_WAIT_S = 1e-3  # 0 would mean not to block
# A host that vanished acknowledges nothing; a beat goes out many times within this time.
_UNACKNOWLEDGED_MS = 5000


class Connection:
    """One connection; ``send`` may be called from any thread, the rest from one.

    Args:
        connected: Socket on which both sides have proved who they are.
        longest_bytes: Of a line that the coordinator may send.
    """

    def __init__(self, connected: socket.socket, longest_bytes: int) -> None:
        self._socket = connected
        self._lines = LineBuffer(longest_bytes)
        self._unsent = bytearray()
        self._lock = threading.Lock()
        self._is_closed = False
        connected.setblocking(False)

    def fileno(self) -> int:
        """For a selector."""
        return self._socket.fileno()

    def send(self, data: bytes) -> bool:
        """Send, in order with what other threads send.

        Returns:
            Whether all of it is on its way; if not, call ``flush`` when it can be written.

        Raises:
            OSError: If the connection is broken, or its peer reads nothing.
        """
        with self._lock:
            if self._is_closed:
                msg = "the connection to the coordinator is closed"
                raise ConnectionResetError(msg)
            self._unsent += data
            if len(self._unsent) > _MOST_UNSENT_BYTES:
                with contextlib.suppress(OSError):
                    self._socket.shutdown(socket.SHUT_RDWR)  # whoever reads sees the end
                msg = f"the coordinator left {len(self._unsent)} bytes unread"
                raise ConnectionResetError(msg)
            return self._flush()

    def flush(self) -> bool:
        """Send what the kernel takes; whether that was all.

        Raises:
            OSError: If the connection is broken.
        """
        with self._lock:
            return self._is_closed or self._flush()

    def _flush(self) -> bool:
        while self._unsent:
            try:
                sent = self._socket.send(self._unsent)
            except BlockingIOError:
                return False
            del self._unsent[:sent]
        return True

    def receive(self) -> tuple[Sequence[bytes], bool]:
        """Lines that have come, and whether the coordinator has closed.

        Raises:
            CommunicationError: If what came is too long for a line.
        """
        lines: list[bytes] = []
        while True:
            try:
                data = self._socket.recv(_READ_BYTES)
            except BlockingIOError:
                return lines, False
            except OSError:
                return lines, True
            if not data:
                return lines, True
            lines += self._lines.feed(data)
            if len(data) < _READ_BYTES:
                return lines, False

    def close(self) -> None:
        """Close it; what was not sent is lost."""
        with self._lock:
            self._is_closed = True
            self._socket.close()

    def abandon(self) -> None:
        """Close a forked child's copy; the parent's connection goes on.

        Takes no lock: the thread that may have held it is not in the child.
        """
        with contextlib.suppress(OSError):
            self._socket.close()


def connect(
    address: Address, credentials: Credentials, longest_bytes: int, limit_s: float
) -> Connection:
    """Connect and greet.

    Args:
        address: Host or IP address, and port.
        credentials: Of the run.
        longest_bytes: Of a line that the coordinator may send.
        limit_s: Deadline for all of it.

    Raises:
        CommunicationError: If the coordinator can't be reached in time, or is none.
        ConfigError: If the coordinator refuses this worker.
    """
    deadline_s = time.monotonic() + limit_s
    place = f"{address[0]}:{address[1]}"
    try:
        connected = socket.create_connection(address, limit_s)
    except OSError as error:
        msg = f"the coordinator at {place} can't be reached ({error})"
        raise CommunicationError(msg) from error
    try:
        if connected.getsockname() == connected.getpeername():
            # Loopback, a port without a listener, and the kernel picked that very port
            # as ours: TCP then connects a socket to itself, and blocks the port.
            msg = f"nobody listens at {place}"
            raise CommunicationError(msg)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            connected.setsockopt(
                socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _UNACKNOWLEDGED_MS
            )
        _greet(connected, credentials, place, deadline_s)
    except OSError as error:
        connected.close()
        msg = f"the coordinator at {place} did not greet within {limit_s:g} s ({error})"
        raise CommunicationError(msg) from error
    except BaseException:
        connected.close()
        raise
    return Connection(connected, longest_bytes)


def _greet(
    connected: socket.socket, credentials: Credentials, place: str, deadline_s: float
) -> None:
    asked = _next_greeting(connected, deadline_s)
    if not isinstance(asked, Challenge):
        raise _unexpected(asked, place)
    hello = answer(asked, credentials)
    connected.sendall(encode_greeting(hello))
    verdict = _next_greeting(connected, deadline_s)
    if not isinstance(verdict, Accepted):
        raise _unexpected(verdict, place)
    if not is_genuine(asked, hello, verdict, credentials):
        msg = (
            f"what listens at {place} does not know the token of run "
            f"{credentials.run_id!r}; it is another program, or another run's coordinator"
        )
        raise CommunicationError(msg)


def _unexpected(greeting: Greeting, place: str) -> CommunicationError | ConfigError:
    if isinstance(greeting, Refused):
        return ConfigError(f"the coordinator at {place} refuses: {greeting.reason}")
    return CommunicationError(f"{place} greets with {type(greeting).__name__}, out of turn")


def _next_greeting(connected: socket.socket, deadline_s: float) -> Greeting:
    """Read one line and nothing behind it: that belongs to the messages.

    Byte by byte: it happens twice a connection.
    """
    line = bytearray()
    while len(line) < LONGEST_GREETING_BYTES:
        connected.settimeout(max(deadline_s - time.monotonic(), _SHORTEST_WAIT_S))
        data = connected.recv(1)
        if not data:
            msg = "it closed the connection"
            raise ConnectionResetError(msg)
        if data == b"\n":
            return decode_greeting(bytes(line))
        line += data
    msg = f"a greeting of more than {LONGEST_GREETING_BYTES} bytes"
    raise CommunicationError(msg)
