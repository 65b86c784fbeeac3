"""The sockets of one Gloo device, found without touching anybody else's.

Gloo's ``abort()`` and ``shutdown()`` wake nobody (torch 2.13); shutting its sockets down
does, within milliseconds. Gloo does not tell which those are, but a device listens on a
port of its own, and each of its connections has that port, or the port that the peer's
device listens on, at one end. So the ports that a group's members listen on name its
connections exactly, and no other socket of the process can be meant.

One wait is not woken: that for a message of which a part has been written or read. Gloo
(``Pair::signalException``, the version in torch 2.13) tells the buffers of messages that
have not begun, and forgets the one that it is at. Only the deadline of its own wait ends
it, so every call into Gloo has one, and nobody else may wait for a thread in Gloo.
"""

from __future__ import annotations

import os
import socket
import stat
import struct
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from geartrain.errors import CommunicationError

D = TypeVar("D")

Endpoint = tuple[str, int]
"""Address and port of a listening socket."""

_ATTEMPTS = 10
_BY_LOSSES = (b"cubic", b"reno")
_SHORT_ROUND_TRIP_S = 0.01
_NAME_BYTES = 16
_RTT_OFFSET_BYTES = 68  # in the kernel's struct tcp_info, which only grows at its end
_RTT = struct.Struct("I")
# Between the two looks at the open sockets only one device may be made.
_making = threading.Lock()


def open_listening(make: Callable[[], D]) -> tuple[D, Endpoint]:
    """Make something that listens on one TCP port, and say on which.

    Another thread may open a listening socket at the same moment; then nobody can say
    which is whose, and it is made again.

    Raises:
        CommunicationError: If it can't be told apart even so.
    """
    for _ in range(_ATTEMPTS):
        with _making:
            before = set(_open_sockets())
            made = make()
            opened = [
                endpoint
                for inode, fd in _open_sockets().items()
                if inode not in before and (endpoint := _listens_on(fd)) is not None
            ]
        if len(opened) == 1:
            return made, opened[0]
        del made
    msg = (
        f"Gloo's listening socket can't be told from others opened at the same time: "
        f"found {opened} in {_ATTEMPTS} attempts, expected one; does another thread open "
        "servers all the time?"
    )
    raise CommunicationError(msg)


def cut(own: Endpoint, peers: Collection[Endpoint]) -> int:
    """Shut down all connections of the device that listens on ``own``.

    Args:
        own: Where this process's device listens: what it accepted has that port here.
        peers: Where the peers' devices listen: what it connected has such a port there.

    Returns:
        Connections that were shut down. The listening socket stays: Gloo closes it when
        its device is dropped, and would spin on one that was shut down.
    """
    others = frozenset(peers)
    num_cut = 0
    for connection in _connections(own, others):
        try:
            connection.shutdown(socket.SHUT_RDWR)
        except OSError:
            continue  # closed meanwhile
        num_cut += 1
    return num_cut


def share_links(own: Endpoint, peers: Collection[Endpoint]) -> int:
    """Suit a device's connections to links that several of them fill at once.

    BBR goes by the rate that a connection had over its last round trips, so one that was
    behind is slow to take what others leave, and the link idles (measured, 2 racks of 4
    over 50 Mbit/s: 86-89 % of the bound, 91 % with a control that goes by losses). Where
    round trips are short, losses are mended at once; over long ways BBR stays, which is the
    better one there. Whatever else the machine uses stays as it is.

    Args:
        own: Where this process's device listens.
        peers: Where the peers' devices listen.

    Returns:
        Connections whose congestion control was changed.
    """
    others = frozenset(peers)
    return sum(_go_by_losses(connection) for connection in _connections(own, others))


def _go_by_losses(connection: socket.socket) -> bool:
    if not hasattr(socket, "TCP_CONGESTION"):
        return False  # not Linux
    try:
        if not _congestion_control(connection).startswith(b"bbr"):
            return False
        if _round_trip_s(connection) > _SHORT_ROUND_TRIP_S:
            return False
    except OSError:
        return False  # closed meanwhile
    for name in _BY_LOSSES:
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, name)
        except OSError:
            continue  # the kernel has none of that name, or it isn't for everybody
        return True
    return False


def _congestion_control(connection: socket.socket) -> bytes:
    name = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, _NAME_BYTES)
    return name.rstrip(b"\0")


def _round_trip_s(connection: socket.socket) -> float:
    """What the kernel reckons with (``tcpi_rtt``, microseconds)."""
    info = connection.getsockopt(
        socket.IPPROTO_TCP, socket.TCP_INFO, _RTT_OFFSET_BYTES + _RTT.size
    )
    microseconds: int = _RTT.unpack_from(info, _RTT_OFFSET_BYTES)[0]
    return microseconds / 1e6


def _connections(own: Endpoint, peers: frozenset[Endpoint]) -> Iterator[socket.socket]:
    """The device's connections, each open here only until the next one."""
    for fd in _open_sockets().values():
        with _borrowed(fd) as connection:
            if connection is not None and _belongs(connection, own, peers):
                yield connection


def _belongs(connection: socket.socket, own: Endpoint, peers: frozenset[Endpoint]) -> bool:
    try:
        there = _endpoint(connection.getpeername())
        here = _endpoint(connection.getsockname())
    except OSError:
        return False  # not connected
    return here == own or there in peers


def _listens_on(fd: int) -> Endpoint | None:
    with _borrowed(fd) as found:
        if found is None:
            return None
        try:
            if not found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                return None
            return _endpoint(found.getsockname())
        except OSError:
            return None


@contextmanager
def _borrowed(fd: int) -> Iterator[socket.socket | None]:
    """The TCP socket behind a descriptor that stays its owner's; None for another kind."""
    try:
        # A copy, so that it stays open here even if its owner closes it now.
        copy = os.dup(fd)
    except OSError:
        yield None
        return
    try:
        found = socket.socket(fileno=copy)
    except OSError:
        os.close(copy)  # the descriptor is something else's by now
        yield None
        return
    with found:
        is_tcp = found.family in {socket.AF_INET, socket.AF_INET6}
        yield found if is_tcp and found.type == socket.SOCK_STREAM else None


def _endpoint(address: tuple[str, int] | tuple[str, int, int, int]) -> Endpoint:
    """Without what IPv6 adds: an IPv4 address in IPv6 clothes is the same address."""
    host = address[0].removeprefix("::ffff:").partition("%")[0]
    return host, address[1]


def _open_sockets() -> dict[int, int]:
    """Inode and descriptor of every socket that this process has open."""
    found = {}
    for entry in Path("/proc/self/fd").iterdir():
        try:
            info = entry.stat()
        except OSError:
            continue  # closed meanwhile
        if stat.S_ISSOCK(info.st_mode):
            found[info.st_ino] = int(entry.name)
    return found
