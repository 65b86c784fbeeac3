"""The coordinator's shell: sockets, clock and journal around a machine that decides.

Everything that happens becomes an event. Events that come together are decided one after
the other, what they leave in the journal is on disk before anything of it is sent, and
nothing ever waits for a peer.
"""

from __future__ import annotations

import asyncio
import ipaddress
import itertools
import logging
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from geartrain.elastic.awake_clock import AwakeClock
from geartrain.elastic.caller import Caller
from geartrain.elastic.detection import next_wake_at_s
from geartrain.elastic.events import (
    TICK_S,
    Action,
    Close,
    Closed,
    Event,
    Note,
    Received,
    Record,
    Send,
    Tick,
)
from geartrain.elastic.greeting import Credentials
from geartrain.elastic.messages import MemberMessage, OperatorMessage
from geartrain.elastic.records import JournalRecord
from geartrain.elastic.state import State
from geartrain.errors import ConfigError, GeartrainError

logger = logging.getLogger(__name__)

_BACKLOG = 128
# Whoever belongs to the run greets within milliseconds. Of the others, the oldest go
# first, so that a flood of them keeps nobody out.
_MOST_STRANGERS = 64
_GREETING_S = 5.0
_SHORTEST_WAIT_S = 1e-3
_WRITE_AGAIN_S = 0.2
# Three late ticks in a row: then the coordinator was held up, not its members.
LONGEST_AWAKE_STEP_S = 3 * TICK_S

Handle = Callable[[State, Event, float], tuple[State, tuple[Action, ...]]]


