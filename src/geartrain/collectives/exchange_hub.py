"""Makes the gradient exchanges of a job: plans them from its network, and opens them."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import TYPE_CHECKING

from torch._C._distributed_c10d import PrefixStore

from geartrain.collectives.codecs.error_feedback import ErrorFeedback
from geartrain.collectives.codecs.registry import AUTO_CODECS, make_codec
from geartrain.collectives.codecs.speed import measure_codec
from geartrain.collectives.exchange.gloo_group import TransportSettings
from geartrain.collectives.exchange.scheduled_collective import (
    ExchangeSettings,
    ScheduledCollective,
)
from geartrain.collectives.faults.fault import Fault
from geartrain.collectives.faults.live_epoch import CLOSED
from geartrain.collectives.host_groups.choose import (
    HostGroupSettings,
    common_backend,
    make_host_group,
)
from geartrain.collectives.host_members import (
    check_placement,
    host_group_kind,
    host_member,
)
from geartrain.collectives.lost_peers import lost_peers
from geartrain.collectives.service import EpochParts, ExchangeService, ServiceSettings
from geartrain.errors import CommunicationError
from geartrain.planner.exchange import (
    AUTO,
    CodecProfile,
    ExchangeRequest,
    ScheduleBook,
    write_book,
)
from geartrain.planner.model_profile import ExchangeNetwork
from geartrain.telemetry import decode_document, encode_document

if TYPE_CHECKING:
    import torch
    from torch._C._distributed_c10d import Store

    from geartrain.collectives.host_groups.protocol import HostGroup
    from geartrain.collectives.job_network import JobNetwork
    from geartrain.collectives.rendezvous import Rendezvous

logger = logging.getLogger(__name__)

_LOOPBACK = "127.0.0.1"
_PAUSE_S = 0.001


def _log_fault(fault: Fault) -> None:
    logger.debug("an exchange ended: %s", fault.detail)


def uses_vendor_library(network: JobNetwork) -> bool:
    """Whether one vendor's library does it all: one host, whose devices all have it."""
    members = [host_member("", facts) for facts in network.ranks]
    return network.is_one_host and common_backend(members) is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class HubPlace:
    """This rank, and what the hub works with."""

    rank: int
    device_ids: tuple[str, ...]
    """What to call the ranks, shape (world_size,)."""
    store: Store
    rendezvous: Rendezvous
    timeout_s: float
    """Outer limit of every wait for peers."""
    device: torch.device


