"""What a coordinator and the link agents say to each other.

Every message is a length (4 bytes, big-endian) and JSON of that length. A connection
begins with a handshake in which both sides prove, by HMAC over fresh nonces, that they
know the token; the token itself is never sent. Nothing before that proof is decoded as
anything but a handshake, and nothing is ever unpickled.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import secrets
import socket
import struct
import time
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from geartrain.errors import CommunicationError, ConfigError

PROTOCOL_VERSION = 1
HANDSHAKE_LIMIT_BYTES = 1024
MESSAGE_LIMIT_BYTES = 1 << 20
_LENGTH = struct.Struct(">I")
_MAX_PORT = 65535

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentAddress:
    """Where an agent listens."""

    host: str
    """A numeric address or a name; IPv6 may carry a scope, ``fe80::1%eth0``."""
    port: int

    def __post_init__(self) -> None:
        if not self.host or not 0 < self.port <= _MAX_PORT:
            msg = (
                f"agent address {self.host!r} port {self.port}: expected a host and a port "
                f"in 1..{_MAX_PORT}, such as 10.0.0.5:7777 or [fd00::5]:7777"
            )
            raise ConfigError(msg)

    def __str__(self) -> str:
        return (
            f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"
        )

    @classmethod
    def parse(cls, text: str) -> AgentAddress:
        """Read ``HOST:PORT`` or ``[IPV6]:PORT``.

        Raises:
            ConfigError: If it is neither.

        >>> AgentAddress.parse("[fe80::1%eth0]:7777")
        AgentAddress(host='fe80::1%eth0', port=7777)
        """
        host, _, port = text.strip().rpartition(":")
        bracketed = host.startswith("[") and host.endswith("]")
        if not port.isdecimal() or (":" in host and not bracketed):
            msg = (
                f"{text!r} is not an agent's address; write HOST:PORT, or [ADDRESS]:PORT "
                "for IPv6"
            )
            raise ConfigError(msg)
        return cls(host=host[1:-1] if bracketed else host, port=int(port))


class Hello(msgspec.Struct, frozen=True):
    """The agent's first words."""

    nonce: str
    version: int = PROTOCOL_VERSION


class Introduction(msgspec.Struct, frozen=True):
    """The caller's answer: what it wants, and proof that it may."""

    nonce: str
    proof: str
    flow_id: str = ""
    """Of the flow that this connection carries; empty for a coordinator."""


class Welcome(msgspec.Struct, frozen=True):
    """The agent's proof that it knows the token too."""

    proof: str


class Describe(msgspec.Struct, frozen=True, tag=True):
    """Asks which host this is."""


class ReadClock(msgspec.Struct, frozen=True, tag=True):
    """Asks for the agent's clock, Unix time."""


class MeasureMemory(msgspec.Struct, frozen=True, tag=True):
    """Asks how fast two processes of the host could copy through shared memory."""

    num_bytes: int


class SendOrder(msgspec.Struct, frozen=True):
    """One flow, as its sender is told."""

    flow_id: str
    target_host: str
    target_port: int
    max_bytes: int
    duration_s: float


class OpenFlows(msgspec.Struct, frozen=True, tag=True):
    """Asks to connect the flows that start here and to await those that end here."""

    sends: tuple[SendOrder, ...]
    receives: tuple[str, ...]
    """Flow ids."""
    timeout_s: float


class RunFlows(msgspec.Struct, frozen=True, tag=True):
    """Asks to run the flows that were opened."""

    start_at_s: float
    """By the agent's own clock."""
    timeout_s: float


Request = Describe | ReadClock | MeasureMemory | OpenFlows | RunFlows


class Description(msgspec.Struct, frozen=True, tag=True):
    """Which host an agent is on."""

    host_id: str
    name: str
    boot_id: str
    network_namespace: str
    address: str
    interface: str
    device_ids: tuple[str, ...] = ()
    labels: dict[str, str] = {}
    notes: tuple[str, ...] = ()


class Clock(msgspec.Struct, frozen=True, tag=True):
    """The agent's clock."""

    at_s: float


class MemoryRate(msgspec.Struct, frozen=True, tag=True):
    """A copy rate through shared memory."""

    bytes_per_s: float


class FlowFailure(msgspec.Struct, frozen=True):
    """A flow that did not come about, or broke."""

    flow_id: str
    reason: str


class FlowsOpened(msgspec.Struct, frozen=True, tag=True):
    """Which flows stand, and the one-way latency of those that start here."""

    latencies_s: dict[str, float]
    failures: tuple[FlowFailure, ...] = ()


class FlowsDone(msgspec.Struct, frozen=True, tag=True):
    """What was sent, and when what was received arrived."""

    sent_bytes: dict[str, int]
    arrivals: dict[str, tuple[tuple[float, int], ...]]
    """Of the flows that end here: (Unix time by the agent's clock, bytes so far)."""
    started_at_s: dict[str, float] = {}
    """When the flows that start here did."""
    acknowledged: dict[str, tuple[tuple[float, int], ...]] = {}
    """Of the flows that start here, likewise; empty where the system does not tell."""
    failures: tuple[FlowFailure, ...] = ()


class Refused(msgspec.Struct, frozen=True, tag=True):
    """Why a request was not carried out."""

    reason: str


Reply = Description | Clock | MemoryRate | FlowsOpened | FlowsDone | Refused


