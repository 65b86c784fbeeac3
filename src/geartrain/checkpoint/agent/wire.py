"""Messages and bytes through a socket, each within a deadline."""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import msgspec

from geartrain.checkpoint.agent.messages import FRAME_LIMIT_BYTES
from geartrain.errors import CommunicationError, GeartrainError

_LENGTH = struct.Struct(">I")
_CREDENTIALS = struct.Struct("@iII")  # struct ucred: pid, uid, gid
_LARGEST_PIECE_BYTES = 1 << 20
_ANSWER_S = 30.0

T = TypeVar("T")


class Deadline:
    """A point in time that several calls share, each of them moving it or not."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._at_s = time.monotonic() + limit_s

    def left_s(self) -> float:
        """Seconds left.

        Raises:
            TimeoutError: If none are.
        """
        left_s = self._at_s - time.monotonic()
        if left_s <= 0:
            msg = f"nothing moved for {self._limit_s:g} s"
            raise TimeoutError(msg)
        return left_s

    def extend(self) -> None:
        """Begin anew: something has moved."""
        self._at_s = time.monotonic() + self._limit_s


@contextmanager
def speaking_with(whom: str) -> Iterator[None]:
    """Turn a socket's failure into an error that says who was at the other end.

    Raises:
        CommunicationError: On any OSError inside.
    """
    try:
        yield
    except OSError as error:
        reason = str(error).strip() or type(error).__name__
        msg = f"speaking with {whom} failed: {reason}; see whether it still runs"
        raise CommunicationError(msg) from error


def send_message(sock: socket.socket, message: msgspec.Struct, limit_s: float) -> None:
    """Send a message.

    Raises:
        OSError: If it does not go in time.
        CommunicationError: If it is too long.
    """
    body = msgspec.json.encode(message)
    if len(body) > FRAME_LIMIT_BYTES:
        msg = (
            f"a message of {len(body)} bytes, more than {FRAME_LIMIT_BYTES}; divide the "
            "state among more members or into fewer tensors"
        )
        raise CommunicationError(msg)
    send_bytes(sock, memoryview(_LENGTH.pack(len(body)) + body), limit_s)


def send_bytes(sock: socket.socket, data: memoryview, limit_s: float) -> None:
    """Send bytes; the limit is for each megabyte, so that slow is not dead.

    Raises:
        OSError: If nothing goes for that long.
    """
    deadline = Deadline(limit_s)
    while data:
        sock.settimeout(deadline.left_s())
        sent = sock.send(data[:_LARGEST_PIECE_BYTES])
        data = data[sent:]
        deadline.extend()


def receive_into(sock: socket.socket, target: memoryview, limit_s: float) -> None:
    """Fill a buffer; the limit is for each piece that arrives.

    Raises:
        OSError: If nothing comes for that long, or the other side ends.
    """
    deadline = Deadline(limit_s)
    while target:
        sock.settimeout(deadline.left_s())
        count = sock.recv_into(target[:_LARGEST_PIECE_BYTES])
        if not count:
            msg = "the connection was closed by the other side"
            raise ConnectionError(msg)
        target = target[count:]
        deadline.extend()


def receive_message(
    sock: socket.socket,
    kind: Any,  # Any: a union of types is not itself a type
    limit_s: float,
    is_wanted: Callable[[], bool] | None = None,
) -> Any:  # Any: a message of that kind
    """Receive a message.

    Args:
        sock: Where from.
        kind: A message type, or a union of them.
        limit_s: For the first byte, then for each further piece.
        is_wanted: Where given, waits for the first byte as long as this says yes.

    Raises:
        OSError: If nothing comes in time, or the other side ends.
        CommunicationError: If it is none of ours.
    """
    head = bytearray(_LENGTH.size)
    if is_wanted is not None:
        _await_first(sock, is_wanted)
    receive_into(sock, memoryview(head), limit_s)
    return _receive_body(sock, bytes(head), kind, limit_s)


def receive_with_descriptors(
    sock: socket.socket,
    kind: Any,  # Any: a union of types is not itself a type
    num_descriptors: int,
) -> tuple[Any, list[int]]:  # Any: a message of that kind
    """Receive a message in front of which descriptors come, if the answer is a yes."""
    sock.settimeout(_ANSWER_S)
    head, descriptors, _, _ = socket.recv_fds(sock, _LENGTH.size, num_descriptors)
    try:
        rest = bytearray(_LENGTH.size - len(head))
        receive_into(sock, memoryview(rest), _ANSWER_S)
        return _receive_body(sock, head + rest, kind, _ANSWER_S), descriptors
    except (OSError, GeartrainError):
        for descriptor in descriptors:
            os.close(descriptor)
        raise


def send_with_descriptors(
    sock: socket.socket, message: msgspec.Struct, descriptors: list[int], limit_s: float
) -> None:
    """Send a message with descriptors in front."""
    body = msgspec.json.encode(message)
    sock.settimeout(limit_s)
    socket.send_fds(sock, [_LENGTH.pack(len(body))], descriptors)
    send_bytes(sock, memoryview(body), limit_s)


def is_same_user(peer: socket.socket) -> bool:
    """Abstract sockets have no permissions; the kernel says who is at the other end."""
    raw = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return bool(_CREDENTIALS.unpack(raw)[1] == os.geteuid())


def _await_first(sock: socket.socket, is_wanted: Callable[[], bool]) -> None:
    while is_wanted():
        sock.settimeout(0.5)
        try:
            sock.recv(1, socket.MSG_PEEK)
        except TimeoutError:
            continue
        return
    msg = "the agent ends"
    raise ConnectionError(msg)


def _receive_body(
    sock: socket.socket,
    head: bytes,
    kind: Any,  # Any: a union of types is not itself a type
    limit_s: float,
) -> Any:  # Any: a message of that kind
    (length,) = _LENGTH.unpack(head)
    if length > FRAME_LIMIT_BYTES:
        msg = f"a message of {length} bytes, at most {FRAME_LIMIT_BYTES} are allowed"
        raise CommunicationError(msg)
    body = bytearray()
    while len(body) < length:  # grows with what arrives, not with what was promised
        piece = bytearray(min(_LARGEST_PIECE_BYTES, length - len(body)))
        receive_into(sock, memoryview(piece), limit_s)
        body += piece
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, GeartrainError) as error:
        msg = f"a message that is none of ours: {error}; use the same geartrain everywhere"
        raise CommunicationError(msg) from error
