"""A fleet of simulated members around the real machine: messages, but no sockets or clock.

Messages of one connection arrive in order, those of different ones in any. The state of a
member is stood for by the chain of digests of the steps that it has applied.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from geartrain.checkpoint.ranges import StateRange
from geartrain.elastic.events import (
    TICK_S,
    Close,
    Closed,
    Event,
    Note,
    Received,
    Record,
    Send,
    Tick,
)
from geartrain.elastic.limits import Limits
from geartrain.elastic.lineage import first_lineage, next_lineage
from geartrain.elastic.machine import begin, handle, resume
from geartrain.elastic.messages import (
    WHOLE_STATE,
    Beat,
    Commit,
    Dismiss,
    Halt,
    Heal,
    Healed,
    Hold,
    Join,
    MemberMessage,
    NewEpoch,
    Ready,
    Suspect,
    Vote,
    decode_from_coordinator,
    decode_to_coordinator,
    encode,
)
from geartrain.elastic.records import Committed, EpochFormed, Halted, JournalRecord, replay
from geartrain.elastic.turn import OfState

ORIGIN = first_lineage("simulated")
STEP_S = 0.1
NOT_CONNECTED = -1


@dataclass
class Member:
    """One process: what a worker's client and main loop do, without their threads."""

    fleet: SimulatedFleet
    member_id: str
    incarnation: str
    chain: list[str] = field(default_factory=lambda: [ORIGIN])
    epoch: int = 0
    order: NewEpoch | None = None
    is_ready: bool = False
    vote: tuple[int, str] | None = None
    has_given: bool = False
    progress: int = 0
    connection: int = NOT_CONNECTED
    is_frozen: bool = False
    is_hung: bool = False
    is_over: bool = False
    is_leaving: bool = False
    holds: tuple[StateRange, ...] = (WHOLE_STATE,)
    heals: deque[Heal] = field(default_factory=deque)
    last_beat_s: float = -1.0

    @property
    def step(self) -> int:
        return len(self.chain) - 1

    @property
    def lineage(self) -> str:
        return self.chain[-1] if self.chain else ""

    def where(self) -> OfState:
        return {"epoch": self.epoch, "step": max(self.step, 0), "lineage": self.lineage}

    def connect(self) -> None:
        self.connection = self.fleet.open(self)
        self.is_ready, self.order, self.has_given = False, None, False
        self.heals.clear()
        self.say(
            Join(
                **self.where(),
                member_id=self.member_id,
                incarnation=self.incarnation,
                host_id=f"host of {self.member_id}",
                recent=tuple(self.chain[:-1][-64:]),
                voted_step=self.vote[0] if self.vote else 0,
                voted_lineage=self.vote[1] if self.vote else "",
                holds=self.holds,
                wants=self.holds,
            )
        )

    def say(self, message: MemberMessage) -> None:
        if self.connection in self.fleet.up:
            self.fleet.up[self.connection].append(encode(message))

    def beat(self) -> None:
        if (
            self.connection == NOT_CONNECTED
            or self.fleet.now_s - self.last_beat_s < TICK_S - 1e-9
        ):
            return
        self.last_beat_s = self.fleet.now_s
        is_waiting = self.vote is not None or self.has_given or self.order is None
        phase: Literal["step", "waiting"] = "step"
        if is_waiting and not self.is_hung:
            phase = "waiting"
        self.say(Beat(**self.where(), progress=self.progress, phase=phase, step_s=STEP_S))

    def hear(self, message: object) -> None:
        """What the control thread does."""
        if isinstance(message, Commit | NewEpoch | Hold):
            self._settle(message)
        if isinstance(message, Commit):
            assert self.step >= message.step, "a commit that it has not voted for"
        elif isinstance(message, NewEpoch):
            assert message.epoch > self.epoch or message.epoch == self.epoch
            self.epoch, self.order = message.epoch, message
            self.is_ready, self.vote, self.has_given = False, None, False
        elif isinstance(message, Hold):
            self.order, self.is_ready, self.has_given = None, False, False
            self.vote = None
        elif isinstance(message, Heal):
            self.heals.append(message)
        elif isinstance(message, Dismiss):
            self.is_over = message.may_return_after_s < 0
        elif isinstance(message, Halt):
            self.order = None

    def _settle(self, message: Commit | NewEpoch | Hold) -> None:
        """Whatever names the state that its vote leads to says that all have voted."""
        if self.vote == (message.step, message.lineage):
            self.fleet.applied(self, message.step, message.lineage)
            self.chain.append(message.lineage)
            self.vote = None
            self.has_given = False
            self.progress += 1

    def work(self) -> None:
        """What the main loop does next."""
        if self.is_hung:
            return
        if self.order is None:
            self.progress += 1  # it wakes up now and then while it waits
        if self.heals:
            self._copy(self.heals.popleft())
        elif self.order is not None and not self.is_ready:
            self._take_up(self.order)
        elif self.order is not None and self.vote is None:
            self._train(self.order)

    def _copy(self, heal: Heal) -> None:
        mine = [t for t in heal.transfers if t.receiver == self.member_id]
        giver = self.fleet.alive.get(mine[0].giver) if mine else None
        if giver is not None and not giver.is_frozen and giver.chain:
            self.chain = list(giver.chain)
            self.say(Healed(**self.where()))
            self.progress += 1

    def _take_up(self, order: NewEpoch) -> None:
        for transfer in order.transfers:
            if transfer.receiver != self.member_id:
                continue
            giver = self.fleet.alive.get(transfer.giver)
            if giver is None or giver.is_frozen or giver.lineage != order.lineage:
                return
            self.chain = list(giver.chain)
            self.say(Healed(**self.where()))
        if self.lineage != order.lineage:
            return
        self.is_ready = True
        self.progress += 1
        self.say(Ready(**self.where()))

    def _train(self, order: NewEpoch) -> None:
        torn = [
            place.member_id
            for place in order.members
            if frozenset({place.member_id, self.member_id}) in self.fleet.torn
        ]
        if torn:
            self.say(Suspect(**self.where(), member_ids=tuple(torn), reason="torn"))
            self.order = None
            return
        key = (self.epoch, self.step + 1)
        given = self.fleet.given.setdefault(key, set())
        given.add(self.incarnation)
        self.has_given = True
        if given < {place.incarnation for place in order.members}:
            return
        digest = f"epoch {self.epoch} step {self.step + 1}".encode()
        if (self.member_id, self.step + 1) in self.fleet.damaged:
            self.fleet.damaged.remove((self.member_id, self.step + 1))
            digest += b" damaged"
        lineage = next_lineage(self.lineage, self.step + 1, digest)
        self.vote = (self.step + 1, lineage)
        self.fleet.votes.add((self.incarnation, self.epoch, *self.vote))
        step, parent = self.step + 1, self.lineage
        self.say(Vote(epoch=self.epoch, step=step, lineage=lineage, parent=parent))


