"""How fast two processes of this host could talk by TCP over the loopback."""

from __future__ import annotations

import socket
import statistics
import threading
import time
from dataclasses import dataclass

from geartrain.errors import DeviceError

_BLOCK_BYTES = 1 << 18
_NUM_BYTES = 1 << 26
"""Tens of milliseconds: long against the start of a flow, short against patience."""
_NUM_REPEATS = 3
_NUM_ROUND_TRIPS = 100
_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopbackReading:
    """What the loopback carries."""

    bytes_per_s: float
    latency_s: float
    """One way, the median."""


def measure_loopback(num_bytes: int = _NUM_BYTES) -> LoopbackReading:
    """Measure TCP over 127.0.0.1 within this process.

    Args:
        num_bytes: Of one burst.

    Raises:
        DeviceError: If the loopback does not work.
    """
    try:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            listener.settimeout(_TIMEOUT_S)
            near = socket.create_connection(listener.getsockname(), timeout=_TIMEOUT_S)
            with near:
                far, _ = listener.accept()
                with far:
                    return _measure(near, far, num_bytes)
    except OSError as error:
        msg = f"the loopback 127.0.0.1 does not work: {error}; bring `lo` up"
        raise DeviceError(msg) from error


def _measure(near: socket.socket, far: socket.socket, num_bytes: int) -> LoopbackReading:
    for sock in (near, far):
        sock.settimeout(_TIMEOUT_S)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    best_s = min(_burst_s(near, far, num_bytes) for _ in range(_NUM_REPEATS))
    round_trips = []
    for _ in range(_NUM_ROUND_TRIPS):
        start_s = time.perf_counter()
        near.sendall(b"x")
        far.sendall(far.recv(1))
        near.recv(1)
        round_trips.append(time.perf_counter() - start_s)
    return LoopbackReading(
        bytes_per_s=num_bytes / best_s, latency_s=statistics.median(round_trips) / 2
    )


def _burst_s(near: socket.socket, far: socket.socket, num_bytes: int) -> float:
    """Time a burst; Python lets go of its lock while the kernel copies."""
    sender = threading.Thread(target=_send, args=(near, num_bytes), daemon=True)
    buffer, left = bytearray(_BLOCK_BYTES), num_bytes
    start_s = time.perf_counter()
    sender.start()
    while left > 0:
        count = far.recv_into(buffer, min(left, _BLOCK_BYTES))
        if count == 0:
            msg = "the connection closed"
            raise OSError(msg)
        left -= count
    elapsed_s = time.perf_counter() - start_s
    sender.join(timeout=_TIMEOUT_S)
    return elapsed_s


def _send(sock: socket.socket, num_bytes: int) -> None:
    block = memoryview(bytes(_BLOCK_BYTES))
    for start in range(0, num_bytes, _BLOCK_BYTES):
        sock.sendall(block[: num_bytes - start])
