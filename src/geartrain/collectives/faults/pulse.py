"""The thread that tells the others that this process lives, and hears it from them.

TCP connections, since a killed process closes them at once (its kernel does), an
"aborted" notice on them can't get lost, and firewalls that pass Gloo pass them too. A
datagram would need retries, and says nothing about a process that is gone.
"""

from __future__ import annotations

import contextlib
import queue
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Protocol

from geartrain.collectives.exchange.membership import Membership
from geartrain.collectives.faults.frames import (
    NONCE_BYTES,
    Aborted,
    Beat,
    Bye,
    Frame,
    Hello,
    is_authentic,
)
from geartrain.collectives.faults.link import Link
from geartrain.collectives.faults.operation_watch import OperationWatch, Overdue
from geartrain.errors import CommunicationError

_INTERVAL_S = 0.2
_HELLO_S = 5.0
_MOST_STRANGERS = 64
_LAST_WORDS_S = 0.2
_TELL_S = 0.05
_FULL_MESH_UP_TO = 16
# Several that are killed at once are reported at once.
_GATHER_S = 0.01
# Others closed their connections within this time after this process was held up for
# at least that long: it is the one that was given up.
_HELD_UP_S = 1.0
_WAKING_S = 2.0


def neighbours(num_members: int, me: int) -> frozenset[int]:
    """With whom a member keeps a connection.

    Up to 16 members all do with all. Beyond, each does with those that lie a power of two
    away, so that each has 2 log2(n) links and news reaches all in log2(n) hops.

    >>> sorted(neighbours(4, 1))
    [0, 2, 3]
    >>> sorted(neighbours(100, 0))
    [1, 2, 4, 8, 16, 32, 36, 64, 68, 84, 92, 96, 98, 99]
    """
    if num_members <= _FULL_MESH_UP_TO:
        return frozenset(range(num_members)) - {me}
    steps = [1 << k for k in range(num_members.bit_length()) if 1 << k < num_members]
    return frozenset(
        (me + sign * step) % num_members for step in steps for sign in (1, -1)
    ) - {me}


class Listener(Protocol):
    """Whoever decides what to do about what the pulse finds; called from its thread."""

    def died(self, members: tuple[int, ...]) -> None:
        """These members closed their connections without a word."""

    def silent(self, members: tuple[int, ...], silent_s: float) -> None:
        """These members send no heartbeats; if it's all, this host may be cut off."""

    def overslept(self, held_up_s: float) -> None:
        """This process was stopped or starved, and others closed their connections."""

    def aborted(self, member: int, notice: Aborted) -> None:
        """A member has ended the epoch."""

    def stuck(self, overdue: Overdue) -> None:
        """An exchange does not end."""


@dataclass(frozen=True, slots=True)
class _Order:
    """For the pulse's thread, from another one."""

    act: Callable[[], None]
    done: threading.Event


