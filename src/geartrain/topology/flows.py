"""The two ends of a flow: one direction of a path, filled for a moment and timed.

The kernel takes the times, not this process. On a busy host a process may get its turn
milliseconds after the bytes came; with its own clock it would then find many bytes at
once and read too high a rate, or too low a one. The receiver's kernel stamps what arrived,
the sender's what was acknowledged.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import socket
import struct
import sys
import termios
import threading
import time
from collections.abc import Callable
from typing import Protocol

from geartrain.errors import CommunicationError
from geartrain.topology.acknowledgements import (
    read_acknowledgements,
    stamp_acknowledgements,
)
from geartrain.topology.agent_protocol import SendOrder
from geartrain.topology.arrivals import thin_out
from geartrain.topology.priority import raise_priority

_NUM_PINGS = 6
_MOST_PIECES = 100
"""Acknowledgements are stamped piece by piece, and the socket holds so many stamps."""
_LEAST_PIECE_BYTES = 1 << 14
_READ_BYTES = 1 << 14
"""Small, since a read has one stamp, that of its last packet: what waited for a busy
process must not look as if it had come at once."""
_MAX_POINTS = 64
_QUEUE_S = 0.015
"""A sender keeps this much of its rate waiting in the socket. Less, and the link idles
while the process waits for a core; more, and a slow link drains it long after the end."""
_FIRST_QUEUE_BYTES = 1 << 16
_BUCKET_S = 0.004
"""What leaves before this tells of a shaper's bucket, not of the link."""
_MAX_QUEUE_BYTES = 1 << 21
_LONG_LATENCY_S = 0.005
"""From here on the kernel's own buffer sizing is kept: a long path needs more than a
queue of ``_QUEUE_S`` under way."""
_RECEIVE_BUFFER_BYTES = 1 << 23
_LONGEST_WAIT_FOR_START_S = 1.0
# Of linux/asm-generic/socket.h; the socket module does not name them.
_SO_TIMESTAMPNS, _SO_RCVBUFFORCE = 35, 33
_STAMP = struct.Struct("@qq")
_INT = struct.Struct("@i")
_IS_LINUX = sys.platform == "linux"

_ZEROS = memoryview(bytes(1 << 16))


class FlowEnd(Protocol):
    """One end of a flow; its methods block, each with a deadline."""

    flow_id: str

    def open(self) -> None:
        """Connect and measure the latency."""

    def run(self, start_at_s: float, timeout_s: float) -> None:
        """Send or receive the burst."""

    def close(self) -> None:
        """Close the socket; whoever waits on it gets an error."""


class Sender:
    """The end that fills the path."""

    def __init__(self, order: SendOrder, connect: Callable[[], socket.socket]) -> None:
        self.flow_id = order.flow_id
        self.latency_s = 0.0
        self.sent_bytes = 0
        self.started_at_s = 0.0
        self.acknowledged: list[tuple[float, int]] = []
        self._order = order
        self._connect = connect
        self._sock: socket.socket | None = None
        self._is_stamped = False

    def open(self) -> None:
        """Connect and time some round trips."""
        self._sock = sock = self._connect()
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        round_trips_s = []
        for _ in range(_NUM_PINGS):
            start_s = time.perf_counter()
            sock.sendall(b"p")
            if not sock.recv(1):
                msg = "the receiver closed the connection"
                raise CommunicationError(msg)
            round_trips_s.append(time.perf_counter() - start_s)
        # The least: all else is waiting for a core, on this host or the other.
        self.latency_s = min(round_trips_s) / 2
        if self.latency_s < _LONG_LATENCY_S:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _FIRST_QUEUE_BYTES)
        self._is_stamped = stamp_acknowledgements(sock)

    def run(self, start_at_s: float, timeout_s: float) -> None:
        """Send for the ordered time, at most the ordered bytes; wait until all arrived."""
        assert self._sock is not None
        self._sock.settimeout(timeout_s)
        time.sleep(min(max(start_at_s - time.time(), 0.0), _LONGEST_WAIT_FOR_START_S))
        self.started_at_s = time.time()
        self._send_burst(self._sock)
        self._sock.shutdown(socket.SHUT_WR)
        while self._sock.recv(1):  # the receiver closes when it has everything
            pass
        if self._is_stamped:
            points = _rising(read_acknowledgements(self._sock))
            self.acknowledged = thin_out(points, _MAX_POINTS)

    def _send_burst(self, sock: socket.socket) -> None:
        order = self._order
        start_s = time.perf_counter()
        queue_bytes, elapsed_s = _FIRST_QUEUE_BYTES, 0.0
        piece = max(_LEAST_PIECE_BYTES, order.max_bytes // _MOST_PIECES)
        while self.sent_bytes < order.max_bytes and elapsed_s < order.duration_s:
            left = order.max_bytes - self.sent_bytes
            self.sent_bytes += sock.send(_ZEROS[: min(piece, left)])
            elapsed_s = time.perf_counter() - start_s
            if elapsed_s < _BUCKET_S or self.latency_s >= _LONG_LATENCY_S:
                continue
            left_us = self.sent_bytes - _waiting_bytes(sock, queue_bytes)
            wanted = min(_QUEUE_S * left_us / elapsed_s, _MAX_QUEUE_BYTES)
            if wanted > 2 * queue_bytes:
                queue_bytes = int(wanted)
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, queue_bytes)

    def close(self) -> None:
        """Close the socket."""
        if self._sock is not None:
            close_now(self._sock)