class SimulatedFleet:
    """The members, the coordinator, and what travels between them."""

    def __init__(self, limits: Limits | None = None) -> None:
        self.limits = limits or Limits()
        self.now_s = 0.0
        self.records: list[JournalRecord] = []
        self.state = begin(self.limits, 0.0)
        self.alive: dict[str, Member] = {}
        self.up: dict[int, deque[bytes | None]] = {}
        self.down: dict[int, deque[bytes | None]] = {}
        self.owner: dict[int, Member] = {}
        self.given: dict[tuple[int, int], set[str]] = {}
        self.votes: set[tuple[str, int, int, str]] = set()
        self.damaged: set[tuple[str, int]] = set()
        self.torn: set[frozenset[str]] = set()
        self.committed: dict[int, str] = {}
        self.notes: list[Note] = []
        self.epochs: list[EpochFormed] = []
        self.sent: list[tuple[str, object]] = []
        self._next = 0

    def start(self, member_id: str, **facts: Any) -> Member:
        """Start a process of a member; a running one is killed."""
        if member_id in self.alive:
            self.kill(member_id)
        self._next += 1
        member = Member(self, member_id, f"process-{self._next}", **facts)
        self.alive[member_id] = member
        member.connect()
        return member

    def kill(self, member_id: str) -> None:
        member = self.alive.pop(member_id)
        if member.connection != NOT_CONNECTED:
            if member.connection in self.up:
                self.up[member.connection].append(None)
            self.owner.pop(member.connection, None)

    def open(self, member: Member) -> int:
        self._next += 1
        self.up[self._next], self.down[self._next] = deque(), deque()
        self.owner[self._next] = member
        return self._next

    def restart_coordinator(self, *, lose_records: int = 0) -> None:
        """Kill -9 and start anew; the last records may not have been on disk."""
        if lose_records:
            del self.records[-lose_records:]
        self.up.clear()
        self.down.clear()
        self.owner.clear()
        self.state = resume(self.records, self.limits, self.now_s)
        for member in self.alive.values():
            member.connection = NOT_CONNECTED

    def deliver_up(self, connection: int) -> None:
        """The coordinator hears the next message of a connection."""
        line = self.up[connection].popleft()
        if line is None:
            del self.up[connection]
            self.down.pop(connection, None)
            self.handle(Closed(connection=connection, reason="its connection closed"))
        else:
            message = decode_to_coordinator(line[:-1])
            self.handle(Received(connection=connection, message=message))

    def deliver_down(self, connection: int) -> None:
        """A member hears the next message of its connection."""
        member = self.owner.get(connection)
        if member is None:
            self.down[connection].clear()
            return
        line = self.down[connection].popleft()
        if line is None:
            self.owner.pop(connection)
            self.down.pop(connection)
            self.up.pop(connection, None)
            if member.connection == connection:
                member.connection = NOT_CONNECTED
                member.order = None
                if member.is_over or member.is_leaving:
                    self.alive.pop(member.member_id, None)
        else:
            member.hear(decode_from_coordinator(line[:-1]))

    def handle(self, event: Event) -> None:
        """Let the machine decide, and carry its actions out."""
        before = self.state.facts
        self.state, actions = handle(self.state, event, self.now_s)
        for action in actions:
            if isinstance(action, Record):
                self.records.append(action.record)
                self.check_record(action.record)
            elif isinstance(action, Send):
                self.sent.append(("", action.message))
                if action.connection in self.down:
                    self.down[action.connection].append(encode(action.message))
            elif isinstance(action, Close):
                if action.connection in self.down:
                    self.down[action.connection].append(None)
                self.up.pop(action.connection, None)
            else:
                self.notes.append(action)
        assert self.state.facts.epoch >= before.epoch, "an epoch went back"
        assert self.state.facts.step >= before.step, "a step went back"

    def check_record(self, record: JournalRecord) -> None:
        if isinstance(record, EpochFormed):
            self.epochs.append(record)
        if isinstance(record, Halted) and WHOLE_STATE in record.ranges:
            lineage = self.state.facts.lineage
            holders = [m for m in self.live() if m.lineage == lineage and not m.is_leaving]
            assert not holders, f"{[m.member_id for m in holders]} hold it: {record.reason}"
        if isinstance(record, Committed):
            earlier = self.committed.setdefault(record.step, record.lineage)
            assert earlier == record.lineage, f"two lineages of step {record.step}"
            members = next(
                e.members for e in reversed(self.epochs) if e.epoch == record.epoch
            )
            for who in members:
                vote = (who.incarnation, record.epoch, record.step, record.lineage)
                assert vote in self.votes, f"{who} has not voted for {record}"

    def applied(self, member: Member, step: int, lineage: str) -> None:
        """A member applies a step."""
        assert self.committed.get(step) == lineage, "not committed"
        assert member.step == step - 1

    def is_halted(self) -> bool:
        """Whether the run waits for a person."""
        return self.state.phase == "halted"

    def halt_kind(self) -> str:
        """Why it does."""
        halted = self.state.facts.halted
        return halted.kind if halted else ""

    def live(self) -> list[Member]:
        """Processes that run."""
        return [m for m in self.alive.values() if not m.is_frozen]

    def move(self, member: Member) -> None:
        """One member's main loop and control thread do one thing each."""
        if member.is_frozen or member.member_id not in self.alive:
            return
        if member.connection == NOT_CONNECTED:
            member.connect()
        member.beat()
        member.work()

    def tick(self, step_s: float = 0.01) -> None:
        """Time passes; everything that is under way arrives, everybody gets on."""
        self.now_s += step_s
        for member in tuple(self.alive.values()):
            self.move(member)
        for connection in tuple(self.up):
            while self.up.get(connection):
                self.deliver_up(connection)
        self.handle(Tick())
        for connection in tuple(self.down):
            hearer = self.owner.get(connection)
            while self.down.get(connection) and not (hearer and hearer.is_frozen):
                self.deliver_down(connection)

    def run_until(
        self, condition: Callable[[], bool], within_s: float = 20.0, step_s: float = 0.01
    ) -> float:
        """Let time pass until something is true; returns how much did."""
        begin_s = self.now_s
        while not condition():
            assert self.now_s - begin_s < within_s, self.describe()
            self.tick(step_s)
        return self.now_s - begin_s

    def run_steps(self, count: int, within_s: float = 20.0) -> float:
        """Let time pass until so many more steps are committed."""
        wanted = self.state.facts.step + count
        return self.run_until(lambda: self.state.facts.step >= wanted, within_s)

    def describe(self) -> str:
        s, notes = self.state, [note.text for note in self.notes[-8:]]
        return (
            f"at {self.now_s:.2f} s: {s.phase} epoch {s.facts.epoch} step {s.facts.step} "
            f"of {s.members}, ready {sorted(s.ready)}, voted {sorted(s.votes)}, "
            f"{s.reason}; halted {s.facts.halted}; last notes {notes}"
        )

    def check_replay(self) -> None:
        """The journal adds up to what the coordinator knows."""
        assert replay(self.records) == self.state.facts


def fleet_of(names: str, **limits: Any) -> SimulatedFleet:
    """A fleet of one member a letter, which has made a few steps."""
    fleet = SimulatedFleet(Limits(expected_members=len(names), **limits))
    for name in names:
        fleet.start(name)
    fleet.run_steps(5)
    assert fleet.state.members == tuple(names)
    return fleet
