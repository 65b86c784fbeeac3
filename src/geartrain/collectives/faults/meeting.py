"""How the members of an epoch find each other's heartbeats."""

from __future__ import annotations

import secrets
import socket
import time
from typing import TYPE_CHECKING

from geartrain.collectives.exchange.membership import Membership
from geartrain.collectives.exchange.polling_store import PollingStore
from geartrain.collectives.faults.frames import NONCE_BYTES, Hello, authenticate, pack
from geartrain.collectives.faults.pulse import Pulse, neighbours
from geartrain.errors import CommunicationError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_SECRET_BYTES = 32
_BACKLOG = 64


class NotMetError(CommunicationError):
    """Members that did not come, or can't be reached."""

    def __init__(self, message: str, members: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.members = members
        """Their positions."""


def agree_on_secret(store: Store, epoch: int) -> bytes:
    """What members prove their membership with; the first one draws it."""
    drawn = secrets.token_hex(_SECRET_BYTES)
    return bytes(store.compare_set(f"epoch/{epoch}/secret", "", drawn))


def listen(address: str) -> socket.socket:
    """Listen on one of this host's addresses, on a free port.

    Raises:
        CommunicationError: If the host has no such address.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    server = socket.socket(family, socket.SOCK_STREAM)
    try:
        server.bind((address, 0))
        server.listen(_BACKLOG)
    except OSError as error:
        server.close()
        msg = f"can't listen on {address} ({error}); is it an address of this host?"
        raise CommunicationError(msg) from error
    return server


def meet(
    pulse: Pulse, membership: Membership, store: PollingStore, secret: bytes, limit_s: float
) -> None:
    """Connect with all neighbours; the one with the larger position connects.

    Args:
        pulse: Started; its address is in the store under ``pulse/<position>``.
        membership: Of the epoch.
        store: Under the epoch's prefix.
        secret: The epoch's.
        limit_s: Deadline.

    Raises:
        CommunicationError: If one is missing after the deadline, is dead, or the epoch
            ended meanwhile; names whom it waited for.
    """
    deadline_at_s = time.monotonic() + limit_s
    known = neighbours(membership.num_members, membership.me)
    for member in sorted(known):
        if member < membership.me:
            left_s = max(deadline_at_s - time.monotonic(), 0.001)
            connection = _connect(membership, store, member, secret, left_s)
            pulse.adopt(connection, member)
    missing = pulse.wait_until_connected(
        known, max(deadline_at_s - time.monotonic(), 0.001)
    )
    if missing:
        absent = tuple(sorted(missing))
        msg = (
            f"epoch {membership.epoch}: {membership.names(absent)} did not come within "
            f"{limit_s:g} s; look at the log there"
        )
        raise NotMetError(msg, absent)


def _connect(
    membership: Membership, store: PollingStore, member: int, secret: bytes, limit_s: float
) -> socket.socket:
    name = membership.names((member,))
    try:
        store.wait_at_most([f"pulse/{member}"], limit_s)
    except CommunicationError as error:
        msg = f"epoch {membership.epoch}: {name} did not come ({error}); look at its log"
        raise NotMetError(msg, (member,)) from error
    port, host = store.get(f"pulse/{member}").decode().split(" ")
    try:
        connection = socket.create_connection((host, int(port)), limit_s)
    except OSError as error:
        msg = (
            f"epoch {membership.epoch}: {name} at {host} port {port} can't be reached "
            f"({error}); does it still run, and does a firewall stand between?"
        )
        raise NotMetError(msg, (member,)) from error
    try:
        nonce = _receive_exactly(connection, NONCE_BYTES)
        hello = Hello(membership.me, authenticate(secret, nonce, membership.me))
        connection.sendall(pack(hello))
    except OSError as error:
        connection.close()
        msg = f"epoch {membership.epoch}: {name} was lost while connecting ({error})"
        raise NotMetError(msg, (member,)) from error
    return connection


def _receive_exactly(connection: socket.socket, num_bytes: int) -> bytes:
    data = b""
    while len(data) < num_bytes:
        part = connection.recv(num_bytes - len(data))
        if not part:
            msg = "it closed the connection"
            raise ConnectionResetError(msg)
        data += part
    return data
