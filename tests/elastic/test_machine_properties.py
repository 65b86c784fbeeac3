"""Random kills, joins, delays, returns of the coordinator: what must hold all the same."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from geartrain.elastic.events import Tick
from geartrain.elastic.limits import Limits
from geartrain.elastic.messages import Leave
from simulated_fleet import NOT_CONNECTED, ORIGIN, Member, SimulatedFleet

NAMES = "abcde"
LIMITS = Limits(
    min_members=2,
    expected_members=3,
    start_s=5.0,
    hold_s=1000.0,
    rejoin_s=0.5,
    unmeasured_s=2.0,
    away_s=5.0,
    transfer_s=3.0,
    lost_state_s=5.0,
    drain_s=2.0,
    backoff_s=0.2,
    longest_backoff_s=1.0,
    catch_up_steps=3,
)
SETTLED_WITHIN_S = 40.0
"""A bound for any sequence of deadlines above; what matters is that there is one."""


class Fleet(RuleBasedStateMachine):
    """Hypothesis chooses what happens; the simulated fleet checks every record."""

    def __init__(self) -> None:
        super().__init__()
        self.fleet = SimulatedFleet(LIMITS)

    @initialize(is_begun=st.booleans())
    def begin(self, is_begun: bool) -> None:
        for name in NAMES[:3]:
            self.fleet.start(name)
        if is_begun:
            self.fleet.run_steps(3)

    def pick(self, index: int) -> Member | None:
        members = sorted(self.fleet.alive.values(), key=lambda m: m.member_id)
        return members[index % len(members)] if members else None

    @rule(name=st.sampled_from(NAMES), is_blank=st.booleans())
    def start(self, name: str, is_blank: bool) -> None:
        self.fleet.start(name, chain=[] if is_blank else [ORIGIN])

    @rule(index=st.integers(0, 4))
    def kill(self, index: int) -> None:
        if (member := self.pick(index)) and len(self.fleet.alive) > 1:
            self.fleet.kill(member.member_id)

    @rule(index=st.integers(0, 4), is_frozen=st.booleans())
    def freeze_or_thaw(self, index: int, is_frozen: bool) -> None:
        if member := self.pick(index):
            member.is_frozen = is_frozen

    @rule(index=st.integers(0, 4), is_hung=st.booleans())
    def hang_or_go_on(self, index: int, is_hung: bool) -> None:
        if member := self.pick(index):
            member.is_hung = is_hung

    @rule(index=st.integers(0, 4))
    def leave(self, index: int) -> None:
        member = self.pick(index)
        if member and member.connection != NOT_CONNECTED and not member.is_frozen:
            member.is_leaving = True
            member.say(Leave(**member.where(), reason="preempted"))

    @rule(index=st.integers(0, 4))
    def break_connection(self, index: int) -> None:
        member = self.pick(index)
        if member and member.connection in self.fleet.up:
            self.fleet.up[member.connection].append(None)
            self.fleet.owner.pop(member.connection, None)
            member.connection = NOT_CONNECTED

    @rule(index=st.integers(0, 4))
    def reconnect_before_the_end_is_seen(self, index: int) -> None:
        member = self.pick(index)
        if member and member.connection != NOT_CONNECTED and not member.is_frozen:
            self.fleet.owner.pop(member.connection, None)
            member.connect()

    @rule(index=st.integers(0, 4))
    def damage_next_sum(self, index: int) -> None:
        if member := self.pick(index):
            self.fleet.damaged.add((member.member_id, member.step + 1))

    @rule(pair=st.sets(st.sampled_from(NAMES), min_size=2, max_size=2))
    def tear_or_mend_link(self, pair: set[str]) -> None:
        self.fleet.torn ^= {frozenset(pair)}

    @rule()
    def restart_coordinator(self) -> None:
        self.fleet.restart_coordinator()

    @rule(order=st.lists(st.integers(0, 4), max_size=8))
    def move(self, order: list[int]) -> None:
        for index in order:
            if member := self.pick(index):
                self.fleet.move(member)

    @rule(order=st.lists(st.tuples(st.booleans(), st.integers(0, 9)), max_size=12))
    def deliver(self, order: list[tuple[bool, int]]) -> None:
        for is_up, index in order:
            queues = self.fleet.up if is_up else self.fleet.down
            waiting = [c for c, queue in queues.items() if queue]
            if not waiting:
                continue
            connection = waiting[index % len(waiting)]
            member = self.fleet.owner.get(connection)
            if is_up:
                self.fleet.deliver_up(connection)
            elif member is None or not member.is_frozen:
                self.fleet.deliver_down(connection)

    @rule(count=st.integers(1, 40))
    def let_time_pass(self, count: int) -> None:
        for _ in range(count):
            self.fleet.tick(0.02)

    @rule(count=st.integers(1, 10))
    def let_time_pass_for_the_coordinator_only(self, count: int) -> None:
        for _ in range(count):
            self.fleet.now_s += 0.05
            self.fleet.handle(Tick())

    @invariant()
    def journal_adds_up_to_the_state(self) -> None:
        self.fleet.check_replay()

    @invariant()
    def state_is_consistent(self) -> None:
        state = self.fleet.state
        assert set(state.members) <= set(state.peers)
        assert set(state.votes) <= set(state.members)
        assert set(state.connections.values()) == set(state.peers)
        assert all(
            state.peers[name].connection == connection
            for connection, name in state.connections.items()
        )

    @invariant()
    def members_at_one_step_hold_one_state(self) -> None:
        # A chain of digests is all that a state is made of here.
        for member in self.fleet.alive.values():
            for step, lineage in enumerate(member.chain[1:], start=1):
                assert self.fleet.committed.get(step) == lineage

    def teardown(self) -> None:
        fleet = self.fleet
        if fleet.is_halted():
            return
        fleet.torn.clear()
        fleet.damaged.clear()
        for member in fleet.alive.values():
            member.is_frozen = member.is_hung = False
        for name in NAMES:
            if name not in fleet.alive or fleet.alive[name].is_leaving:
                fleet.start(name, chain=[] if fleet.state.has_begun else [ORIGIN])
        before = fleet.state.facts.step
        fleet.run_until(
            lambda: fleet.state.facts.step >= before + 2 or fleet.is_halted(),
            SETTLED_WITHIN_S,
            step_s=0.05,
        )
        if fleet.is_halted():
            holders = [
                m for m in fleet.alive.values() if m.lineage == fleet.state.facts.lineage
            ]
            assert not holders, fleet.describe()


TestFleet = Fleet.TestCase
TestFleet.settings = settings(
    max_examples=40,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
