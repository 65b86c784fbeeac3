"""Heartbeats of one process, and strangers that try to join them."""

from __future__ import annotations

import contextlib
import queue
import socket
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from geartrain.collectives.exchange.membership import Membership
from geartrain.collectives.faults.frames import (
    NONCE_BYTES,
    Aborted,
    Beat,
    Bye,
    Count,
    Hello,
    authenticate,
    pack,
)
from geartrain.collectives.faults.meeting import listen
from geartrain.collectives.faults.operation_watch import OperationWatch, Overdue
from geartrain.collectives.faults.pulse import Pulse

SECRET = b"secret"


@dataclass
class Heard:
    """What the pulse tells, in order."""

    events: queue.SimpleQueue[tuple[object, ...]] = field(default_factory=queue.SimpleQueue)

    def died(self, members: tuple[int, ...]) -> None:
        self.events.put(("died", members))

    def silent(self, members: tuple[int, ...], silent_s: float) -> None:
        self.events.put(("silent", members, silent_s))

    def overslept(self, held_up_s: float) -> None:
        self.events.put(("overslept", held_up_s))

    def aborted(self, member: int, notice: Aborted) -> None:
        self.events.put(("aborted", member, notice))

    def stuck(self, overdue: Overdue) -> None:
        self.events.put(("stuck", overdue))


@dataclass
class Place:
    """A running pulse, as position 0 of three, and how to reach it."""

    pulse: Pulse
    heard: Heard
    watch: OperationWatch
    address: tuple[str, int]

    def join(self, member: int, secret: bytes = SECRET) -> socket.socket:
        connection = socket.create_connection(self.address, 5.0)
        nonce = connection.recv(NONCE_BYTES)
        connection.sendall(pack(Hello(member, authenticate(secret, nonce, member))))
        return connection


@pytest.fixture
def place() -> Iterator[Place]:
    heard = Heard()
    watch = OperationWatch(0, 3, 300.0)
    server = listen("127.0.0.1")
    address = server.getsockname()
    membership = Membership(epoch=0, me=0, member_ids=("a", "b", "c"))
    pulse = Pulse(membership, server, SECRET, watch, heard)
    pulse.start()
    yield Place(pulse, heard, watch, address)
    pulse.end(None)


def ends(connection: socket.socket) -> bool:
    """Whether the other side closes it; what it says before doesn't matter."""
    with contextlib.suppress(ConnectionError):
        while connection.recv(1024):
            pass
    return True


def test_who_does_not_know_the_secret_is_turned_away(place: Place) -> None:
    assert ends(place.join(1, b"guessed"))
    assert place.pulse.wait_until_connected({1}, 0.0) == {1}
    assert place.heard.events.empty()


@pytest.mark.parametrize("first", [b"GET / HTTP/1.0\r\n\r\n", pack(Beat(())), pack(Bye())])
def test_who_begins_with_something_else_is_turned_away(place: Place, first: bytes) -> None:
    connection = socket.create_connection(place.address, 5.0)
    connection.sendall(first)

    assert ends(connection)
    assert place.heard.events.empty()


def test_a_position_that_does_not_exist_is_turned_away(place: Place) -> None:
    assert ends(place.join(7))
    assert ends(place.join(0))


def test_a_member_that_closes_without_a_word_has_died(place: Place) -> None:
    connections = [place.join(1), place.join(2)]
    assert place.pulse.wait_until_connected({1, 2}, 5.0) == set()

    connections[0].close()

    assert place.heard.events.get(timeout=5.0) == ("died", (1,))


def test_a_member_that_says_goodbye_has_not_died(place: Place) -> None:
    one, two = place.join(1), place.join(2)
    assert place.pulse.wait_until_connected({1, 2}, 5.0) == set()

    one.sendall(pack(Bye()))
    one.close()
    two.close()

    assert place.heard.events.get(timeout=5.0) == ("died", (2,))


def test_heartbeats_carry_how_far_members_are(place: Place) -> None:
    connection = place.join(1)
    place.pulse.wait_until_connected({1}, 5.0)
    place.watch.entered(0, 1.0)

    connection.sendall(pack(Beat((Count(1, 1, 5), Count(2, 1, 5)))))
    connection.sendall(pack(Aborted("asked to", (2,))))

    event = place.heard.events.get(timeout=5.0)
    assert event == ("aborted", 1, Aborted("asked to", (2,)))
    assert place.watch.all_entered_at_s(0) is not None


def test_a_silent_member_is_reported_while_another_beats(place: Place) -> None:
    connection, _quiet = place.join(1), place.join(2)
    assert place.pulse.wait_until_connected({1, 2}, 5.0) == set()
    connection.settimeout(5.0)
    found: tuple[object, ...] = ()
    while not found:
        connection.recv(1024)  # it beats when it is beaten to
        connection.sendall(pack(Beat(())))
        with contextlib.suppress(queue.Empty):
            found = place.heard.events.get_nowait()

    assert found[:2] == ("silent", (2,))