def send_message(sock: socket.socket, message: object) -> None:
    """Send one message, within the socket's timeout."""
    data = msgspec.json.encode(message)
    sock.sendall(_LENGTH.pack(len(data)) + data)


def receive_request(sock: socket.socket, timeout_s: float) -> Request:
    """Receive a coordinator's request; see :func:`receive_message`."""
    request: Request = _receive(sock, Request, MESSAGE_LIMIT_BYTES, timeout_s)
    return request


def receive_reply(sock: socket.socket, timeout_s: float) -> Reply:
    """Receive an agent's reply; see :func:`receive_message`."""
    reply: Reply = _receive(sock, Reply, MESSAGE_LIMIT_BYTES, timeout_s)
    return reply


def receive_message(
    sock: socket.socket, kind: type[T], limit_bytes: int, timeout_s: float
) -> T:
    """Receive one message.

    Args:
        sock: A connected socket.
        kind: The type expected.
        limit_bytes: A longer message is refused unread.
        timeout_s: For the whole message, however slowly it drips in.

    Raises:
        CommunicationError: If the other side ended, was late, or sent something else.
    """
    message: T = _receive(sock, kind, limit_bytes, timeout_s)
    return message


def _receive(
    sock: socket.socket,
    kind: Any,  # Any: a union of types is not itself a type
    limit_bytes: int,
    timeout_s: float,
) -> Any:  # Any: a message of that kind
    deadline_s = time.monotonic() + timeout_s
    (length,) = _LENGTH.unpack(_receive_exactly(sock, _LENGTH.size, deadline_s))
    if length > limit_bytes:
        msg = (
            f"a message of {length} bytes, more than {limit_bytes}; not a geartrain agent?"
        )
        raise CommunicationError(msg)
    data = _receive_exactly(sock, length, deadline_s)
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, ConfigError) as error:
        msg = (
            f"a message that is not understood ({error}); use the same geartrain everywhere"
        )
        raise CommunicationError(msg) from error


def _receive_exactly(sock: socket.socket, count: int, deadline_s: float) -> bytes:
    data = bytearray()
    while len(data) < count:
        left_s = deadline_s - time.monotonic()
        if left_s <= 0:
            msg = "no answer in time"
            raise CommunicationError(msg)
        sock.settimeout(left_s)
        try:
            part = sock.recv(count - len(data))
        except OSError as error:
            reason = "no answer in time" if isinstance(error, TimeoutError) else str(error)
            raise CommunicationError(reason) from error
        if not part:
            msg = "the connection was closed by the other side"
            raise CommunicationError(msg)
        data += part
    return bytes(data)


def greet(sock: socket.socket, token: str, timeout_s: float) -> str:
    """Carry out the agent's side of the handshake.

    Returns:
        The flow id that the caller named, empty for a coordinator.

    Raises:
        CommunicationError: If the caller does not prove that it knows the token.
    """
    hello = Hello(nonce=secrets.token_hex(16))
    sock.settimeout(timeout_s)
    send_message(sock, hello)
    caller = receive_message(sock, Introduction, HANDSHAKE_LIMIT_BYTES, timeout_s)
    expected = _prove(token, "caller", hello.nonce, caller.nonce, caller.flow_id)
    if not hmac.compare_digest(expected.encode(), caller.proof.encode()):
        msg = "a caller without the right token was turned away"
        raise CommunicationError(msg)
    proof = _prove(token, "agent", hello.nonce, caller.nonce, caller.flow_id)
    sock.settimeout(timeout_s)
    send_message(sock, Welcome(proof=proof))
    return caller.flow_id


def introduce(sock: socket.socket, token: str, timeout_s: float, flow_id: str = "") -> None:
    """Carry out the caller's side of the handshake.

    Raises:
        CommunicationError: If the token differs, or the other side is no agent.
    """
    hello = receive_message(sock, Hello, HANDSHAKE_LIMIT_BYTES, timeout_s)
    if hello.version != PROTOCOL_VERSION:
        msg = (
            f"an agent of protocol {hello.version}, not {PROTOCOL_VERSION}; update one side"
        )
        raise CommunicationError(msg)
    nonce = secrets.token_hex(16)
    proof = _prove(token, "caller", hello.nonce, nonce, flow_id)
    sock.settimeout(timeout_s)
    send_message(sock, Introduction(nonce=nonce, proof=proof, flow_id=flow_id))
    try:
        welcome = receive_message(sock, Welcome, HANDSHAKE_LIMIT_BYTES, timeout_s)
    except CommunicationError as error:
        msg = (
            f"the agent refused the token ({error}); give both sides the same token"
            if token
            else f"the agent asks for a token ({error}); give its --token-file"
        )
        raise CommunicationError(msg) from error
    expected = _prove(token, "agent", hello.nonce, nonce, flow_id)
    if not hmac.compare_digest(expected.encode(), welcome.proof.encode()):
        msg = "what answered does not know the token; check the address"
        raise CommunicationError(msg)


def _prove(token: str, role: str, *parts: str) -> str:
    text = "\n".join((role, *parts))
    return hmac.new(token.encode(), text.encode(), hashlib.sha256).hexdigest()


def is_loopback(address: str) -> bool:
    """Whether only this host can reach the address.

    >>> is_loopback("127.0.0.1"), is_loopback("::1"), is_loopback("0.0.0.0")
    (True, True, False)
    """
    if address == "localhost":
        return True
    try:
        return ipaddress.ip_address(address.partition("%")[0]).is_loopback
    except ValueError:
        return False