@dataclass(slots=True)
class ExchangeHub:
    """Opens the exchange of any set of ranks; decided once, by its first member.

    Args:
        place: This rank.
        network: Where all ranks are.
        compression: None, ``auto`` or a codec's name.
        explains: Measure codecs even where none is asked for, to say what one would gain.
    """

    place: HubPlace
    network: JobNetwork
    compression: str | None = None
    explains: bool = False
    on_fault: Callable[[Fault], None] = _log_fault
    """Told once an exchange why it ended; from a thread, so it must return soon."""
    interruption: Callable[[], str | None] | None = None
    """Why to wait for nobody any more, beside what the rendezvous says of that."""
    _codecs: tuple[CodecProfile, ...] = ()
    _pinned: dict[tuple[int, ...], ScheduleBook] = field(default_factory=dict)
    _num_opened: dict[str, int] = field(default_factory=dict)
    _opening: ExchangeService[ScheduleBook, OpenExchange] | None = None
    _opened: list[tuple[ExchangeService[ScheduleBook, OpenExchange], OpenExchange]] = field(
        default_factory=list
    )

    def __post_init__(self) -> None:
        if not self._codecs:  # else they are those of the hub before
            self._codecs = self._agree_codecs()

    @property
    def codecs(self) -> tuple[CodecProfile, ...]:
        """What codecs cost on the slowest rank; empty where none is in question."""
        return self._codecs

    def request(self, members: Sequence[int]) -> ExchangeRequest:
        """What the planner is asked for these ranks."""
        ranks = [self.network.ranks[rank] for rank in members]
        fractions = [facts.core_fraction or 1.0 for facts in ranks]
        return ExchangeRequest(
            topology=self.network.topology,
            placement=tuple(facts.host_id for facts in ranks),
            codecs=self._codecs,
            policy=self.compression,
            host_group=host_group_kind(ranks),
            core_fraction=min(fractions),
        )

    def describe(self) -> ExchangeNetwork:
        """The network as the planner's model profile keeps it."""
        request = self.request(range(len(self.place.device_ids)))
        return ExchangeNetwork(
            topology=request.topology,
            device_ids=self.place.device_ids,
            host_ids=request.placement,
            codecs=request.codecs,
            policy=request.policy,
            host_group=request.host_group,
            core_fraction=request.core_fraction,
            core_fractions=tuple(r.core_fraction or 1.0 for r in self.network.ranks),
        )

    def book_of(self, members: Sequence[int]) -> ScheduleBook:
        """How these ranks would exchange: as pinned, or planned."""
        pinned = self._pinned.get(tuple(members))
        return pinned or write_book(self.request(members))

    def pin(self, members: Sequence[int], book: ScheduleBook) -> None:
        """Carry out a given book whenever these ranks exchange; all of them call it.

        Raises:
            ConfigError: If it was made for other hosts.
        """
        check_placement(book, self.request(members).placement)
        self._pinned[tuple(members)] = book

    def open(
        self, members: Sequence[int], purpose: str, limit_s: float | None = None
    ) -> ScheduledCollective:
        """Make the exchange of these ranks; they all call it, and nobody else needs to.

        Args:
            members: Global ranks, rising.
            purpose: Exchanges of one purpose keep their order among themselves only.
            limit_s: How long to wait for the others; None: as long as ever.

        Raises:
            CommunicationError: If one of them does not come in time.
        """
        name = f"{purpose}/{'-'.join(map(str, members))}"
        self._num_opened[name] = number = self._num_opened.get(name, -1) + 1
        store = PrefixStore(f"exchange/{name}/{number}", self.place.store)
        book = self._agree_book(members, store, limit_s)
        service = ExchangeService[ScheduleBook, OpenExchange](
            store,
            self.place.rank,
            ServiceSettings(
                member_ids=self.place.device_ids,
                make_exchange=self._make_exchange,
                transport=self.transport_settings(),
            ),
            self.on_fault,
        )
        self._opening = service
        try:
            exchange = service.rebuild(members, 0, book, limit_s)
        except BaseException:
            service.close()
            raise
        finally:
            self._opening = None
        self._opened.append((service, exchange))
        logger.debug("exchange %s: %d schedules", name, len(book.schedules))
        return exchange.collective

    def close(self, collective: ScheduledCollective | None = None) -> None:
        """End one exchange, or all of them."""
        for opened in list(self._opened):
            service, exchange = opened
            if collective is None or exchange.collective is collective:
                self._opened.remove(opened)
                service.close()

    def abort(self, reason: str) -> None:
        """End all exchanges at once, on all their members; from any thread."""
        services = [service for service, _ in list(self._opened)]
        opening = self._opening
        for service in (*services, *((opening,) if opening is not None else ())):
            service.abort(0, reason)

    def successor(
        self,
        store: Store,
        on_fault: Callable[[Fault], None],
        interruption: Callable[[], str | None] | None = None,
    ) -> ExchangeHub:
        """A hub over the same network, for those that are left.

        Args:
            store: Not used before, and by no other thread as long as this one opens
                exchanges.
            on_fault: As of this hub.
            interruption: Why to wait for nobody any more; None while all is well.
        """
        return replace(
            self,
            interruption=interruption,
            place=replace(self.place, store=store),
            on_fault=on_fault,
            _pinned={},
            _num_opened={},
            _opened=[],
            _opening=None,
        )

    def opened(self, collective: object) -> OpenExchange | None:
        """The exchange of this hub that a collective belongs to, while it is open."""
        found = (e for _, e in self._opened if e.collective is collective)
        return next(found, None)

    # -- deciding -----------------------------------------------------------------------

    def _agree_codecs(self) -> tuple[CodecProfile, ...]:
        """What every codec in question costs on the slowest rank."""
        if self.network.is_one_host:
            return ()
        names: tuple[str, ...] = AUTO_CODECS if self.explains else ()
        if self.compression == AUTO:
            names = AUTO_CODECS
        elif self.compression is not None:
            names = tuple(dict.fromkeys((*names, self.compression)))
        if not names:
            return ()
        own = _CodecFigures(profiles=tuple(measure_codec(name) for name in names))
        all_figures = self.place.rendezvous.gather("codec speeds", own, _CodecFigures)
        return tuple(
            replace(
                profile,
                encode_bytes_per_s=min(
                    f.profiles[i].encode_bytes_per_s for f in all_figures
                ),
                decode_bytes_per_s=min(
                    f.profiles[i].decode_bytes_per_s for f in all_figures
                ),
            )
            for i, profile in enumerate(own.profiles)
        )

    def _agree_book(
        self, members: Sequence[int], store: Store, limit_s: float | None
    ) -> ScheduleBook:
        """The first member decides; a book that others made could differ in a rate."""
        with lost_peers("agreeing on how to exchange gradients"):
            if self.place.rank == members[0]:
                book = self.book_of(members)
                store.set("book", encode_document(book).decode())
                return book
            self._wait_for_book(store, self.place.device_ids[members[0]], limit_s)
            text = store.get("book")
        return decode_document(text, ScheduleBook, self.place.device_ids[members[0]])

    def _wait_for_book(self, store: Store, first_id: str, limit_s: float | None) -> None:
        """Wait for what the first member decides, unless a member is lost meanwhile.

        Who sets a limit opens an exchange because a member was lost.
        """
        interruption = self.interruption
        if interruption is None and limit_s is None:
            interruption = self.place.rendezvous.interruption
        if interruption is None:
            store.wait(["book"], timedelta(seconds=limit_s or self.place.timeout_s))
            return
        limit_s = limit_s or self.place.timeout_s
        deadline_at_s = time.monotonic() + limit_s
        while not store.check(["book"]):
            reason = interruption()
            if reason is not None:
                msg = f"{first_id} will not say how gradients are exchanged: {reason}"
                raise CommunicationError(msg)
            if time.monotonic() > deadline_at_s:
                msg = (
                    f"waited {limit_s:g} s for {first_id} to say how "
                    "gradients are exchanged; look at that worker's log"
                )
                raise CommunicationError(msg)
            time.sleep(_PAUSE_S)

    # -- making -------------------------------------------------------------------------

    def transport_settings(self, build_timeout_s: float = 20.0) -> TransportSettings:
        """How this rank's groups reach the others.

        Args:
            build_timeout_s: Deadline of making a group.
        """
        own = self.network.ranks[self.place.rank]
        return TransportSettings(
            address=_LOOPBACK if self.network.is_one_host else own.address,
            build_timeout_s=build_timeout_s,
            timeout_s=self.place.timeout_s,
        )

    def _make_exchange(self, parts: EpochParts, book: ScheduleBook) -> OpenExchange:
        host_group = self._host_group(parts)
        feedback = (ErrorFeedback(), ErrorFeedback())
        try:
            collective = ScheduledCollective(
                parts.transport,
                host_group,
                book,
                parts.membership.member_ids,
                ExchangeSettings(
                    make_codec=make_codec,
                    partial_feedback=feedback[0],
                    total_feedback=feedback[1],
                    timeout_s=self.place.timeout_s,
                    watch=parts.watch,
                ),
            )
        except BaseException:
            host_group.close()
            raise
        return OpenExchange(collective, host_group, feedback, parts.membership.me)

    def _host_group(self, parts: EpochParts) -> HostGroup:
        here = self.network.ranks[self.place.rank].host_id
        on_host = [r for r in parts.ranks if self.network.ranks[r].host_id == here]
        return make_host_group(
            [host_member(self.place.device_ids[r], self.network.ranks[r]) for r in on_host],
            on_host.index(self.place.rank),
            PrefixStore(f"host/{here}", parts.store),
            only_host=len(on_host) == len(parts.ranks),
            device=self.place.device,
            settings=HostGroupSettings(timeout_s=self.place.timeout_s),
        )


@dataclass(frozen=True, slots=True)
class OpenExchange:
    """An exchange, and what is given back with it."""

    collective: ScheduledCollective
    host_group: HostGroup
    feedback: tuple[ErrorFeedback, ErrorFeedback]
    """Of partial sums and of totals."""
    member: int
    """This rank's position among the members."""

    def abort(self, reason: str) -> None:
        """Wake whoever waits; others go on undisturbed where it is only closed."""
        if reason != CLOSED:
            self.collective.abort(reason)

    def close(self) -> None:
        """End its threads and give its memory back."""
        self.collective.close()
        self.host_group.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class _CodecFigures:
    profiles: tuple[CodecProfile, ...]
