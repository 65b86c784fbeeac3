"""Builds each epoch's exchange as soon as the epoch is known, in a thread of its own.

The training may be in a long computation then; when it looks up, its exchange stands.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from torch._C._distributed_c10d import PrefixStore

from geartrain.collectives.faults.bounded import within
from geartrain.collectives.job_network import RankFacts, with_ranks
from geartrain.devices import Fleet
from geartrain.elastic.outcome import MembershipEnded
from geartrain.errors import CommunicationError, GeartrainError
from geartrain.parallel.membership import Gathering, Gone, Growth, OnGone
from geartrain.telemetry import read_document

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

    from geartrain.collectives.exchange_hub import ExchangeHub
    from geartrain.collectives.faults.fault import Fault
    from geartrain.elastic.client import Client
    from geartrain.elastic.messages import LostMember, NewEpoch

logger = logging.getLogger(__name__)

PLACE_FACT = "place"
"""Among a member's facts: its ``RankFacts``, as JSON."""

_STORE_S = 20.0
_LONGEST_EPOCH_WAIT_S = 3600.0
_SHORTEST_BUILD_S = 1.0


class EpochBuilder:
    """The exchanges of one process, epoch by epoch.

    Args:
        store: Shared by all ranks; it is cloned.
        client: Knows the epochs.
        hub: Of the ranks that the job began with; its faults are followed from now on.
        fleet_path: Lists all devices, also those that came while the job ran.
    """

    def __init__(
        self, store: Store, client: Client, hub: ExchangeHub, fleet_path: Path
    ) -> None:
        self.changed = threading.Condition()
        self.built: Gathering | None = None
        """The latest epoch whose exchange stands, or stood."""
        self.failure: str | None = None
        """Why nothing is built any more."""
        self.on_gone: OnGone = lambda _gone: None
        self.on_interrupted: Callable[[], None] = lambda: None
        self.is_quiet = False
        """Ends of epochs cut nothing any more: all have made their last step."""
        self._store = store
        self._client = client
        self._hub = hub
        self._fleet_path = fleet_path
        self._names = hub.place.device_ids
        self._fleet: Fleet | None = None  # where it has grown
        self._fault: tuple[int, str] | None = None  # the latest, by epoch
        self._gone: dict[str, Gone] = {}  # by incarnation
        self._is_closed = False
        self._first = 0  # the epoch that exchanges of before are used in
        hub.on_fault = self._faulted_at_first

    @property
    def names(self) -> Sequence[str]:
        """Device ids by rank."""
        return self._names

    def start(self, after: int) -> None:
        """Build what comes after an epoch, for which the exchange stands already."""
        self._first = after
        threading.Thread(
            target=self._build_epochs, args=(after,), name="members", daemon=True
        ).start()

    def close(self) -> None:
        """Build no more."""
        with self.changed:
            self._is_closed = True
            self.changed.notify_all()

    def fault(self, epoch: int) -> str | None:
        """How the exchange of this epoch broke here; None if it did not."""
        fault = self._fault
        return fault[1] if fault is not None and fault[0] == epoch else None

    def is_over(self, epoch: int) -> bool:
        """Whether an epoch whose exchange is not there will have none."""
        fault = self._fault
        is_broken = fault is not None and fault[0] >= epoch
        return is_broken or self._client.interruption(epoch) is not None

    def gone(self) -> tuple[Gone, ...]:
        """All that are gone by now."""
        now_s = time.time()
        for incarnation, lost in self._client.lost().items():
            if incarnation not in self._gone and lost.member_id in self._names:
                self._gone[incarnation] = self._describe(lost, now_s)
        return tuple(self._gone.values())

    # -- the control thread -------------------------------------------------------------

    def interrupted(self, reason: str) -> None:
        """The epoch in force is over: cut its exchange."""
        if not self.is_quiet:
            self._hub.abort(reason)
            self.on_interrupted()
        with self.changed:
            self.changed.notify_all()

    # -- threads of the exchange --------------------------------------------------------

    def _faulted_at_first(self, fault: Fault) -> None:
        """One of the exchanges broke that were opened before there was an epoch."""
        if self._first:  # else the coordinator knows of nobody yet
            self._faulted(self._first, fault)

    def _faulted(self, epoch: int, fault: Fault) -> None:
        """An exchange broke here, before the coordinator knew of it."""
        if self._is_closed or self._client.interruption(epoch) is not None:
            return
        reason = fault.detail.partition(" ended it: ")[2] or fault.detail
        if self._note_fault(epoch, reason):
            self._client.suspect(epoch, [self._names[r] for r in fault.suspects], reason)
            self.on_interrupted()

    def _note_fault(self, epoch: int, reason: str) -> bool:
        with self.changed:
            if self._fault is not None and self._fault[0] >= epoch:
                return False
            self._fault = (epoch, reason)
            self.changed.notify_all()
            return True

    # -- the thread ---------------------------------------------------------------------

    def _build_epochs(self, after: int) -> None:
        try:
            while not self._is_closed:
                epoch = self._client.find_epoch(after, _LONGEST_EPOCH_WAIT_S)
                self._build(epoch)
                after = epoch.epoch
        except MembershipEnded:
            return  # the training hears of it when it asks
        except Exception as error:
            if self._is_closed:
                return
            logger.exception("no epochs are built any more")
            with self.changed:
                self.failure = f"no exchange can be built any more: {error}"
                self.changed.notify_all()

    def _build(self, epoch: NewEpoch) -> None:
        self._hub.abort(epoch.reason)  # whatever of an older one still stands
        growth = self._grow(epoch)
        ranks = tuple(sorted(self._names.index(m.member_id) for m in epoch.members))
        try:
            self._hub = hub = self._successor(epoch.epoch, growth)
            limit_s = max(epoch.build_s, _SHORTEST_BUILD_S)
            collective = hub.open(ranks, "gradients", limit_s) if ranks[1:] else None
        except (GeartrainError, RuntimeError, ConnectionError) as error:
            self._give_up(epoch.epoch, str(error))
            return
        self.on_gone(self.gone())
        with self.changed:
            self.built = Gathering(
                generation=epoch.epoch,
                num_steps=epoch.step,
                ranks=ranks,
                incarnations={
                    self._names.index(m.member_id): m.incarnation for m in epoch.members
                },
                hub=hub,
                collective=collective,
                reason=epoch.reason,
                grown=growth,
            )
            self.changed.notify_all()

    def _successor(self, epoch: int, growth: Growth | None) -> ExchangeHub:
        hub = self._hub
        if growth is not None:
            place = replace(hub.place, device_ids=self._names)
            hub = replace(hub, place=place, network=growth.network)
        return hub.successor(
            _clone(self._store, f"epoch/{epoch}"),
            partial(self._faulted, epoch),
            partial(self._client.interruption, epoch),
        )

    def _give_up(self, epoch: int, reason: str) -> None:
        self._hub.abort(reason)
        is_new = self._note_fault(epoch, reason)
        # Else the fault was told already, or the coordinator knows more than this rank.
        if is_new and self._client.interruption(epoch) is None:
            self._client.suspect(epoch, (), reason)

    def _grow(self, epoch: NewEpoch) -> Growth | None:
        """Learn of devices that the job did not have, from the launcher's list of them."""
        if all(member.member_id in self._names for member in epoch.members):
            return self._known_growth()
        fleet = read_document(self._fleet_path, Fleet)
        places = {m.member_id: m.facts.get(PLACE_FACT, "") for m in epoch.members}
        known = self._hub.network.ranks
        added = [d.device_id for d in fleet.devices[len(known) :]]
        facts = [
            msgspec.json.decode(places[name], type=RankFacts)
            if places.get(name)
            else known[0]
            for name in added
        ]
        self._names = tuple(device.device_id for device in fleet.devices)
        self._fleet = fleet
        network = with_ranks(self._hub.network, facts, self._names)
        self._hub = replace(self._hub, network=network)
        return Growth(fleet=fleet, network=network)

    def _known_growth(self) -> Growth | None:
        """An epoch may be over before the training takes up what it brought."""
        if self._fleet is None:
            return None
        return Growth(fleet=self._fleet, network=self._hub.network)

    def _describe(self, lost: LostMember, now_s: float) -> Gone:
        return Gone(
            rank=self._names.index(lost.member_id),
            incarnation=lost.incarnation,
            reason=lost.reason,
            at_s=now_s - lost.noticed_ago_s,
            silent_s=lost.silent_s,
            is_failure=lost.is_failure,
        )


def _clone(store: Store, prefix: str) -> Store:
    """A client of its own for a thread; a connection may take a while."""
    clone: Callable[[], Store] = store.clone  # type: ignore[attr-defined]  # no stub
    return PrefixStore(prefix, within(_STORE_S, clone, "the store"))


def check_built(builder: EpochBuilder) -> None:
    """Look whether epochs are built at all.

    Raises:
        CommunicationError: If not.
    """
    if builder.failure is not None:
        raise CommunicationError(builder.failure)
