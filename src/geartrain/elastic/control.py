"""The thread of a worker that keeps the connection to the coordinator.

It never computes and never waits for the main loop, so that news reach the process at
once, and beats go out while the main loop is in a long computation.
"""

from __future__ import annotations

import contextlib
import logging
import random
import selectors
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from geartrain.elastic.connection import Address, Connection, connect
from geartrain.elastic.greeting import Credentials
from geartrain.elastic.messages import LINE_LIMIT_BYTES
from geartrain.errors import CommunicationError, ConfigError

logger = logging.getLogger(__name__)

_FIRST_BACKOFF_S = 0.01
_LONGEST_BACKOFF_S = 0.5
_EAGER_S = 3.0
"""A coordinator that died is back within this, and waits for nobody for long."""
_EAGER_BACKOFF_S = 0.1
_GREETING_S = 2.0
_CLOSE_S = 1.0


class Steering(Protocol):
    """Whose connection it is; called from the thread."""

    def opened(self, connection: Connection) -> None:
        """A new connection stands: say who joins, before anything else goes out."""

    def came(self, line: bytes) -> None:
        """The coordinator has sent this; a CommunicationError ends the connection."""

    def beat(self) -> None:
        """It is time for a sign of life."""

    def lost(self) -> float | None:
        """The connection is gone; how long to wait before the next, None for no next."""

    def gave_up(self, reason: str, *, is_refusal: bool) -> None:
        """The coordinator can't be reached; the thread ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlSettings:
    """Of the connection to the coordinator."""

    credentials: Credentials
    reconnect_s: float = 60.0
    """How long a coordinator that is gone is waited for."""
    find_address: Callable[[], Address]
    """Asked before each attempt: it may come back elsewhere. Raises OSError or
    GeartrainError while it is not known."""


class ControlThread:
    """Connects, reads, beats, connects again; a daemon.

    Args:
        settings: Of the connection.
        steering: Told of everything.
    """

    def __init__(self, settings: ControlSettings, steering: Steering) -> None:
        self.beat_interval_s = 0.05
        self.trouble = "not tried yet"
        """Why the coordinator was not reached the last time."""
        self._settings = settings
        self._steering = steering
        self._ours, self._wake = socket.socketpair()
        for end in (self._ours, self._wake):
            end.setblocking(False)
        self._connection: Connection | None = None
        self._selector: selectors.BaseSelector | None = None
        self._closing = threading.Event()
        self._thread = threading.Thread(
            target=self._run, name="elastic control", daemon=True
        )

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    @property
    def is_current(self) -> bool:
        """Whether the caller is this thread."""
        return threading.current_thread() is self._thread

    def wake(self) -> None:
        """Have the thread look again: something waits to be sent, or it is to end."""
        with contextlib.suppress(OSError):  # full: it will look anyway
            self._wake.send(b"!")

    def close(self) -> None:
        """Send what waits, close the connection, and end within a second."""
        self._closing.set()
        self.wake()
        if not self.is_current and self._thread.ident is not None:
            self._thread.join(_CLOSE_S)

    def abandon(self) -> None:
        """In a forked child: give up the copies of the parent's descriptors.

        Else the connection would stay open for as long as the child lives, and nobody
        would hear that the parent has died.
        """
        if self._connection is not None:
            self._connection.abandon()
        for thing in (self._selector, self._ours, self._wake):
            if thing is not None:
                with contextlib.suppress(OSError):
                    thing.close()

    # -- the thread ---------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._keep_connected()
        except Exception:
            logger.exception("the control thread failed")
            reason = "the thread that talks to the coordinator failed; see the log"
            self._steering.gave_up(reason, is_refusal=False)
        finally:
            self._ours.close()
            self._wake.close()

    def _keep_connected(self) -> None:
        pause_s: float | None = 0.0
        while pause_s is not None and not self._closing.is_set():
            self._pause(pause_s)
            connection = self._reach()
            if connection is None:
                return
            self._connection = connection
            try:
                reason = self._serve(connection)
            finally:
                connection.close()
            if self._closing.is_set():
                return
            logger.warning("lost the coordinator (%s); training holds", reason)
            self.trouble = reason
            pause_s = self._steering.lost()

    def _reach(self) -> Connection | None:
        """Connect, again and again up to the deadline; None if that is all."""
        gives_up_at_s = time.monotonic() + self._settings.reconnect_s
        backoff_s = _FIRST_BACKOFF_S
        while not self._closing.is_set():
            left_s = gives_up_at_s - time.monotonic()
            try:
                return connect(
                    self._settings.find_address(),
                    self._settings.credentials,
                    LINE_LIMIT_BYTES,
                    min(_GREETING_S, max(left_s, _FIRST_BACKOFF_S)),
                )
            except ConfigError as error:
                # Not at once: after its death another program may have its port.
                reason, is_refusal = str(error), True
            except (CommunicationError, OSError) as error:
                reason, is_refusal = str(error), False
            self.trouble = reason
            if left_s <= 0:
                reason = (
                    f"no coordinator for {self._settings.reconnect_s:g} s ({reason}); see "
                    "its log, and resume the run"
                )
                self._steering.gave_up(reason, is_refusal=is_refusal)
                return None
            self._pause(min(backoff_s, left_s) * random.uniform(0.5, 1.0))  # noqa: S311 - spreads
            is_eager = left_s > self._settings.reconnect_s - _EAGER_S
            longest_s = _EAGER_BACKOFF_S if is_eager else _LONGEST_BACKOFF_S
            backoff_s = min(2 * backoff_s, longest_s)
        return None

    def _serve(self, connection: Connection) -> str:
        """Until it ends; why it did."""
        with selectors.DefaultSelector() as selector:
            self._selector = selector
            selector.register(connection, selectors.EVENT_READ)
            selector.register(self._ours, selectors.EVENT_READ)
            try:
                self._steering.opened(connection)
                return self._serve_until_lost(connection, selector)
            except (CommunicationError, OSError) as error:
                return str(error)
            finally:
                self._selector = None

    def _serve_until_lost(
        self, connection: Connection, selector: selectors.BaseSelector
    ) -> str:
        beats_at_s = time.monotonic()
        while True:
            has_more = not connection.flush()
            if self._closing.is_set():
                return "closed"
            mask = selectors.EVENT_READ | (selectors.EVENT_WRITE if has_more else 0)
            selector.modify(connection, mask)
            events = selector.select(max(0.0, beats_at_s - time.monotonic()))
            if any(key.fileobj is connection for key, _ in events):
                lines, is_closed = connection.receive()
                for line in lines:
                    self._steering.came(line)
                if is_closed:
                    return "it closed the connection"
            self._take_wakes()
            if time.monotonic() >= beats_at_s:
                self._steering.beat()
                beats_at_s = time.monotonic() + self.beat_interval_s

    def _pause(self, pause_s: float) -> None:
        ends_at_s = time.monotonic() + pause_s
        with selectors.DefaultSelector() as selector:
            selector.register(self._ours, selectors.EVENT_READ)
            while (
                not self._closing.is_set() and (left_s := ends_at_s - time.monotonic()) > 0
            ):
                selector.select(left_s)
                self._take_wakes()

    def _take_wakes(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._ours.recv(1024)
