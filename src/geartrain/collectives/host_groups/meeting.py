"""How the processes of a host find each other before they share memory."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from geartrain.collectives.host_groups.shared_words import CHECK_EVERY_S
from geartrain.errors import CommunicationError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

T = TypeVar("T")

_FIRST_PAUSE_S = 0.0005
_CREDENTIALS = struct.Struct("@iII")
"""struct ucred: pid, uid, gid."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Meeting:
    """Where and with whom a segment is set up."""

    store: Store
    """Reached by the processes of this host; the keys are used once."""
    names: Sequence[str]
    """What to call the processes in an error; the leader first."""
    index: int
    """This process's place among them."""
    setup_timeout_s: float = 30.0
    timeout_s: float = 300.0
    """Outer limit of each later wait."""
    spin_s: float = 0.0
    ended: threading.Event | None = None
    """When set, setting up gives up at once; a later wait is ended by ``abort``."""


@contextlib.contextmanager
def listening(token: str, backlog: int) -> Iterator[socket.socket]:
    """A socket that only processes of this network namespace reach."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(address_of(token))
        listener.listen(backlog)
        yield listener


def address_of(token: str) -> str:
    """Address of the socket with that token."""
    return f"\0geartrain-{token}"  # the leading zero byte makes it abstract: unix(7)


def is_same_user(peer: socket.socket) -> bool:
    """Abstract sockets have no permissions; the kernel says who is at the other end."""
    raw = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, user_id, _ = _CREDENTIALS.unpack(raw)
    return bool(user_id == os.geteuid())


def accept(listener: socket.socket) -> socket.socket:
    """The next connection."""
    return listener.accept()[0]


class Patience:
    """How long setting up may take, and whether it is still wanted."""

    def __init__(self, meeting: Meeting) -> None:
        self._limit_s = meeting.setup_timeout_s
        self._deadline_at_s = time.monotonic() + meeting.setup_timeout_s
        self._ended = meeting.ended or threading.Event()

    def check(self) -> None:
        """Raise once there is no point in waiting on.

        Raises:
            OSError: After the deadline, or when the epoch ended.
        """
        if self._ended.is_set():
            msg = "the epoch ended meanwhile"
            raise ConnectionError(msg)
        if time.monotonic() > self._deadline_at_s:
            msg = f"nothing came within {self._limit_s:g} s"
            raise TimeoutError(msg)

    def until(self, waiting: socket.socket, receive: Callable[[socket.socket], T]) -> T:
        """Receive something, however often it takes.

        Raises:
            OSError: After the deadline, or when the epoch or the connection ended.
        """
        waiting.settimeout(CHECK_EVERY_S)
        while True:
            try:
                return receive(waiting)
            except TimeoutError:
                self.check()

    def until_set(self, store: Store, key: str) -> None:
        """Wait for a key with short questions, so that others can use the same client.

        Raises:
            OSError: After the deadline, or when the epoch ended.
        """
        pause_s = _FIRST_PAUSE_S
        while not store.check([key]):
            self.check()
            self._ended.wait(pause_s)
            pause_s = min(2 * pause_s, CHECK_EVERY_S)


@contextlib.contextmanager
def explained(doing: str) -> Iterator[None]:
    """Turn a failure of a socket into an error that says what was being done.

    Raises:
        CommunicationError: On any OSError inside.
    """
    try:
        yield
    except OSError as error:
        reason = str(error).strip() or type(error).__name__
        msg = f"{doing} failed: {reason}; look at that worker's log"
        raise CommunicationError(msg) from error
