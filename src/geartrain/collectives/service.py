"""The exchange over changing members: epochs are made, watched, and ended. No decisions.

Who takes part is decided elsewhere. The service reports what it finds, ends an epoch when
told or when something broke, and makes the next one.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from torch._C._distributed_c10d import PrefixStore

from geartrain.collectives.exchange.gloo_group import TransportSettings
from geartrain.collectives.exchange.gloo_transport import GlooTransport
from geartrain.collectives.exchange.membership import Membership
from geartrain.collectives.faults.bounded import within
from geartrain.collectives.faults.fault import Fault
from geartrain.collectives.faults.live_epoch import CLOSED, LiveEpoch
from geartrain.collectives.faults.operation_watch import OperationWatch
from geartrain.errors import CommunicationError, ConfigError, GeartrainError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

logger = logging.getLogger(__name__)

_STORE_S = 10.0
_JOIN_S = 5.0


class Exchange(Protocol):
    """What is built on an epoch's transport."""

    def abort(self, reason: str) -> None:
        """Wake whoever waits in it, also inside the host; must not block."""

    def close(self) -> object:
        """Give its threads and memory back; what it returns is not looked at."""


P = TypeVar("P")
E = TypeVar("E", bound=Exchange)


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochParts:
    """What an exchange is built from."""

    membership: Membership
    ranks: tuple[int, ...]
    """Global rank of each position."""
    transport: GlooTransport
    watch: OperationWatch
    """To be told of every exchange that is begun and done."""
    store: Store
    """Under a prefix of this epoch, for handshakes inside a host."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceSettings(Generic[P, E]):
    """How epochs are made."""

    member_ids: Sequence[str]
    """What to call the ranks in an error, by global rank."""
    make_exchange: Callable[[EpochParts, P], E]
    """Builds an epoch's exchange from its parts and a plan."""
    transport: TransportSettings = field(default_factory=TransportSettings)


