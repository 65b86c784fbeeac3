"""How a worker and the coordinator show each other that they belong to one run.

The coordinator asks with a nonce, the worker answers with a proof and a nonce of its own,
the coordinator proves itself in turn. So the token never crosses the wire, and a worker
that reconnects to the port of a coordinator that died does not follow whoever has it now.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from dataclasses import dataclass, field

import msgspec

from geartrain.elastic.messages import PROTOCOL_VERSION
from geartrain.errors import CommunicationError

LONGEST_GREETING_BYTES = 4096
"""A stranger may make the other side keep this much, and no more."""
_NONCE_BYTES = 16


class Challenge(msgspec.Struct, tag="challenge", frozen=True, forbid_unknown_fields=True):
    """The coordinator's first line on every connection."""

    version: int
    nonce: str


class Hello(msgspec.Struct, tag="hello", frozen=True, forbid_unknown_fields=True):
    """The worker's answer."""

    run_id: str
    nonce: str
    proof: str


class Accepted(msgspec.Struct, tag="accepted", frozen=True, forbid_unknown_fields=True):
    """The coordinator knows the token as well; messages may follow."""

    proof: str


class Refused(msgspec.Struct, tag="refused", frozen=True, forbid_unknown_fields=True):
    """The coordinator does not want this worker, and closes."""

    reason: str


Greeting = Challenge | Hello | Accepted | Refused

_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(Greeting)


@dataclass(frozen=True, slots=True, kw_only=True)
class Credentials:
    """What the members of a run have in common."""

    run_id: str
    token: bytes = field(default=b"", repr=False)
    """Empty: whoever reaches the port is trusted; on loopback only."""


def encode_greeting(greeting: Greeting) -> bytes:
    r"""One JSON line.

    >>> encode_greeting(Refused(reason="full"))
    b'{"type":"refused","reason":"full"}\n'
    """
    return _encoder.encode(greeting) + b"\n"


def decode_greeting(line: bytes) -> Greeting:
    """Read one line.

    Raises:
        CommunicationError: If it is no greeting.
    """
    try:
        return _decoder.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        msg = (
            f"expected a greeting, got {line[:40]!r} ({error}); something else than "
            "geartrain is at the other end, so check the coordinator's address"
        )
        raise CommunicationError(msg) from error


def challenge() -> Challenge:
    """What to ask a new connection; each nonce is used once."""
    return Challenge(version=PROTOCOL_VERSION, nonce=secrets.token_hex(_NONCE_BYTES))


def answer(asked: Challenge, own: Credentials) -> Hello:
    """The worker's answer.

    Raises:
        CommunicationError: If the coordinator speaks another version.
    """
    if asked.version != PROTOCOL_VERSION:
        msg = (
            f"the coordinator speaks protocol {asked.version}, this worker "
            f"{PROTOCOL_VERSION}; install the same geartrain on all hosts"
        )
        raise CommunicationError(msg)
    nonce = secrets.token_hex(_NONCE_BYTES)
    proof = _prove(own, "worker", asked.nonce, nonce)
    return Hello(run_id=own.run_id, nonce=nonce, proof=proof)


def judge(asked: Challenge, hello: Hello, own: Credentials) -> Accepted | Refused:
    """The coordinator's verdict on a worker."""
    if hello.run_id != own.run_id:
        reason = (
            f"this is the coordinator of run {own.run_id!r}, not of {hello.run_id!r}; "
            "check the address"
        )
        return Refused(reason=reason)
    expected = _prove(own, "worker", asked.nonce, hello.nonce)
    if not hmac.compare_digest(expected.encode(), hello.proof.encode()):
        return Refused(
            reason="the token is not that of this run; take the run's token file"
        )
    return Accepted(proof=_prove(own, "coordinator", asked.nonce, hello.nonce))


def is_genuine(
    asked: Challenge, hello: Hello, accepted: Accepted, own: Credentials
) -> bool:
    """Whether the coordinator knows the token, too."""
    expected = _prove(own, "coordinator", asked.nonce, hello.nonce)
    return hmac.compare_digest(expected.encode(), accepted.proof.encode())


def _prove(own: Credentials, role: str, asked: str, answered: str) -> str:
    # JSON keeps the parts apart whatever is in them.
    text = msgspec.json.encode((role, own.run_id, asked, answered))
    return hmac.new(own.token, text, hashlib.sha256).hexdigest()
