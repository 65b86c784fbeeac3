"""One epoch while it lives: its transport, heartbeats and watch, and how it ends."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from geartrain.collectives.exchange.gloo_group import TransportSettings
from geartrain.collectives.exchange.gloo_transport import GlooTransport
from geartrain.collectives.exchange.membership import Membership
from geartrain.collectives.exchange.polling_store import PollingStore
from geartrain.collectives.faults.fault import Fault, FaultKind
from geartrain.collectives.faults.frames import Aborted
from geartrain.collectives.faults.meeting import (
    NotMetError,
    agree_on_secret,
    listen,
    meet,
)
from geartrain.collectives.faults.operation_watch import OperationWatch, Overdue
from geartrain.collectives.faults.pulse import Pulse
from geartrain.errors import CommunicationError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

# A closed Gloo socket says nothing of who began: the heartbeats know a moment later.
_HEARSAY_S = 0.05
_REASON_CHARS = 2000
_PARTING_S = 1.0
CLOSED = "it was closed here"
"""Why an epoch ended that ended in order."""


class LiveEpoch:
    """Satisfies the transport's ``Watcher`` and the pulse's ``Listener``.

    It ends once, whoever begins: all members are told, then the sockets are cut, which
    wakes the threads that wait on them here and there, and ``on_end`` fails the rest.

    Args:
        store: Shared by all members.
        membership: Of the epoch.
        ranks: Global rank of each position.
        settings: Addresses and deadlines.
        on_end: Called once with what happened; None where it was ended here.
    """

    def __init__(
        self,
        store: Store,
        membership: Membership,
        ranks: tuple[int, ...],
        settings: TransportSettings,
        on_end: Callable[[Fault | None, str], None],
    ) -> None:
        self.membership = membership
        self.ranks = ranks
        self.watch = OperationWatch(
            membership.me, membership.num_members, settings.timeout_s
        )
        self.transport = GlooTransport(store, membership, settings, self)
        self._store = store
        self._address = settings.address
        self._on_end = on_end
        self._lock = threading.Lock()
        self._ending = False
        self._ended = threading.Event()
        self._pulse: Pulse | None = None
        self._silent_s = 0.0

    def meet(self, limit_s: float) -> None:
        """Find the other members and begin with heartbeats.

        Args:
            limit_s: Deadline.

        Raises:
            CommunicationError: If one does not come in time, or the epoch ended.
        """
        membership = self.membership
        store = PollingStore(self._store, membership.epoch, self._ended, limit_s)
        secret = agree_on_secret(self._store, membership.epoch)
        server = listen(self._address)
        host, port = server.getsockname()[:2]
        pulse = Pulse(membership, server, secret, self.watch, self)
        with self._lock:
            self._pulse = pulse
        pulse.start()
        store.set(f"pulse/{membership.me}", f"{port} {host}")
        try:
            meet(pulse, membership, store, secret, limit_s)
        except CommunicationError as error:
            self.transport.check()  # where it ended meanwhile that is the better reason
            missing = error.members if isinstance(error, NotMetError) else ()
            self.end("error", str(error), missing)
            raise
        self.transport.check()

    # -- what is found ------------------------------------------------------------------

    def failed(self, reason: str, waited_for: tuple[int, ...]) -> None:
        """Hear from the transport of its first failure."""
        if not self._ended.wait(_HEARSAY_S):
            self.end("error", reason, waited_for)

    def progressed(self) -> None:
        """Hear from the transport that something moved."""
        self.watch.moved()

    def died(self, members: tuple[int, ...]) -> None:
        """Hear from the pulse that members' connections were closed without a word."""
        names = self.membership.names(members)
        self.end("error", f"{names} closed the connection: it died", members)

    def silent(self, members: tuple[int, ...], silent_s: float) -> None:
        """Hear from the pulse that members send no heartbeats."""
        names = self.membership.names(members)
        self._silent_s = silent_s
        detail = f"{names} was silent for {silent_s:.1f} s: it is frozen or cut off"
        if 1 < len(members) == self.membership.num_members - 1:
            detail += ", or this host is"
        self.end("silence", detail, members)

    def overslept(self, held_up_s: float) -> None:
        """Hear from the pulse that the others seem to have gone on without this process."""
        detail = (
            f"this process was held up for {held_up_s:.1f} s, and others have closed their "
            "connections: they went on without it"
        )
        self.end("aborted", detail, (self.membership.me,))

    def aborted(self, member: int, notice: Aborted) -> None:
        """Hear from another member that it has ended the epoch."""
        name = self.membership.names((member,))
        known = tuple(m for m in notice.suspects if 0 <= m < len(self.ranks))
        reason = notice.reason[:_REASON_CHARS]
        self.end("aborted", f"{name} ended it: {reason}", known, spread=notice)

    def stuck(self, overdue: Overdue) -> None:
        """Hear from the pulse that an exchange does not end."""
        late = overdue.not_entered
        if late:
            detail = (
                f"{self.membership.names(late)} did not begin exchange {overdue.index} "
                f"within {overdue.limit_s:g} s"
            )
            self.end("deadline", detail, late)
            return
        waited_for = self.transport.waited_for()
        names = self.membership.names(waited_for) or "itself"
        detail = (
            f"exchange {overdue.index} made no headway for {overdue.waited_s:.1f} s, "
            f"allowed are {overdue.limit_s:.1f} s; waiting for {names}"
        )
        self.end("deadline", detail, waited_for)

    # -- the end ------------------------------------------------------------------------

    def end(
        self,
        kind: FaultKind | None,
        reason: str,
        suspects: tuple[int, ...],
        spread: Aborted | None = None,
    ) -> None:
        """End the epoch; the first call counts.

        Args:
            kind: What is reported; None if nothing is, since it was asked for here.
            reason: In words.
            suspects: Positions.
            spread: The notice to pass on, if this end came as one.
        """
        with self._lock:
            if self._ending:
                return
            self._ending = True
            pulse = self._pulse
        if pulse is not None:
            pulse.end(spread or Aborted(reason[:_REASON_CHARS], suspects))
        self._finish(kind, reason, suspects)

    def close(self) -> None:
        """End in order, together with the others; waits a second for them."""
        pulse = self._pulse
        if pulse is not None and not self._ending:
            pulse.part(_PARTING_S)
        with self._lock:
            if self._ending:
                return
            self._ending = True
        if pulse is not None:
            pulse.end(None)
        self._finish(None, CLOSED, ())

    def _finish(
        self, kind: FaultKind | None, reason: str, suspects: tuple[int, ...]
    ) -> None:
        self._ended.set()
        self.transport.abort(reason)
        fault = None
        if kind is not None:
            fault = Fault(
                epoch=self.membership.epoch,
                kind=kind,
                suspects=tuple(self.ranks[position] for position in suspects),
                detail=reason,
                at_s=time.time(),
                silent_s=self._silent_s if kind == "silence" else 0.0,
            )
        self._on_end(fault, reason)