class Ledger(Protocol):
    """The journal, as far as the shell needs it."""

    def append(self, records: Sequence[JournalRecord], /) -> None:
        """Add records; they are on disk when it returns. Raises GeartrainError if not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decisions:
    """The machine and what it works on."""

    handle: Handle
    state: State
    """At the start."""
    ledger: Ledger
    clock: AwakeClock


def bind(host: str, port: int, credentials: Credentials) -> socket.socket:
    """Make the coordinator's listening socket.

    Args:
        host: The one IP address to listen on.
        port: 0 for any.
        credentials: Beyond loopback only with a token.

    Raises:
        ConfigError: If the address is beyond loopback and there is no token.
        OSError: If the port is taken.
    """
    try:
        address = ipaddress.ip_address(host)
    except ValueError as error:
        msg = f"host={host!r} must be an IP address of this machine, such as 127.0.0.1"
        raise ConfigError(msg) from error
    if not address.is_loopback and not credentials.token:
        msg = f"host={host} can be reached from other machines: give the run a token"
        raise ConfigError(msg)
    family = socket.AF_INET6 if address.version == 6 else socket.AF_INET  # noqa: PLR2004
    # With its protocol: for others asyncio leaves the delay on by which the kernel keeps a
    # message back until the one before it is acknowledged, 40 ms later.
    server = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind((host, port))
        server.listen(_BACKLOG)
    except OSError:
        server.close()
        raise
    server.setblocking(False)
    return server


class Server:
    """Serves until it is told to stop, or until it can't keep its journal.

    Args:
        server: Listening; see :func:`bind`.
        credentials: Of the run.
        decisions: The machine, its state and its journal.
        journal_patience_s: How long a journal that can't be written (a full disk) holds
            the training before the coordinator gives up.
    """

    def __init__(
        self,
        server: socket.socket,
        credentials: Credentials,
        decisions: Decisions,
        *,
        journal_patience_s: float = 60.0,
    ) -> None:
        self.credentials = credentials
        self._socket = server
        self._decisions = decisions
        self.state = decisions.state
        self._numbers = itertools.count(1)
        self._strangers: dict[int, Caller] = {}
        self._callers: dict[int, Caller] = {}
        self._events: list[Event] = []
        self._actions: list[Action] = []
        self._journal_patience_s = journal_patience_s
        self._unwritten_since_s: float | None = None
        self._write_again_at_s = 0.0
        self._is_drain_due = False
        self._ticked_at_s = decisions.clock.now_s()
        self._timer: asyncio.TimerHandle | None = None
        self._ended: asyncio.Future[None] | None = None

    async def serve(self) -> None:
        """Serve until ``stop``.

        Raises:
            GeartrainError: If the journal can't be written: what is not in it must not
                be seen by anybody.
        """
        loop = asyncio.get_running_loop()
        self._ended = loop.create_future()
        server = await loop.create_server(
            lambda: Caller(next(self._numbers), self), sock=self._socket, backlog=_BACKLOG
        )
        self._tick()
        try:
            await self._ended
        finally:
            server.close()
            if self._timer is not None:
                self._timer.cancel()
            for caller in [*self._callers.values(), *self._strangers.values()]:
                caller.close()

    def stop(self) -> None:
        """Have ``serve`` return."""
        if self._ended is not None and not self._ended.done():
            self._ended.set_result(None)

    # -- callers ------------------------------------------------------------------------

    def arrived(self, caller: Caller) -> None:
        """Give it a few seconds to greet, and only so many a place to wait."""
        while len(self._strangers) >= _MOST_STRANGERS:
            self._strangers.pop(next(iter(self._strangers))).abort()
        self._strangers[caller.number] = caller
        asyncio.get_running_loop().call_later(_GREETING_S, self._expire, caller.number)

    def admitted(self, caller: Caller) -> None:
        """Listen to it."""
        self._strangers.pop(caller.number, None)
        self._callers[caller.number] = caller

    def received(self, caller: Caller, message: MemberMessage | OperatorMessage) -> None:
        """Decide about it, soon."""
        self._add(Received(connection=caller.number, message=message))

    def gone(self, caller: Caller, reason: str) -> None:
        """Decide about it if it was more than a stranger."""
        self._strangers.pop(caller.number, None)
        if self._callers.pop(caller.number, None) is not None:
            self._add(Closed(connection=caller.number, reason=reason))

    def _expire(self, number: int) -> None:
        stranger = self._strangers.pop(number, None)
        if stranger is not None:
            stranger.abort()

    # -- events and actions -------------------------------------------------------------

    def _add(self, event: Event) -> None:
        self._events.append(event)
        if not self._is_drain_due:
            # After all that is readable now: one look at the disk for all of it.
            self._is_drain_due = True
            asyncio.get_running_loop().call_soon(self._drain)

    def _tick(self) -> None:
        self._timer = None
        self._add(Tick())

    def _drain(self) -> None:
        self._is_drain_due = False
        events, self._events = self._events, []
        try:
            for event in events:
                self._actions += self._decide(event)
            is_written = self._write()
        except Exception as error:  # noqa: BLE001 - whatever it is, nothing may go out
            self._fail(error)
            return
        if is_written:
            actions, self._actions = self._actions, []
            for action in actions:
                self._carry_out(action)
        self._set_timer()

    def _write(self) -> bool:
        """Put on disk what the actions that wait are about; whether that was possible.

        While it is not, nothing of it is seen by anybody, and training holds.

        Raises:
            GeartrainError: If it has been impossible for long.
        """
        records = [a.record for a in self._actions if isinstance(a, Record)]
        now_s = time.monotonic()
        if now_s < self._write_again_at_s:
            return False
        try:
            if records:
                self._decisions.ledger.append(records)
        except GeartrainError as error:
            self._unwritten_since_s = self._unwritten_since_s or now_s
            if now_s - self._unwritten_since_s > self._journal_patience_s:
                raise
            if self._unwritten_since_s == now_s:
                logger.error("training holds: %s", error)  # noqa: TRY400 - for people
            self._write_again_at_s = now_s + _WRITE_AGAIN_S
            return False
        if self._unwritten_since_s is not None:
            logger.info("the journal can be written again")
            self._unwritten_since_s = None
        return True

    def _decide(self, event: Event) -> tuple[Action, ...]:
        now_s = self._decisions.clock.now_s()
        if isinstance(event, Tick):
            self._ticked_at_s = now_s
        self.state, actions = self._decisions.handle(self.state, event, now_s)
        return actions

    def _carry_out(self, action: Action) -> None:
        if isinstance(action, Send):
            caller = self._callers.get(action.connection)
            if caller is not None:
                caller.send(action.message)
        elif isinstance(action, Close):
            caller = self._callers.pop(action.connection, None)
            if caller is not None:
                caller.close()
        elif isinstance(action, Note):
            of = f"{action.member_id}: " if action.member_id else ""
            logger.info("%s: %s%s", action.kind, of, action.text)

    def _set_timer(self) -> None:
        if any(isinstance(event, Tick) for event in self._events):
            return
        if self._timer is not None:
            self._timer.cancel()
        wakes_at_s = min(next_wake_at_s(self.state), self._ticked_at_s + TICK_S)
        wait_s = max(wakes_at_s - self._decisions.clock.now_s(), _SHORTEST_WAIT_S)
        self._timer = asyncio.get_running_loop().call_later(wait_s, self._tick)

    def _fail(self, error: BaseException) -> None:
        if self._ended is not None and not self._ended.done():
            self._ended.set_exception(error)
