"""A device's own connections, told from all others by the ports at their ends."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from geartrain.collectives.exchange.sockets import Endpoint, cut, share_links

_ALLOWED = Path("/proc/sys/net/ipv4/tcp_allowed_congestion_control")


@contextlib.contextmanager
def connected() -> Iterator[tuple[Endpoint, socket.socket, socket.socket]]:
    """Where it listens, the end that connected, the end that was accepted."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        host, port = server.getsockname()
        with socket.create_connection((host, port), timeout=5) as near:
            far, _ = server.accept()
            with far:
                yield (host, port), near, far


def control_of(connection: socket.socket) -> str:
    name = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
    return name.rstrip(b"\0").decode()


def test_only_connections_of_the_device_are_cut() -> None:
    with connected() as (listens, near, _), connected() as (_, other, far):
        assert cut(("127.0.0.1", 1), [listens]) == 1

        assert near.recv(1) == b""
        far.sendall(b"x")
        assert other.recv(1) == b"x"


@pytest.mark.skipif(
    not _ALLOWED.exists() or not {"bbr", "reno"} <= set(_ALLOWED.read_text().split()),
    reason="this kernel has no BBR",
)
def test_connections_that_share_a_link_go_by_losses_and_others_keep_theirs() -> None:
    with connected() as (listens, near, far), connected() as (_, other, _):
        for connection in (near, far, other):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"bbr")

        # As the one that connected sees it: the port is at the peer's end.
        assert share_links(("127.0.0.1", 1), [listens]) == 1

        assert control_of(near) in {"cubic", "reno"}
        assert control_of(far) == "bbr"
        assert control_of(other) == "bbr"
        # As the one that was connected to: the port is its own.
        assert share_links(listens, []) == 1
        assert control_of(far) in {"cubic", "reno"}


def test_a_control_that_was_chosen_by_hand_stays() -> None:
    with connected() as (listens, near, _):
        near.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"reno")

        assert share_links(("127.0.0.1", 1), [listens]) == 0

        assert control_of(near) == "reno"