class Pulse:
    """Heartbeats of one epoch.

    Args:
        membership: Of the epoch.
        server: Listening socket on the host's chosen address.
        secret: Of the epoch; who doesn't know it isn't listened to.
        watch: Whose counts travel with the heartbeats.
        listener: Told what is found.
    """

    def __init__(
        self,
        membership: Membership,
        server: socket.socket,
        secret: bytes,
        watch: OperationWatch,
        listener: Listener,
    ) -> None:
        self._membership = membership
        self._server = server
        self._secret = secret
        self._watch = watch
        self._listener = listener
        self._orders: queue.SimpleQueue[_Order] = queue.SimpleQueue()
        self._ours, self._wake = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._links: dict[int, Link] = {}
        self._strangers: set[Link] = set()
        self._changed = threading.Condition()
        self._ending = False
        self._last_tick_at_s = time.monotonic()
        self._died: list[int] = []
        self._said_bye: set[int] = set()
        self._held_up_s = 0.0
        self._woke_at_s = -_WAKING_S
        self._thread = threading.Thread(
            target=self._run, name=f"pulse {membership.epoch}", daemon=True
        )

    def start(self) -> None:
        """Start the thread."""
        self._server.setblocking(False)
        self._ours.setblocking(False)
        self._selector.register(self._server, selectors.EVENT_READ)
        self._selector.register(self._ours, selectors.EVENT_READ)
        self._thread.start()

    def adopt(self, connection: socket.socket, member: int) -> None:
        """Take over a connection on which this process has proved who it is."""
        self._order(lambda: self._add(Link(connection, member)), wait_s=0.0)

    def wait_until_connected(self, members: Collection[int], limit_s: float) -> set[int]:
        """Wait for links with all of them; returns those that are missing."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._ending or set(members) <= set(self._links), limit_s
            )
            return set(members) - set(self._links)

    def part(self, limit_s: float) -> None:
        """Say goodbye and wait for the others to do so, so that their last data arrives."""

        def act() -> None:
            for link in self._links.values():
                with contextlib.suppress(OSError):
                    link.send(Bye(), must_go=True)

        self._order(act, wait_s=_TELL_S)
        with self._changed:
            self._changed.wait_for(
                lambda: self._ending or set(self._links) <= self._said_bye, limit_s
            )

    def end(self, notice: Aborted | None) -> None:
        """Tell all why the epoch is over (None: in order) and stop."""

        def act() -> None:
            with self._changed:
                self._ending = True
                self._changed.notify_all()
            for link in self._links.values():
                for frame in (notice, Bye()):
                    if frame is not None:
                        with contextlib.suppress(OSError):
                            link.send(frame, must_go=True)

        self._order(act, wait_s=_TELL_S)

    def _order(self, act: Callable[[], None], wait_s: float) -> None:
        if threading.current_thread() is self._thread:
            act()
            return
        order = _Order(act, threading.Event())
        self._orders.put(order)
        with contextlib.suppress(OSError):  # the thread has ended
            self._wake.send(b"!")
        order.done.wait(wait_s)

    def _run(self) -> None:
        next_beat_at_s = time.monotonic()
        try:
            while not self._ending:
                self._handle_events(max(0.0, next_beat_at_s - time.monotonic()))
                if self._died and not self._ending:
                    self._report_deaths()
                if time.monotonic() >= next_beat_at_s and not self._ending:
                    self._tick()
                    next_beat_at_s = time.monotonic() + _INTERVAL_S
            self._say_last_words()
        finally:
            self._close()

    def _handle_events(self, timeout_s: float) -> None:
        asleep_at_s = time.monotonic()
        events = self._selector.select(timeout_s)
        self._note_oversleeping(time.monotonic() - asleep_at_s - timeout_s)
        for key, _ in events:
            if key.fileobj is self._server:
                self._accept()
            elif key.fileobj is self._ours:
                self._take_orders()
            else:
                self._receive(key.data)
            if self._ending:
                return

    def _note_oversleeping(self, late_s: float) -> None:
        if late_s > _HELD_UP_S:
            self._held_up_s = late_s
            self._woke_at_s = time.monotonic()

    def _report_deaths(self) -> None:
        self._handle_events(_GATHER_S)
        if self._ending:
            return
        if time.monotonic() - self._woke_at_s < _WAKING_S:
            self._listener.overslept(self._held_up_s)
        else:
            self._listener.died(tuple(sorted(self._died)))

    def _take_orders(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._ours.recv(1024)
        while not self._orders.empty():
            order = self._orders.get()
            order.act()
            order.done.set()

    def _accept(self) -> None:
        try:
            connection, _ = self._server.accept()
        except OSError:
            return  # gone again
        if len(self._strangers) >= _MOST_STRANGERS:
            connection.close()
            return
        nonce = secrets.token_bytes(NONCE_BYTES)
        link = Link(connection, nonce=nonce, opened_at_s=time.monotonic())
        self._strangers.add(link)
        self._selector.register(connection, selectors.EVENT_READ, link)
        with contextlib.suppress(OSError):
            link.send_bytes(nonce)

    def _add(self, link: Link) -> None:
        assert link.member is not None
        if link.connection not in self._selector.get_map():
            self._selector.register(link.connection, selectors.EVENT_READ, link)
        with self._changed:
            self._links[link.member] = link
            self._changed.notify_all()

    def _receive(self, link: Link) -> None:
        try:
            frames, closed = link.receive()
        except CommunicationError:
            frames, closed = (), True  # whoever it is, it is none of ours
        for frame in frames:
            if link.member is None:
                closed = closed or not self._welcome(link, frame)
            else:
                self._take(link, link.member, frame)
            if self._ending:
                return
        if closed:
            self._drop(link)

    def _welcome(self, link: Link, frame: Frame) -> bool:
        known = neighbours(self._membership.num_members, self._membership.me)
        if (
            not isinstance(frame, Hello)
            or frame.member not in known
            or not is_authentic(self._secret, link.nonce, frame)
        ):
            return False
        self._strangers.discard(link)
        link.member = frame.member
        self._add(link)
        return True

    def _take(self, link: Link, member: int, frame: Frame) -> None:
        link.silence.heard(time.monotonic())
        if isinstance(frame, Beat):
            for count in frame.counts:
                own = count.member == member
                self._watch.heard(count, frame.entered_ago_s if own else 0.0)
        elif isinstance(frame, Aborted):
            self._listener.aborted(member, frame)
        elif isinstance(frame, Bye):
            with self._changed:
                self._said_bye.add(member)
                self._changed.notify_all()

    def _drop(self, link: Link) -> None:
        self._selector.unregister(link.connection)
        link.close()
        self._strangers.discard(link)
        if link.member is not None and self._links.get(link.member) is link:
            with self._changed:
                del self._links[link.member]
                self._changed.notify_all()
            if link.member not in self._said_bye:
                self._died.append(link.member)

    def _tick(self) -> None:
        now_s = time.monotonic()
        # What this process slept through (stopped, throttled, starved) is nobody's fault.
        awake_s = min(now_s - self._last_tick_at_s, 2 * _INTERVAL_S)
        self._last_tick_at_s = now_s
        of_all = self._membership.num_members > _FULL_MESH_UP_TO
        beat = Beat(*self._watch.counts(of_all=of_all))
        for link in list(self._links.values()):
            with contextlib.suppress(OSError):  # reading will tell
                link.send(beat)
            link.silence.passed(awake_s)
        if any(link.silence.is_lost for link in self._links.values()):
            silent = {
                member: link.silence.silent_s
                for member, link in self._links.items()
                if link.silence.is_nearly_lost
            }
            self._listener.silent(tuple(sorted(silent)), max(silent.values()))
            return
        for link in list(self._strangers):
            if now_s - link.opened_at_s > _HELLO_S:
                self._drop(link)
        overdue = self._watch.overdue()
        if overdue is not None:
            self._listener.stuck(overdue)

    def _say_last_words(self) -> None:
        ends_at_s = time.monotonic() + _LAST_WORDS_S
        waiting = list(self._links.values())
        while waiting and time.monotonic() < ends_at_s:
            for link in list(waiting):
                with contextlib.suppress(OSError):
                    link.flush()
                    if link.has_more:
                        continue
                waiting.remove(link)
            if waiting:
                time.sleep(0.001)

    def _close(self) -> None:
        with self._changed:
            self._ending = True
            links = [*self._links.values(), *self._strangers]
            self._links.clear()
            self._changed.notify_all()
        for link in links:
            # With unread bytes in it a close would reset the connection, and the last
            # words with it.
            with contextlib.suppress(OSError):
                link.connection.shutdown(socket.SHUT_WR)
            link.close()
        self._selector.close()
        for end in (self._server, self._ours, self._wake):
            end.close()
        while not self._orders.empty():
            self._orders.get().done.set()