class ExchangeService(Generic[P, E]):
    """Makes, watches and ends the epochs of this process.

    Args:
        store: Shared by all ranks. Its client is cloned, since a client answers one
            thread at a time.
        rank: This process.
        settings: How epochs are made.
        on_fault: Told once an epoch why it ended, after it has: from a thread of the
            service, so it must return soon and leave ``rebuild`` to another thread.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        settings: ServiceSettings[P, E],
        on_fault: Callable[[Fault], None],
    ) -> None:
        # A clone connects anew and asks the name service, which may take seconds.
        clone: Callable[[], Store] = store.clone  # type: ignore[attr-defined]  # no stub
        self._store = within(2 * _STORE_S, clone, "the store")
        self._rank = rank
        self._settings = settings
        self._on_fault = on_fault
        self._lock = threading.Lock()
        self._latest = -1
        self._live: LiveEpoch | None = None
        self._exchange: E | None = None

    @property
    def epoch(self) -> int:
        """The latest epoch that this process was in; -1 before the first."""
        return self._latest

    def rebuild(
        self,
        members: Sequence[int],
        epoch: int,
        plan: P,
        limit_s: float | None = None,
    ) -> E:
        """Make the next epoch with these members; all of them call it.

        An epoch that still lives ends in order, if its members leave it within a second.

        Args:
            members: Global ranks, in order of position.
            epoch: Larger than any before.
            plan: Handed to ``make_exchange``.
            limit_s: How long to wait for members to come; None: ``build_timeout_s``.
                After a roll call all are there, so that a short one finds out sooner
                who died since.

        Raises:
            CommunicationError: If the epoch is over or older than the latest, a member
                doesn't come in time, or one is lost meanwhile. ``on_fault`` hears of the
                latter too. The next epoch may be tried at once.
            ConfigError: If this process isn't among the members.
        """
        ranks = tuple(members)
        if self._rank not in ranks:
            msg = f"epoch {epoch} has the members {ranks}, not rank {self._rank}"
            raise ConfigError(msg)
        with self._lock:
            if epoch <= self._latest:
                msg = (
                    f"epoch {epoch} is over: this process has been in epoch "
                    f"{self._latest}; ask for the members again"
                )
                raise CommunicationError(msg)
            self._latest = epoch
        live = self._live
        if live is not None:
            live.close()
        self._retire(CLOSED)
        self._refuse_aborted(epoch)
        membership = Membership(
            epoch=epoch,
            me=ranks.index(self._rank),
            member_ids=tuple(self._settings.member_ids[rank] for rank in ranks),
        )
        live = LiveEpoch(
            self._store,
            membership,
            ranks,
            self._settings.transport,
            lambda fault, reason: self._ended(epoch, fault, reason),
        )
        with self._lock:
            self._live = live
        return self._make_exchange(live, plan, limit_s)

    def abort(self, epoch: int, reason: str) -> None:
        """End an epoch everywhere; one that is over already is left alone."""
        live = self._live
        if live is not None and live.membership.epoch == epoch:
            live.end(None, reason, ())

    def close(self) -> None:
        """End in order: the others go on until they close too."""
        live = self._live
        if live is not None:
            live.close()
        closing = self._retire(CLOSED)
        if closing is not None:
            closing.join(_JOIN_S)

    def _make_exchange(self, live: LiveEpoch, plan: P, limit_s: float | None) -> E:
        epoch = live.membership.epoch
        meeting_s = limit_s or self._settings.transport.build_timeout_s
        try:
            within(
                meeting_s + _STORE_S,
                lambda: live.meet(meeting_s),
                f"the store, for epoch {epoch},",
            )
            exchange = self._settings.make_exchange(
                EpochParts(
                    membership=live.membership,
                    ranks=live.ranks,
                    transport=live.transport,
                    watch=live.watch,
                    store=PrefixStore(f"epoch/{epoch}/exchange", self._store),
                ),
                plan,
            )
        except (GeartrainError, RuntimeError, ConnectionError) as error:
            live.end("error", f"it could not be made: {error}", ())
            if isinstance(error, GeartrainError):
                raise
            msg = f"epoch {epoch} could not be made: {error}; the store may be gone"
            raise CommunicationError(msg) from error
        with self._lock:
            self._exchange = exchange
        over = live.transport.over
        if over is not None:
            exchange.abort(over)
        live.transport.check()
        return exchange

    def _ended(self, epoch: int, fault: Fault | None, reason: str) -> None:
        """Called once an epoch, by whichever thread found out."""
        with self._lock:
            is_latest = epoch == self._latest
            exchange = self._exchange if is_latest else None
        if exchange is not None:
            exchange.abort(reason)
        if reason != CLOSED:
            # The store may answer late or never, and nobody here waits for it.
            threading.Thread(
                target=self._mark_aborted, args=(epoch, reason), daemon=True
            ).start()
        if fault is not None:
            # Not a warning: whoever decides on members says what came of it.
            logger.info("epoch %d ended (%s): %s", epoch, fault.kind, fault.detail)
            self._on_fault(fault)

    def _mark_aborted(self, epoch: int, reason: str) -> None:
        with contextlib.suppress(RuntimeError, ConnectionError):
            self._store.set(f"abort/{epoch}", reason)

    def _refuse_aborted(self, epoch: int) -> None:
        key = f"abort/{epoch}"
        reason = within(
            _STORE_S,
            lambda: self._store.get(key) if self._store.check([key]) else None,
            "the store",
        )
        if reason is not None:
            msg = f"epoch {epoch} is over: {reason.decode()}; ask for the members again"
            raise CommunicationError(msg)

    def _retire(self, reason: str) -> threading.Thread | None:
        """End the epoch before and give its threads and memory back."""
        with self._lock:
            live, self._live = self._live, None
            exchange, self._exchange = self._exchange, None
        if live is not None:
            live.end(None, reason, ())
        if exchange is None:
            return None
        exchange.abort(reason)
        # It joins its threads, and one of them may be in a callback of ours.
        closing = threading.Thread(target=exchange.close, name="close", daemon=True)
        closing.start()
        return closing