class Receiver:
    """The end that times what arrives."""

    def __init__(self, flow_id: str, accept: Callable[[], socket.socket]) -> None:
        self.flow_id = flow_id
        self.arrivals: list[tuple[float, int]] = []
        self._accept = accept
        self._sock: socket.socket | None = None
        self._buffer = bytearray()

    def open(self) -> None:
        """Take the connection and answer the round trips."""
        self._sock = sock = self._accept()
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for _ in range(_NUM_PINGS):
            if not sock.recv(1):
                msg = "the sender closed the connection"
                raise CommunicationError(msg)
            sock.sendall(b"p")
        self._buffer = bytearray(_READ_BYTES)
        if _IS_LINUX:
            sock.setsockopt(socket.SOL_SOCKET, _SO_TIMESTAMPNS, 1)
            # Room for the whole burst, so that it arrives at the link's pace and not at
            # this process'. Not permitted: the kernel's own sizing stays.
            with contextlib.suppress(OSError):
                sock.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, _RECEIVE_BUFFER_BYTES)

    def run(self, start_at_s: float, timeout_s: float) -> None:  # noqa: ARG002 - FlowEnd
        """Receive until the sender ends."""
        assert self._sock is not None
        self._sock.settimeout(timeout_s)
        points, total = [], 0
        while True:
            count, ancillary, _, _ = self._sock.recvmsg_into([self._buffer], 64)
            if not count:
                break
            total += count
            points.append((_read_stamp(ancillary), total))
        self.arrivals = thin_out(_rising(points), _MAX_POINTS)
        close_now(self._sock)

    def close(self) -> None:
        """Close the socket."""
        if self._sock is not None:
            close_now(self._sock)


def _waiting_bytes(sock: socket.socket, queue_bytes: int) -> int:
    """What was handed to the socket and has not been acknowledged."""
    if not _IS_LINUX:
        return queue_bytes
    answer = fcntl.ioctl(sock, termios.TIOCOUTQ, _INT.pack(0))
    return int(_INT.unpack(answer)[0])


def _read_stamp(ancillary: list[tuple[int, int, bytes]]) -> float:
    for level, kind, data in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, _SO_TIMESTAMPNS):
            seconds, nanoseconds = _STAMP.unpack(data[: _STAMP.size])
            return float(seconds + nanoseconds * 1e-9)
    return time.time()


def _rising(points: list[tuple[float, int]]) -> list[tuple[float, int]]:
    """Keep the last byte count of each time, and no time before its predecessor."""
    kept: list[tuple[float, int]] = []
    for at_s, total in points:
        if kept and at_s <= kept[-1][0]:
            kept[-1] = (kept[-1][0], total)
        else:
            kept.append((at_s, total))
    return kept


class FlowTask:
    """An end of a flow on a thread of its own, held between opening and running."""

    def __init__(self, end: FlowEnd) -> None:
        self.end = end
        self.failure: str | None = None
        self._opened, self._go, self._done = (threading.Event() for _ in range(3))
        self._start_at_s, self._timeout_s = 0.0, 0.0
        self._cancelled = False
        self._thread = threading.Thread(
            target=self._work, name=f"geartrain-flow-{end.flow_id}", daemon=True
        )
        self._thread.start()

    def await_open(self, timeout_s: float) -> bool:
        """Whether the end stands; not while it still tries."""
        return self._opened.wait(timeout_s) and self.failure is None

    def go(self, start_at_s: float, timeout_s: float) -> None:
        """Let it run."""
        self._start_at_s, self._timeout_s = start_at_s, timeout_s
        self._go.set()

    def await_done(self, timeout_s: float) -> bool:
        """Whether it has run to its end."""
        return self._done.wait(timeout_s) and self.failure is None

    def cancel(self) -> None:
        """Stop it, wherever it is."""
        self._cancelled = True
        self.end.close()
        self._go.set()

    def _work(self) -> None:
        raise_priority()  # for the milliseconds of a burst: it ends with its flow
        try:
            self.end.open()
            self._opened.set()
            self._go.wait()
            if not self._cancelled:
                self.end.run(self._start_at_s, self._timeout_s)
        except (OSError, CommunicationError) as error:
            self.failure = describe_failure(error)
        finally:
            self._opened.set()
            self._done.set()
            self.end.close()


def close_now(sock: socket.socket) -> None:
    """Close a socket and wake who waits on it; closing alone wakes nobody."""
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
    sock.close()


def describe_failure(error: Exception) -> str:
    """Say in a few words what a socket's error means.

    >>> describe_failure(ConnectionRefusedError(111, "Connection refused"))
    'connection refused: nothing listens there'
    """
    if isinstance(error, ConnectionRefusedError):
        return "connection refused: nothing listens there"
    if isinstance(error, TimeoutError):
        return "no answer in time: packets are dropped on the way, or the host is frozen"
    if isinstance(error, OSError) and error.errno in {
        errno.EHOSTUNREACH,
        errno.ENETUNREACH,
    }:
        return f"no route ({error.strerror})"
    return str(error) or type(error).__name__
