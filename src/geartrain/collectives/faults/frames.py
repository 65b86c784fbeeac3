"""What members tell each other beside the exchange: a length, then a tagged message."""

from __future__ import annotations

import hashlib
import hmac
import struct

import msgspec

from geartrain.errors import CommunicationError

_LENGTH = struct.Struct("!I")
# A heartbeat about 10,000 members stays far below.
_LONGEST_BYTES = 1 << 20
NONCE_BYTES = 16


class Hello(msgspec.Struct, tag="hello", frozen=True):
    """First message of whoever connects; answers the nonce that it was sent."""

    member: int
    mac: bytes


class Count(msgspec.Struct, frozen=True, array_like=True):
    """How far a member is; both only grow."""

    member: int
    entered: int
    """Exchanges that it has begun."""
    moved: int
    """Messages and collectives that it has finished."""


class Beat(msgspec.Struct, tag="beat", frozen=True):
    """Sign of life."""

    counts: tuple[Count, ...]
    """The sender's; in large worlds all that it knows of."""
    entered_ago_s: float = 0.0
    """Since the sender began its latest exchange."""


class Aborted(msgspec.Struct, tag="aborted", frozen=True):
    """The sender has ended the epoch."""

    reason: str
    suspects: tuple[int, ...]
    """Positions."""


class Bye(msgspec.Struct, tag="bye", frozen=True):
    """The sender ends in order; its closed connection is no fault."""


Frame = Hello | Beat | Aborted | Bye

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Frame)


def pack(frame: Frame) -> bytes:
    """The frame as it goes over the wire."""
    body = _encoder.encode(frame)
    return _LENGTH.pack(len(body)) + body


def unpack(received: bytearray) -> list[Frame]:
    """Take all whole frames off the front of what was received.

    Raises:
        CommunicationError: If it is none of ours.
    """
    frames: list[Frame] = []
    while len(received) >= _LENGTH.size:
        (length,) = _LENGTH.unpack_from(received)
        if length > _LONGEST_BYTES:
            msg = f"a frame of {length} bytes, at most {_LONGEST_BYTES} are allowed"
            raise CommunicationError(msg)
        end = _LENGTH.size + length
        if len(received) < end:
            break
        try:
            frames.append(_decoder.decode(received[_LENGTH.size : end]))
        except msgspec.DecodeError as error:
            msg = f"a frame that is none of ours: {error}"
            raise CommunicationError(msg) from error
        del received[:end]
    return frames


def authenticate(secret: bytes, nonce: bytes, member: int) -> bytes:
    """What proves that this member knows the epoch's secret, for this connection."""
    return hmac.digest(secret, nonce + member.to_bytes(8, "big"), hashlib.sha256)


def is_authentic(secret: bytes, nonce: bytes, hello: Hello) -> bool:
    """Whether it does."""
    expected = authenticate(secret, nonce, max(hello.member, 0))
    return hmac.compare_digest(expected, hello.mac)
