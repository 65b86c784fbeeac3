"""What a worker's main loop and its control thread share: the view, and the way out."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Literal

from geartrain.checkpoint.ranges import StateRange
from geartrain.elastic.connection import Connection
from geartrain.elastic.control import ControlSettings, ControlThread
from geartrain.elastic.messages import (
    WHOLE_STATE,
    Beat,
    CoordinatorMessage,
    Dismiss,
    Heal,
    Join,
    Leave,
    MemberMessage,
    Welcome,
    decode_from_coordinator,
    encode,
)
from geartrain.elastic.outcome import MembershipEnded
from geartrain.elastic.view import Ending, MemberView
from geartrain.errors import CommunicationError

logger = logging.getLogger(__name__)

Phase = Literal["step", "waiting", "away"]

# How often a main loop that waits in here shows that it is not hung.
_LOOK_S = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Who joins: a device, and the process that drives it."""

    member_id: str
    incarnation: str
    """Unique to the process; coming back does not change it."""
    host_id: str
    place: int = 0
    wants: tuple[StateRange, ...] = (WHOLE_STATE,)
    address: str = ""
    """Where it hands out its state."""
    facts: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Callbacks:
    """Called from the control thread; they must not wait."""

    on_interruption: Callable[[str], None]
    """With the reason, at once when the epoch in force is over: cut its sockets."""
    on_heal: Callable[[Heal], None] = lambda _heal: None
    """State is to be copied from or to this process, beside the training."""


class MemberLink:
    """The control thread's side of a membership; ``changed`` guards ``view``.

    Args:
        identity: Who joins.
        control: How the coordinator is reached.
        callbacks: Told at once.
    """

    def __init__(
        self, identity: Identity, control: ControlSettings, callbacks: Callbacks
    ) -> None:
        self.identity = identity
        self.view = MemberView()
        self.changed = threading.Condition()
        self.num_progress = 0
        self.phase: Phase = "step"
        self.step_s = 0.0
        """The longest since the last beat."""
        self.leaving: str | None = None
        self._callbacks = callbacks
        self._connection: Connection | None = None
        self._is_closed = False
        self.control = ControlThread(control, self)

    @property
    def is_connected(self) -> bool:
        """Whether the coordinator is there."""
        return self._connection is not None

    def send(self, message: MemberMessage) -> None:
        """Send if there is somebody; a join says all that matters after a reconnection.

        The caller holds ``changed``, so that a vote is either part of a join or behind it.
        """
        if self._connection is None:
            return
        with suppress(OSError):  # the control thread sees it as well
            if not self._connection.send(encode(message)):
                self.control.wake()

    def wait(
        self,
        is_done: Callable[[], bool],
        limit_s: float,
        failure: str,
        on_look: Callable[[], None] = lambda: None,
    ) -> None:
        """Wait for what the coordinator says.

        Raises:
            MembershipEnded: If this process takes part no more.
            CommunicationError: After the deadline, saying ``failure`` and for whom.
        """
        deadline_s = time.monotonic() + limit_s
        with self.changed:
            while not is_done():
                if self.view.ending is not None:
                    raise MembershipEnded(self.view.ending)
                left_s = deadline_s - time.monotonic()
                if self._is_closed or left_s <= 0:
                    raise CommunicationError(self._describe(failure, limit_s))
                on_look()
                self.changed.wait(min(left_s, _LOOK_S))

    def close(self) -> None:
        """End the connection and the thread."""
        with self.changed:
            self._is_closed = True
            self.changed.notify_all()
        self.control.close()

    def make_leave(self) -> Leave:
        """The message that asks to be left out."""
        held = self.view.held
        return Leave(
            epoch=self.view.taken_epoch,
            step=held.step,
            lineage=held.lineage,
            reason=self.leaving or "",
        )

    # -- the control thread -------------------------------------------------------------

    def opened(self, connection: Connection) -> None:
        """Join; from here on, others may send over the connection."""
        with self.changed:
            connection.send(encode(self._make_join()))
            if self.leaving is not None:
                connection.send(encode(self.make_leave()))
            self._connection = connection

    def came(self, line: bytes) -> None:
        """Note what the coordinator says, and wake the main loop."""
        message = decode_from_coordinator(line)
        with self.changed:
            reason = self.view.take(message)
            if isinstance(message, Welcome) and message.beat_interval_s > 0:
                self.control.beat_interval_s = message.beat_interval_s
            self.changed.notify_all()
        if reason is not None:
            self._call(lambda: self._callbacks.on_interruption(reason))
        self._answer(message)

    def beat(self) -> None:
        """Tell how far the main loop is."""
        step_s, self.step_s = self.step_s, 0.0
        with self.changed:
            held = self.view.held
            self.send(
                Beat(
                    epoch=self.view.taken_epoch,
                    step=held.step,
                    lineage=held.lineage,
                    progress=self.num_progress,
                    phase=self.phase,
                    step_s=step_s,
                )
            )

    def lost(self) -> float | None:
        """Hold; how long to stay away."""
        with self.changed:
            self._connection = None
            pause_s, self.view.return_after_s = self.view.return_after_s, None
            ending = self.view.ending
            self.changed.notify_all()
        if ending is not None and ending.kind == "dismissed":
            return None
        return pause_s or 0.0

    def gave_up(self, reason: str, *, is_refusal: bool) -> None:
        """Nobody will answer any more."""
        kind = "refused" if is_refusal else "unreachable"
        with self.changed:
            over = self.view.end(Ending(kind=kind, reason=reason))
            self.changed.notify_all()
        if over is not None:
            self._call(lambda: self._callbacks.on_interruption(over))

    def _answer(self, message: CoordinatorMessage) -> None:
        if isinstance(message, Heal):
            self._call(lambda: self._callbacks.on_heal(message))
        elif isinstance(message, Dismiss):
            msg = f"it dismissed this process: {message.reason}"
            raise CommunicationError(msg)

    @staticmethod
    def _call(callback: Callable[[], None]) -> None:
        try:
            callback()
        except Exception:
            # The connection must go on: its end would pass for this process's death.
            logger.exception("a callback of the membership failed")

    def _make_join(self) -> Join:
        own, view = self.identity, self.view
        voted = view.pending
        return Join(
            epoch=view.known_epoch,
            step=view.held.step,
            lineage=view.held.lineage,
            member_id=own.member_id,
            incarnation=own.incarnation,
            host_id=own.host_id,
            place=own.place,
            recent=view.recent,
            voted_step=voted.step if voted is not None else 0,
            voted_lineage=voted.lineage if voted is not None else "",
            holds=view.held.ranges,
            wants=own.wants,
            address=own.address,
            facts=own.facts,
        )

    def _describe(self, failure: str, limit_s: float) -> str:
        if self._is_closed:
            return f"{failure}: the membership was closed"
        if self._connection is None:
            return (
                f"{failure} within {limit_s:g} s: no coordinator ({self.control.trouble})"
            )
        return (
            f"{failure} within {limit_s:g} s: the coordinator is connected and waits for "
            "other members; `geartrain nodes list` shows for whom"
        )
