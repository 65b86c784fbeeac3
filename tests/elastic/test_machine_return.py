"""What the coordinator decides when it comes back, case by case, for a simulated fleet."""

from __future__ import annotations

from geartrain.elastic.events import Received
from geartrain.elastic.messages import Vote
from geartrain.elastic.records import Committed
from simulated_fleet import fleet_of


def test_coordinator_that_returns_loses_no_step_and_no_epoch() -> None:
    fleet = fleet_of("abc")
    step, epoch = fleet.state.facts.step, fleet.state.facts.epoch
    fleet.restart_coordinator()
    assert fleet.state.facts.step == step
    assert fleet.run_steps(1) < fleet.limits.rejoin_s  # it waits for nobody who is there
    assert fleet.state.facts.epoch == epoch + 1
    assert fleet.state.members == ("a", "b", "c")


def test_commit_that_was_journaled_but_not_heard_of_is_sent_again() -> None:
    fleet = fleet_of("abc")
    step = fleet.state.facts.step
    while fleet.state.facts.step == step:  # stop right after the decision
        for member in fleet.alive.values():
            fleet.move(member)
        for connection in tuple(fleet.up):
            while fleet.up[connection]:
                fleet.deliver_up(connection)
    # "a" has heard of it, the others have not.
    while fleet.alive["a"].step == step:
        fleet.deliver_down(fleet.alive["a"].connection)
    assert [fleet.alive[name].step for name in "abc"] == [step + 1, step, step]
    fleet.restart_coordinator()
    fleet.run_until(lambda: fleet.alive["c"].step == step + 1)
    assert fleet.alive["c"].lineage == fleet.committed[step + 1]
    fleet.run_steps(2)


def test_steps_that_the_journal_lost_with_its_host_are_proved_by_a_member() -> None:
    fleet = fleet_of("abc")
    while not all(isinstance(r, Committed) for r in fleet.records[-3:]):
        fleet.tick()
    fleet.run_until(lambda: {m.step for m in fleet.live()} == {fleet.state.facts.step})
    step = fleet.state.facts.step
    fleet.restart_coordinator(lose_records=3)
    assert fleet.state.facts.step == step - 3
    fleet.run_until(lambda: fleet.state.facts.step >= step)
    fleet.run_steps(3)


def test_members_that_do_not_come_back_are_lost() -> None:
    fleet = fleet_of("abc")
    fleet.kill("b")  # together with the coordinator
    fleet.restart_coordinator()
    took_s = fleet.run_steps(1)
    gap_s = fleet.limits.rejoin_gap_s  # after the last of the others
    assert gap_s <= took_s < fleet.limits.rejoin_s
    assert fleet.state.members == ("a", "c")


def test_votes_given_while_others_are_awaited_count_with_those_that_are_brought() -> None:
    """Members compute on while the coordinator is away."""
    fleet = fleet_of("abc")
    fleet.run_until(lambda: {m.step for m in fleet.live()} == {fleet.state.facts.step})
    facts = fleet.state.facts
    step, lineage = facts.step + 1, "ab" * 8
    for member in fleet.live():
        member.vote = None  # what they had sent is lost with the coordinator
        fleet.votes.add((member.incarnation, facts.epoch, step, lineage))
    fleet.restart_coordinator()
    for name in "ab":
        member = fleet.alive[name]
        member.connect()
        fleet.deliver_up(member.connection)
        vote = Vote(epoch=facts.epoch, step=step, lineage=lineage, parent=facts.lineage)
        fleet.handle(Received(connection=member.connection, message=vote))
    assert fleet.state.facts.step == facts.step  # one is missing

    fleet.alive["c"].vote = (step, lineage)
    fleet.alive["c"].connect()
    fleet.deliver_up(fleet.alive["c"].connection)

    assert fleet.committed[step] == lineage


def test_members_that_come_one_after_the_other_are_waited_for_up_to_a_limit() -> None:
    fleet = fleet_of("abcd", rejoin_s=1.0, rejoin_gap_s=0.4)
    for name in "abcd":
        fleet.alive[name].is_frozen = True
    fleet.restart_coordinator()
    for name in "ab":  # the second one within the gap, which begins anew
        fleet.alive[name].is_frozen = False
        for _ in range(15):
            fleet.tick(0.02)
    fleet.run_until(lambda: fleet.state.phase == "running")
    assert fleet.state.members == ("a", "b")
