"""Finds out, beside the training, who is left after a fault, and joins them anew.

A thread does it and not the training itself: a rank may compute for minutes before it looks
at an exchange again, and must sign the list of survivors at once, or pass for lost.
Exchanges among the survivors are opened here as well, so that their heartbeats go on and
the next loss is noticed, too, while the others still compute.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from torch._C._distributed_c10d import PrefixStore

from geartrain.collectives.faults.bounded import within
from geartrain.collectives.faults.roll_call import roll_call
from geartrain.errors import CommunicationError, GeartrainError
from geartrain.parallel.membership import ClosedMembership, Gathering, Gone, OnGone

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

    from geartrain.collectives.exchange_hub import ExchangeHub
    from geartrain.collectives.faults.fault import Fault
    from geartrain.parallel.commit import Committer, StepName

logger = logging.getLogger(__name__)

_ROLL_CALL_S = 3.0
"""Deadline for signing. Who is not suspected signs within milliseconds; the rest is for
machines that are short of processors, and for several losses at once."""
_BENEFIT_OF_DOUBT_S = 0.1
"""Head start for signing of those that are suspected but live."""
_OPEN_S = 8.0
"""Deadline for opening an exchange among those that signed."""
_NOTICE_S = 2.0
"""An exchange that failed by a fault has been reported before, or is within moments."""
_SETTLE_S = 120.0
_STORE_S = 20.0
_MOST_ATTEMPTS = 16


class Survivors(ClosedMembership):
    """The members of a job as this rank knows them.

    Args:
        store: Shared by all ranks, under a prefix of the session; it is cloned.
        rank: This process.
        hub: Of all ranks; its faults are followed from now on.
        min_devices: With fewer ranks left nobody goes on.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        hub: ExchangeHub,
        *,
        min_devices: int = 1,
    ) -> None:
        self._store = store
        self._calls = _clone(store)
        self._rank = rank
        self._names = hub.place.device_ids
        self._min_devices = min_devices
        self._on_gone: OnGone | None = None
        self._gone: tuple[Gone, ...] = ()  # all so far
        self._on_interrupted: Callable[[], None] | None = None
        self.is_left_out = False
        """Whether the others go on without this rank."""
        self._changed = threading.Condition()
        self._faults: dict[int, Fault] = {}  # the first of each generation
        self._hub = hub  # of the generation reached
        self._ranks = tuple(range(len(self._names)))
        self._reached = 0
        self._is_gathering = False
        self._is_closed = False
        self._latest: Gathering | None = None
        self._failure: str | None = None
        self._num_told = 0  # of those that are gone
        self._settled = 0  # generation that the training goes on with
        hub.on_fault = partial(self._faulted, 0)

    def committer(self) -> Committer | None:
        """The ranks vote in their exchange."""
        return None

    def begin(self, name: StepName) -> None:
        """Nothing: who is there takes part."""

    def may_apply(self, name: StepName) -> bool:  # noqa: ARG002 - protocol
        """Where all that are left have voted, they decide it themselves."""
        return True

    def ready(self) -> None:
        """Nothing: who has come is ready."""

    def begin_step(self) -> None:
        """Nothing: only the exchange is watched."""

    def end_step(self, step_s: float) -> None:
        """Nothing."""

    def progress(self) -> None:
        """Nothing."""

    def interruption(self) -> str | None:
        """Why nothing more will come of the generation in force; None while all is well."""
        fault = self._faults.get(self._settled)
        return _reason(fault) if fault is not None else None

    def follow(
        self,
        on_gone: OnGone,
        on_interrupted: Callable[[], None],
        on_idle: Callable[[], None],  # noqa: ARG002 - protocol
    ) -> None:
        """Have functions called from the thread; what came before is told at once.

        Args:
            on_gone: With all that are gone, once an exchange among those left is open.
            on_interrupted: As soon as a member was lost; must not block.
            on_idle: Not called.
        """
        with self._changed:
            self._on_gone, self._on_interrupted = on_gone, on_interrupted
            gone, was_interrupted = self._gone, bool(self._faults)
        if was_interrupted:
            on_interrupted()
        if gone:
            on_gone(gone)

    def check(self) -> None:
        """Look whether the generation in force has ended, without waiting.

        Raises:
            CommunicationError: If so.
        """
        reason = self.interruption()
        if reason is not None:
            raise CommunicationError(reason)

    def gathered(self) -> Gathering | None:
        """Wait for the others after a failure; the training goes on with what it says.

        Returns:
            Those that are left; None if no member was lost, so that the failure has
            another reason.

        Raises:
            CommunicationError: If nobody can go on, or not this rank.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: self._settled in self._faults, _NOTICE_S):
                return None
            self._changed.wait_for(
                lambda: self._failure is not None or self._newer() is not None, _SETTLE_S
            )
            newer = self._newer()
            if newer is None:
                msg = self._failure or f"nobody answered within {_SETTLE_S:g} s"
                raise CommunicationError(msg)
            self._settled = newer.generation
            gone, self._num_told = self._gone[self._num_told :], len(self._gone)
            return replace(newer, gone=gone)

    def part(self) -> None:
        """Nothing: exchanges are closed in order."""

    def close(self, *, in_order: bool) -> None:  # noqa: ARG002 - protocol
        """Gather no more: the session ends."""
        with self._changed:
            self._is_closed = True

    def _newer(self) -> Gathering | None:
        latest = self._latest
        if latest is None or latest.generation <= self._settled:
            return None
        return None if latest.generation in self._faults else latest

    # -- the thread ---------------------------------------------------------------------

    def _faulted(self, generation: int, fault: Fault) -> None:
        with self._changed:
            if self._is_closed or generation in self._faults:
                return
            self._faults[generation] = fault
            self._changed.notify_all()
            if generation != self._reached or self._is_gathering:
                return  # the thread at work will see it
            self._is_gathering = True
        threading.Thread(target=self._gather, name="survivors", daemon=True).start()

    def _gather(self) -> None:
        try:
            while self._join_next():
                pass
        except (GeartrainError, RuntimeError, ConnectionError) as error:
            self._fail(str(error))

    def _join_next(self) -> bool:
        """Join those that are left; whether one of them was lost meanwhile."""
        fault = self._faults[self._reached]
        self._hub.abort(fault.detail)
        if self._on_interrupted is not None:
            self._on_interrupted()
        gathering = self._find_members(fault, fault.at_s)
        with self._changed:
            on_gone, self._gone = self._on_gone, (*self._gone, *gathering.gone)
            gone = self._gone
        if on_gone is not None:
            on_gone(gone)
        with self._changed:
            self._hub, self._ranks = gathering.hub, gathering.ranks
            self._reached, self._latest = gathering.generation, gathering
            self._is_gathering = gathering.generation in self._faults
            self._changed.notify_all()
            return self._is_gathering

    def _find_members(self, fault: Fault, noticed_at_s: float) -> Gathering:
        ranks, reason = self._ranks, _reason(fault)
        suspects = set(fault.suspects)
        for attempt in range(1, _MOST_ATTEMPTS + 1):
            generation = self._reached + attempt
            expected = set(ranks) - suspects
            started_at_s = time.monotonic()
            if suspects and self._rank not in suspects:
                time.sleep(_BENEFIT_OF_DOUBT_S)  # the list closes without the suspects
            ranks = roll_call(
                self._calls, generation, self._rank, _ROLL_CALL_S, expected | {self._rank}
            )
            self._check(ranks, reason)
            called_at_s = time.monotonic()
            hub = self._hub.successor(
                _clone(self._store, f"survivors/{generation}"),
                partial(self._faulted, generation),
            )
            try:
                collective = hub.open(ranks, "gradients", _OPEN_S) if ranks[1:] else None
            except CommunicationError as error:
                logger.debug("generation %d: %s", generation, error)
                hub.abort(str(error))
                again = self._faults.get(generation)
                suspects = set(again.suspects) if again is not None else set()
                continue
            logger.debug(
                "generation %d: called in %.3f s, opened in %.3f s",
                generation,
                called_at_s - started_at_s,
                time.monotonic() - called_at_s,
            )
            return Gathering(
                generation=generation,
                ranks=ranks,
                hub=hub,
                collective=collective,
                reason=reason,
                gone=tuple(
                    Gone(
                        rank=rank,
                        incarnation=f"{rank}.0",
                        reason=_reason_of(rank, fault),
                        at_s=noticed_at_s,
                        silent_s=fault.silent_s,
                    )
                    for rank in self._ranks
                    if rank not in ranks
                ),
            )
        msg = f"{reason}; those left could not be joined in {_MOST_ATTEMPTS} attempts"
        raise CommunicationError(msg)

    def _check(self, ranks: tuple[int, ...], reason: str) -> None:
        if self._rank not in ranks:
            self.is_left_out = True
            msg = (
                f"the others go on without {self._names[self._rank]}, which did not answer "
                "in time; what it computed since was not applied"
            )
            raise CommunicationError(msg)
        if len(ranks) < self._min_devices:
            msg = (
                f"{reason}; {len(ranks)} devices are left, fewer than "
                f"min_devices={self._min_devices}; start again and load the last save"
            )
            raise CommunicationError(msg)

    def _fail(self, reason: str) -> None:
        with self._changed:
            self._failure = reason
            self._changed.notify_all()


def _reason(fault: Fault) -> str:
    """What was found, without who passed it on."""
    return fault.detail.partition(" ended it: ")[2] or fault.detail


def _reason_of(rank: int, fault: Fault) -> str:
    """Why a rank is not among those that are left."""
    if rank in fault.suspects:
        return _reason(fault)
    return f"it did not answer when the others gathered, since {_reason(fault)}"


def _clone(store: Store, prefix: str = "") -> Store:
    """A client of its own for a thread; a connection may take a while."""
    clone: Callable[[], Store] = store.clone  # type: ignore[attr-defined]  # no stub
    copy = within(_STORE_S, clone, "the store")
    return PrefixStore(prefix, copy) if prefix else copy
