"""Plain TCP through an emulated network, from one process; and the skip without one."""

from __future__ import annotations

import socket
import threading
import time

import pytest

from geartrain.devices.emulation.network import NetworkLab, missing_for_networks

DEADLINE_S = 20.0
_PIECE = b"x" * 65_536


needs_networks = pytest.mark.skipif(
    missing_for_networks() is not None,
    reason=f"emulated networks need {missing_for_networks()}",
)


def connect(
    lab: NetworkLab, source: int, target: int, address: str | None = None
) -> tuple[socket.socket, socket.socket]:
    """A connection from one host to another; returns both ends."""
    family = socket.AF_INET6 if address and ":" in address else socket.AF_INET
    with lab.entered(target):
        listener = socket.create_server(
            (address or lab.host(target).address, 0), family=family
        )
    with listener:
        listener.settimeout(DEADLINE_S)
        with lab.entered(source):
            near = socket.create_connection(listener.getsockname()[:2], DEADLINE_S)
        far, _ = listener.accept()
    far.settimeout(DEADLINE_S)
    return near, far


def send_through(near: socket.socket, far: socket.socket, num_bytes: int) -> float:
    """Send so many bytes and return the seconds from the first that arrived to the last.

    What came with the first piece is not counted, being through before the clock starts.
    """

    def pump() -> None:
        for start in range(0, num_bytes, len(_PIECE)):
            near.sendall(_PIECE[: min(len(_PIECE), num_bytes - start)])

    thread = threading.Thread(target=pump)
    thread.start()
    received = len(far.recv(65_536))
    started_at_s = time.perf_counter()
    while received < num_bytes:
        received += len(far.recv(1 << 20))
    seconds = time.perf_counter() - started_at_s
    thread.join()
    return seconds


def measure_bytes_per_s(lab: NetworkLab, source: int, target: int, num_bytes: int) -> float:
    """Payload that a host sends to another, over the time it took."""
    near, far = connect(lab, source, target)
    with near, far:
        return num_bytes / send_through(near, far, num_bytes)
