"""How a state travels from the process that gives it to the one that joins.

Both prove first that they know the run's token. Then blocks come, each with its length (8
bytes, big-endian) in front: a state, and the steps after it, in the layout of safetensors.
"""

from __future__ import annotations

import socket
import struct
from typing import TYPE_CHECKING

import torch

from geartrain.checkpoint.agent.wire import receive_into, send_bytes
from geartrain.elastic.greeting import (
    LONGEST_GREETING_BYTES,
    Accepted,
    Challenge,
    Credentials,
    Greeting,
    Hello,
    Refused,
    answer,
    challenge,
    decode_greeting,
    encode_greeting,
    is_genuine,
    judge,
)
from geartrain.errors import CommunicationError

if TYPE_CHECKING:
    from collections.abc import Callable

_LENGTH = struct.Struct(">Q")
_GREETING_S = 10.0
_STALLED_S = 60.0
"""A megabyte that takes longer does not come any more."""
_CONNECT_S = 10.0
_PIECE_BYTES = 64 << 20


def greet_receiver(connected: socket.socket, own: Credentials) -> None:
    """On the giver: find out whether the other side belongs to the run, and prove it too.

    Raises:
        CommunicationError: If it does not.
        OSError: If it is gone.
    """
    _send_at_once(connected)
    asked = challenge()
    _say(connected, asked)
    hello = _hear(connected)
    if not isinstance(hello, Hello):
        msg = f"expected a hello, got {type(hello).__name__}; is it a geartrain?"
        raise CommunicationError(msg)
    verdict = judge(asked, hello, own)
    _say(connected, verdict)
    if isinstance(verdict, Refused):
        raise CommunicationError(verdict.reason)


def connect_giver(address: str, own: Credentials) -> socket.socket:
    """On the receiver: connect, and see that the giver belongs to the run.

    Args:
        address: HOST:PORT.
        own: Of the run.

    Raises:
        CommunicationError: If it can't be reached, or is somebody else.
    """
    host, _, port = address.rpartition(":")
    try:
        connected = socket.create_connection((host, int(port)), timeout=_CONNECT_S)
    except (OSError, ValueError) as error:
        msg = f"the giver of the state at {address!r} can't be reached ({error})"
        raise CommunicationError(msg) from error
    try:
        _greet_giver(connected, own)
    except OSError as error:
        connected.close()
        msg = f"the giver of the state at {address!r} is gone ({error})"
        raise CommunicationError(msg) from error
    except BaseException:
        connected.close()
        raise
    return connected


def send_tree(connected: socket.socket, block: torch.Tensor) -> None:
    """Send a block.

    Args:
        connected: To the receiver.
        block: uint8 on the host, shape (num_bytes,).

    Raises:
        OSError: If it does not go.
    """
    data = block.numpy().data
    send_bytes(connected, memoryview(_LENGTH.pack(len(data))), _STALLED_S)
    send_bytes(connected, data, _STALLED_S)


def receive_tree(connected: socket.socket, is_wanted: Callable[[], bool]) -> torch.Tensor:
    """Receive a block.

    Args:
        connected: To the giver.
        is_wanted: Waits for the first byte as long as this says yes.

    Returns:
        uint8, shape (num_bytes,).

    Raises:
        OSError: If the giver is gone, or it is not wanted any more.
    """
    _await_first(connected, is_wanted)
    head = bytearray(_LENGTH.size)
    receive_into(connected, memoryview(head), _STALLED_S)
    (length,) = _LENGTH.unpack(head)
    body = bytearray()
    while len(body) < length:  # grows with what arrives, not with what was promised
        piece = bytearray(min(_PIECE_BYTES, length - len(body)))
        receive_into(connected, memoryview(piece), _STALLED_S)
        body += piece
    return torch.frombuffer(body, dtype=torch.uint8)


def _greet_giver(connected: socket.socket, own: Credentials) -> None:
    _send_at_once(connected)
    asked = _hear(connected)
    if not isinstance(asked, Challenge):
        msg = f"expected a challenge, got {type(asked).__name__}; is it a geartrain?"
        raise CommunicationError(msg)
    hello = answer(asked, own)
    _say(connected, hello)
    verdict = _hear(connected)
    if isinstance(verdict, Refused):
        msg = f"the giver of the state refused: {verdict.reason}"
        raise CommunicationError(msg)
    if not isinstance(verdict, Accepted) or not is_genuine(asked, hello, verdict, own):
        msg = "the giver of the state does not know this run's token; it is somebody else"
        raise CommunicationError(msg)


def _send_at_once(connected: socket.socket) -> None:
    """Keep nothing back until what went before is acknowledged, up to 40 ms later."""
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _say(connected: socket.socket, greeting: Greeting) -> None:
    send_bytes(connected, memoryview(encode_greeting(greeting)), _GREETING_S)


def _hear(connected: socket.socket) -> Greeting:
    line = bytearray()
    byte = bytearray(1)
    while not line.endswith(b"\n"):
        if len(line) >= LONGEST_GREETING_BYTES:
            msg = f"a greeting of more than {LONGEST_GREETING_BYTES} bytes; who is it?"
            raise CommunicationError(msg)
        receive_into(connected, memoryview(byte), _GREETING_S)
        line += byte
    return decode_greeting(bytes(line[:-1]))


def _await_first(connected: socket.socket, is_wanted: Callable[[], bool]) -> None:
    while is_wanted():
        connected.settimeout(0.2)
        try:
            connected.recv(1, socket.MSG_PEEK)
        except TimeoutError:
            continue
        return
    msg = "it is not wanted any more"
    raise ConnectionError(msg)
