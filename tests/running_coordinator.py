"""A coordinator in a thread of the test, and workers that follow it."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import queue
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from geartrain.elastic.awake_clock import AwakeClock
from geartrain.elastic.client import Client
from geartrain.elastic.connection import Address
from geartrain.elastic.control import ControlSettings
from geartrain.elastic.greeting import Credentials
from geartrain.elastic.limits import Limits
from geartrain.elastic.link import Callbacks, Identity
from geartrain.elastic.machine import handle, resume
from geartrain.elastic.messages import Heal, NewEpoch
from geartrain.elastic.outcome import Committed, Interrupted
from geartrain.elastic.records import JournalRecord
from geartrain.elastic.server import LONGEST_AWAKE_STEP_S, Decisions, Server, bind
from geartrain.elastic.view import HeldState

START = "00" * 8
LIMIT_S = 20.0
CREDENTIALS = Credentials(run_id="test", token=b"0123456789abcdef")


@dataclass
class MemoryLedger:
    """A journal that a test can look into."""

    records: list[JournalRecord] = field(default_factory=list)

    def append(self, records: Sequence[JournalRecord], /) -> None:
        self.records += records


@dataclass
class Coordinator:
    """A server that runs in a thread."""

    server: Server
    address: Address
    ledger: MemoryLedger
    loop: asyncio.AbstractEventLoop

    def settings(self, *, reconnect_s: float = LIMIT_S) -> ControlSettings:
        return ControlSettings(
            credentials=CREDENTIALS,
            reconnect_s=reconnect_s,
            find_address=lambda: self.address,
        )


@contextlib.contextmanager
def coordinator(
    limits: Limits, *, ledger: MemoryLedger | None = None, port: int = 0
) -> Iterator[Coordinator]:
    """Run a coordinator; with a ledger it comes back from it."""
    ledger = ledger or MemoryLedger()
    clock = AwakeClock(LONGEST_AWAKE_STEP_S)
    state = resume(tuple(ledger.records), limits, clock.now_s())
    listening = bind("127.0.0.1", port, CREDENTIALS)
    address = listening.getsockname()
    server = Server(
        listening,
        CREDENTIALS,
        Decisions(handle=handle, state=state, ledger=ledger, clock=clock),
    )
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=lambda: loop.run_until_complete(server.serve()))
    thread.start()
    try:
        yield Coordinator(server, address, ledger, loop)
    finally:
        loop.call_soon_threadsafe(server.stop)
        thread.join(LIMIT_S)
        loop.close()


def next_lineage(before: str, step: int) -> str:
    return hashlib.blake2b(f"{before}/{step}".encode(), digest_size=8).hexdigest()


class Member:
    """A client and what a main loop does with it, one call at a time."""

    def __init__(self, name: str, settings: ControlSettings, **identity: object) -> None:
        self.name = name
        self.interruptions: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.client = Client(
            replace(
                Identity(member_id=name, incarnation=f"{name}-1", host_id="host"),
                **identity,  # type: ignore[arg-type]  # fields of Identity
            ),
            settings,
            Callbacks(on_interruption=self.interruptions.put, on_heal=self._heal),
        )
        self.epoch = 0
        self.step = 0
        self.lineage = START

    def start(self) -> Member:
        self.client.start(HeldState(step=self.step, lineage=self.lineage))
        return self

    def enter_epoch(self) -> NewEpoch:
        found = self.client.next_epoch(self.epoch, LIMIT_S)
        self.epoch = found.epoch
        if (found.step, found.lineage) != (self.step, self.lineage):
            self.step, self.lineage = found.step, found.lineage  # that is all of the state
            self.client.healed(found.step, found.lineage)
        self.client.ready(found.epoch)
        return found

    def follow(self, num_members: int) -> None:
        """Train until a step was made in a later epoch of so many members."""
        first_epoch, count = self.epoch, num_members
        while True:
            if self.client.interruption(self.epoch) is not None:
                count = len(self.enter_epoch().members)
            self.vote()
            is_committed = isinstance(self.settle(), Committed)
            if is_committed and self.epoch > first_epoch and count == num_members:
                return

    def _heal(self, heal: Heal) -> None:
        """Copy the state beside the training: here, the lineage is all of it."""
        if any(transfer.receiver == self.name for transfer in heal.transfers):
            self.step, self.lineage = heal.step, heal.lineage
            self.client.healed(heal.step, heal.lineage)

    def vote(self) -> None:
        step = self.step + 1
        self.client.vote(self.epoch, step, next_lineage(self.lineage, step))

    def settle(self, limit_s: float = LIMIT_S) -> Committed | Interrupted:
        outcome = self.client.wait_commit(self.epoch, self.step + 1, limit_s)
        if isinstance(outcome, Committed):
            self.step, self.lineage = outcome.step, outcome.lineage
        return outcome


@contextlib.contextmanager
def members(
    names: str, settings: ControlSettings, *, have_begun: bool = True
) -> Iterator[list[Member]]:
    """One member a letter, all in an epoch together."""
    found = [Member(name, settings, place=i).start() for i, name in enumerate(names)]
    try:
        if have_begun:
            for member in found:
                member.enter_epoch()
        yield found
    finally:
        for member in found:
            member.client.close()


def follow_together(found: Sequence[Member]) -> None:
    """All at once, each in its main loop, until they are all in one epoch again."""
    threads = [threading.Thread(target=m.follow, args=(len(found),)) for m in found]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    assert len({(m.epoch, m.step, m.lineage) for m in found}) == 1


def commit_together(found: Sequence[Member]) -> None:
    """One step of all."""
    for member in found:
        member.vote()
    for member in found:
        assert isinstance(member.settle(), Committed)
