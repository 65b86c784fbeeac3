"""What the coordinator decides, case by case, for a simulated fleet."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import msgspec

from geartrain.checkpoint.ranges import StateRange
from geartrain.elastic.events import Closed, Received, Send
from geartrain.elastic.limits import Limits
from geartrain.elastic.machine import handle
from geartrain.elastic.messages import (
    Answer,
    Commit,
    Dismiss,
    DrainAsked,
    Heal,
    Hold,
    Leave,
    NewEpoch,
    NotRestored,
    OperatorMessage,
    RewindAsked,
    ScaleAsked,
    Status,
    StatusAsked,
    Vote,
)
from geartrain.elastic.records import Committed, EpochFormed, Halted, Rewound
from simulated_fleet import ORIGIN, SimulatedFleet, fleet_of

OPERATOR = 10_000


def is_running(fleet: SimulatedFleet, names: str) -> Callable[[], bool]:
    return lambda: (fleet.state.members, fleet.state.phase) == (tuple(names), "running")


def sent(fleet: SimulatedFleet, kind: type) -> list[Any]:
    return [message for _, message in fleet.sent if isinstance(message, kind)]


def ask(fleet: SimulatedFleet, message: OperatorMessage) -> Any:
    fleet.sent.clear()
    fleet.handle(Received(connection=OPERATOR, message=message))
    return next(m for m in (*sent(fleet, Answer), *sent(fleet, Status)))


def test_nobody_trains_before_all_expected_members_are_there() -> None:
    fleet = SimulatedFleet(Limits(expected_members=3, start_s=5.0))
    fleet.start("a")
    fleet.start("b")
    fleet.run_until(lambda: fleet.now_s > 4.9)
    assert not fleet.epochs
    fleet.run_until(lambda: bool(fleet.epochs))
    assert fleet.now_s >= 5.0


def test_killed_member_costs_the_others_one_step() -> None:
    fleet = fleet_of("abcd")
    step = fleet.state.facts.step
    fleet.kill("b")
    assert fleet.run_steps(1) < 0.1
    assert fleet.state.members == ("a", "c", "d")
    assert fleet.state.facts.step <= step + 2
    (lost,) = sent(fleet, NewEpoch)[-1].lost
    assert lost.member_id == "b"
    assert lost.is_failure


def test_all_others_are_told_in_the_event_that_shows_a_loss() -> None:
    fleet = fleet_of("abc")
    connection = fleet.alive["b"].connection
    _, actions = handle(
        fleet.state, Closed(connection=connection, reason="gone"), fleet.now_s
    )
    told = {
        a.connection for a in actions if isinstance(a, Send) and type(a.message) is Hold
    }
    assert told == {fleet.alive["a"].connection, fleet.alive["c"].connection}


def test_three_lost_at_once_are_one_new_epoch() -> None:
    fleet = fleet_of("abcdefghij")
    epoch = fleet.state.facts.epoch
    for name in "cfh":
        fleet.kill(name)
    fleet.run_steps(1)
    assert fleet.state.facts.epoch == epoch + 1
    assert fleet.state.members == tuple("abdegij")


def test_survivors_get_no_state_transferred() -> None:
    fleet = fleet_of("abcd")
    fleet.kill("a")
    fleet.run_steps(3)
    assert all(not m.transfers for m in sent(fleet, NewEpoch))
    assert not sent(fleet, Heal)


def test_joiner_is_healed_beside_the_training_and_enters_after_a_commit() -> None:
    fleet = fleet_of("abc", catch_up_steps=1000)
    fleet.start("d", chain=[])
    step = fleet.state.facts.step
    fleet.run_until(is_running(fleet, "abcd"))
    assert fleet.state.facts.step > step  # the others trained on meanwhile
    assert {t.receiver for m in sent(fleet, Heal) for t in m.transfers} == {"d"}
    index = next(i for i, r in enumerate(fleet.records) if r == fleet.epochs[-1])
    assert isinstance(fleet.records[index - 1], Committed)
    assert sent(fleet, NewEpoch)[-1].joined == ("d",)


def test_members_hear_of_a_commit_and_of_the_epoch_behind_it_in_one_message() -> None:
    fleet = fleet_of("abc")
    fleet.start("d", chain=[])
    fleet.run_until(lambda: len(fleet.state.members) == 4)
    epoch = sent(fleet, NewEpoch)[-1]
    assert max(commit.step for commit in sent(fleet, Commit)) == epoch.step - 1
    assert {fleet.alive[name].step for name in "abc"} == {epoch.step}


def test_healed_joiner_is_a_holder_at_once() -> None:
    fleet = fleet_of("ab", lost_state_s=3.0)
    fleet.start("c", chain=[])
    fleet.run_until(lambda: fleet.state.phase == "building" and "c" in fleet.state.members)
    fleet.run_until(lambda: fleet.state.holds_state(fleet.state.peers["c"]))
    step = fleet.state.facts.step
    fleet.kill("a")
    fleet.kill("b")
    fleet.run_steps(2)
    assert fleet.state.members == ("c",)
    assert fleet.committed[step] == fleet.alive["c"].chain[step]


def test_member_of_another_history_gets_its_state_replaced() -> None:
    fleet = fleet_of("abc")
    stranger = ["ab" * 16, *("cd" * 16 for _ in range(fleet.state.facts.step))]
    fleet.start("d", chain=stranger)
    fleet.run_until(is_running(fleet, "abcd"))
    fleet.run_steps(1)
    assert fleet.alive["d"].chain[0] == ORIGIN
    assert any(note.kind == "diverged" for note in fleet.notes)


def test_votes_of_an_old_epoch_or_another_parent_are_refused() -> None:
    fleet = fleet_of("ab")
    facts, a, b = fleet.state.facts, fleet.alive["a"], fleet.alive["b"]
    old = Vote(
        epoch=facts.epoch - 1,
        step=facts.step + 1,
        lineage="ee" * 16,
        parent=facts.lineage,
    )
    for member in (a, b):
        fleet.handle(Received(connection=member.connection, message=old))
    assert fleet.state.facts.step == facts.step
    other = msgspec.structs.replace(old, epoch=facts.epoch, parent="dd" * 16)
    fleet.handle(Received(connection=a.connection, message=other))
    assert fleet.state.facts.step == facts.step
    assert "a" not in fleet.state.peers


def test_different_sums_are_applied_nowhere_and_the_step_is_done_again() -> None:
    fleet = fleet_of("abc")
    step = fleet.alive["b"].step + 3
    fleet.damaged.add(("b", step))
    fleet.run_steps(6)
    assert fleet.state.members == ("a", "b", "c")
    assert any("different sums" in note.text for note in fleet.notes)


def test_state_without_a_holder_is_never_elected() -> None:
    fleet = fleet_of("ab", lost_state_s=1.0)
    fleet.start("c", chain=[])
    fleet.run_until(lambda: fleet.alive["c"].step > 0)
    fleet.alive["c"].chain.pop()  # it is one step behind, and stays so
    fleet.alive["c"].connect()
    fleet.kill("a")
    fleet.kill("b")
    fleet.run_until(lambda: fleet.state.phase == "halted")
    assert fleet.halt_kind() == "no_state"


def test_halted_run_goes_on_only_where_it_is_told_to() -> None:
    fleet = fleet_of("ab", lost_state_s=0.5)
    fleet.kill("a")
    fleet.kill("b")
    fleet.start("c")
    fleet.run_until(lambda: fleet.state.phase == "halted")
    member = fleet.alive["c"]
    fleet.committed.clear()
    request = RewindAsked(request_id=1, step=0, lineage=member.lineage, reason="from disk")
    state, actions = handle(
        fleet.state, Received(connection=OPERATOR, message=request), fleet.now_s
    )
    assert [type(a.record) for a in actions if hasattr(a, "record")] == [
        Rewound,
        EpochFormed,
    ]
    assert (state.facts.step, state.facts.halted) == (0, None)
    assert state.facts.epoch == fleet.state.facts.epoch + 1


def shards(fleet: SimulatedFleet, sizes: dict[str, tuple[int, int]]) -> None:
    for name, (start, stop) in sizes.items():
        fleet.start(name, holds=(StateRange(name="w", start=start, stop=stop),))
    fleet.run_steps(3)


def test_range_without_a_live_holder_is_named() -> None:
    fleet = SimulatedFleet(Limits(expected_members=3, lost_state_s=0.5))
    shards(fleet, {"a": (0, 10), "b": (10, 70), "c": (60, 100)})
    fleet.kill("b")
    fleet.run_until(lambda: fleet.state.phase == "halted")
    halted = fleet.state.facts.halted
    assert halted is not None
    assert halted.ranges == (StateRange(name="w", start=10, stop=60),)


def test_range_without_a_live_holder_is_restored_from_tier_1() -> None:
    limits = Limits(expected_members=3, restores_from_tier_1=True)
    fleet = SimulatedFleet(limits)
    shards(fleet, {"a": (0, 10), "b": (10, 70), "c": (60, 100)})
    fleet.kill("b")
    step = fleet.state.facts.step
    fleet.run_steps(3)
    (restore,) = sent(fleet, NewEpoch)[-1].restores
    # "a" holds the fewest elements.
    missing = StateRange(name="w", start=10, stop=60)
    assert (restore.receiver, restore.ranges) == ("a", (missing,))
    assert fleet.state.peers["a"].holds == (StateRange(name="w", start=0, stop=60),)
    assert fleet.state.facts.step <= step + 4


def test_range_that_is_not_in_tier_1_halts_the_run() -> None:
    fleet = SimulatedFleet(Limits(expected_members=2, restores_from_tier_1=True))
    shards(fleet, {"a": (0, 10), "b": (10, 70)})
    fleet.kill("b")
    fleet.run_until(lambda: fleet.state.phase == "building")
    facts = fleet.state.facts
    missing = (StateRange(name="w", start=10, stop=70),)
    message = NotRestored(
        epoch=facts.epoch,
        step=facts.step,
        lineage=facts.lineage,
        ranges=missing,
        reason="-",
    )
    connection = fleet.alive["a"].connection
    fleet.handle(Received(connection=connection, message=message))
    assert isinstance(fleet.records[-1], Halted)
    assert fleet.records[-1].ranges == missing


def test_leaving_shard_hands_its_ranges_over_before_it_goes() -> None:
    fleet = SimulatedFleet(Limits(expected_members=2))
    shards(fleet, {"a": (0, 50), "b": (50, 100)})
    b = fleet.alive["b"]
    b.is_leaving = True
    b.say(Leave(**b.where(), reason="preempted"))
    fleet.run_until(is_running(fleet, "a"))
    assert fleet.state.peers["a"].holds == (StateRange(name="w", start=0, stop=100),)
    assert not any(d.is_failure for d in sent(fleet, Dismiss))
    fleet.run_steps(2)


def test_drained_member_leaves_between_two_steps() -> None:
    fleet = fleet_of("abc")
    answer = ask(fleet, DrainAsked(request_id=7, member_ids=("b",)))
    assert (answer.request_id, answer.is_accepted) == (7, True)
    fleet.run_until(is_running(fleet, "ac"))
    assert not sent(fleet, Hold)  # no step failed
    assert fleet.state.facts.num_failures == 0
    assert [d.is_failure for d in sent(fleet, Dismiss)] == [False]


def test_drain_is_refused_below_min_members_and_for_strangers() -> None:
    fleet = fleet_of("ab", min_members=2)
    too_few = ask(fleet, DrainAsked(request_id=1, member_ids=("b",)))
    unknown = ask(fleet, DrainAsked(request_id=2, host_ids=("nowhere",)))
    assert not too_few.is_accepted
    assert "min_members=2" in too_few.text
    assert not unknown.is_accepted
    assert "nowhere" in unknown.text
    fleet.run_steps(2)
    assert fleet.state.members == ("a", "b")


def test_scale_takes_the_last_places_out_and_keeps_joiners_waiting() -> None:
    fleet = fleet_of("abcd")
    assert ask(fleet, ScaleAsked(request_id=1, num_members=2)).is_accepted
    fleet.run_until(is_running(fleet, "ab"))
    fleet.start("e")
    fleet.run_steps(10)
    assert fleet.state.members == ("a", "b")
    assert ask(fleet, ScaleAsked(request_id=2, num_members=3)).is_accepted
    fleet.run_until(is_running(fleet, "abe"))


def test_status_tells_members_from_joiners() -> None:
    fleet = fleet_of("ab", catch_up_steps=0, most_heals=1000)
    fleet.start("c", chain=[])
    fleet.deliver_up(fleet.alive["c"].connection)
    status = ask(fleet, StatusAsked(request_id=3))
    standing = {m.member_id: m.standing for m in status.members}
    assert standing == {"a": "member", "b": "member", "c": "joining"}


def test_too_few_members_wait_and_then_halt() -> None:
    fleet = fleet_of("abc", min_members=3, hold_s=5.0)
    fleet.kill("c")
    fleet.run_until(lambda: fleet.state.phase == "holding")
    step = fleet.state.facts.step
    fleet.run_until(lambda: fleet.state.phase == "halted")
    assert fleet.state.facts.step == step
    assert fleet.halt_kind() == "too_few"


def test_member_that_keeps_failing_waits_longer_each_time() -> None:
    fleet = fleet_of("abc", backoff_s=1.0)
    waits = []
    for _ in range(4):
        fleet.kill("c")
        fleet.run_steps(1)
        fleet.start("c")
        waits.append(fleet.run_until(is_running(fleet, "abc")))
    assert waits[0] < 0.5
    assert [round(wait_s) for wait_s in waits[1:]] == [1, 2, 4]


def test_member_that_failed_too_often_is_not_admitted_any_more() -> None:
    fleet = fleet_of("abc", max_member_failures=1)
    for _ in range(2):
        fleet.kill("c")
        fleet.run_steps(1)
        fleet.start("c")
        fleet.run_steps(3)
    assert fleet.state.members == ("a", "b")
    assert sent(fleet, Dismiss)[-1].may_return_after_s < 0


def test_too_many_failures_halt_the_run() -> None:
    fleet = fleet_of("abcd", max_failures=1)
    fleet.kill("a")
    fleet.kill("b")
    fleet.tick()
    assert fleet.halt_kind() == "too_many_failures"


def test_commits_are_journaled_before_they_are_sent() -> None:
    fleet = fleet_of("ab")
    assert len(sent(fleet, Commit)) >= 2
    known = {r.step for r in fleet.records if isinstance(r, Committed)}
    assert {c.step for c in sent(fleet, Commit)} <= known
    facts = fleet.state.facts
    vote = Vote(
        epoch=facts.epoch, step=facts.step + 1, lineage="ab" * 16, parent=facts.lineage
    )
    a, b = (fleet.alive[name].connection for name in "ab")
    state, _ = handle(fleet.state, Received(connection=a, message=vote), fleet.now_s)
    _, actions = handle(state, Received(connection=b, message=vote), fleet.now_s)
    kinds = [
        type(getattr(a, "record", None) or getattr(a, "message", None)) for a in actions
    ]
    assert kinds == [Committed, Commit, Commit]


def test_deciding_needs_no_torch() -> None:
    code = (
        "import sys, geartrain.elastic.machine, geartrain.elastic.journal;"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
