"""Who counts as lost though its connection stands, and how soon that is found out."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from geartrain.elastic.detection import next_wake_at_s
from geartrain.elastic.events import TICK_S, Received, Tick
from geartrain.elastic.messages import Suspect
from simulated_fleet import SimulatedFleet, fleet_of


def is_running(fleet: SimulatedFleet, names: str) -> Callable[[], bool]:
    return lambda: (fleet.state.members, fleet.state.phase) == (tuple(names), "running")


def test_frozen_member_is_lost_after_its_own_limit() -> None:
    fleet = fleet_of("abc")
    fleet.run_steps(5)
    limit_s = fleet.state.peers["b"].pace.silence_limit_s(fleet.limits)
    assert limit_s == pytest.approx(0.8)  # 8 x its steps of 0.1 s
    fleet.alive["b"].is_frozen = True
    took_s = fleet.run_steps(2)
    assert limit_s <= took_s < limit_s + 0.2
    assert "b" not in fleet.state.members


def test_frozen_newcomer_is_lost_before_its_own_steps_are_known() -> None:
    fleet = fleet_of("abc", catch_up_steps=1000)
    fleet.run_steps(5)
    fleet.start("d", chain=[])
    fleet.run_until(is_running(fleet, "abcd"))
    fleet.alive["d"].is_frozen = True
    took_s = fleet.run_steps(2)
    assert 1.0 <= took_s < 2.0
    assert fleet.state.members == ("a", "b", "c")


def test_member_that_freezes_after_the_coordinator_returned_is_lost_soon() -> None:
    """The coordinator that comes back has not measured anybody's steps yet."""
    fleet = fleet_of("abc")
    fleet.run_steps(5)
    fleet.restart_coordinator()
    fleet.run_until(is_running(fleet, "abc"))
    fleet.alive["b"].is_frozen = True
    took_s = fleet.run_steps(2)
    assert 1.0 <= took_s < 2.0
    assert fleet.state.members == ("a", "c")


def test_hung_main_loop_is_lost_though_it_beats() -> None:
    fleet = fleet_of("abc")
    fleet.run_steps(5)
    fleet.alive["b"].is_hung = True
    assert fleet.run_steps(2) < 1.2
    fleet.run_steps(20)
    assert fleet.state.members == ("a", "c")
    assert "b" in fleet.state.peers  # it has joined again, and waits to be seen moving
    assert any("no progress" in note.text for note in fleet.notes)
    fleet.alive["b"].is_hung = False
    fleet.run_until(is_running(fleet, "abc"))


def test_slow_member_is_not_dead() -> None:
    fleet = fleet_of("abc")
    epoch = fleet.state.facts.epoch
    for _ in range(100):  # beats, and now and then a little progress
        fleet.alive["b"].is_hung = fleet.now_s % 0.5 < 0.4
        fleet.tick(0.02)
    assert fleet.state.facts.epoch == epoch


def test_coordinator_that_was_held_up_accuses_nobody() -> None:
    fleet = fleet_of("abc")
    fleet.run_steps(5)
    epoch = fleet.state.facts.epoch
    fleet.now_s += 20.0
    fleet.run_steps(3)
    assert fleet.state.facts.epoch == epoch


def test_torn_link_leaves_out_one_of_the_two_and_only_the_second_time() -> None:
    fleet = fleet_of("abcd")
    fleet.torn.add(frozenset("bc"))
    fleet.run_until(is_running(fleet, "abd"))
    assert len([e for e in fleet.epochs if len(e.members) == 4]) == 2
    fleet.run_steps(1)


def test_suspicion_that_a_loss_explains_costs_nobody_else_its_place() -> None:
    fleet = fleet_of("abcd")
    for name in "ab":
        fleet.torn.add(frozenset({"c", "d"}))
        fleet.kill(name)
        fleet.tick()
        fleet.torn.clear()
        fleet.run_steps(1)
    assert fleet.state.members == ("c", "d")


def test_suspicion_that_a_loss_explains_does_not_put_the_next_epoch_off() -> None:
    fleet = fleet_of("abc")
    fleet.kill("a")
    fleet.run_until(lambda: fleet.state.phase == "gathering")
    lost_at_s, b = fleet.now_s, fleet.alive["b"]
    accusation = Suspect(**b.where(), member_ids=(), reason="its connection broke")
    fleet.handle(Received(connection=b.connection, message=accusation))
    fleet.run_until(is_running(fleet, "bc"))
    assert fleet.now_s - lost_at_s < fleet.limits.suspect_gather_s


def test_main_loop_that_does_not_take_up_an_epoch_is_left_out() -> None:
    fleet = fleet_of("abcd")
    fleet.run_steps(5)
    fleet.alive["c"].is_hung = True
    fleet.kill("a")
    fleet.run_until(is_running(fleet, "bd"))
    fleet.run_steps(1)


def test_silence_ends_at_its_limit_and_not_at_the_next_usual_tick() -> None:
    fleet = fleet_of("abc")
    fleet.run_steps(5)
    limit_s = fleet.state.peers["b"].pace.silence_limit_s(fleet.limits)
    lost_at_s = fleet.state.peers["b"].heard_at_s + limit_s
    fleet.alive["b"].is_frozen = True
    fleet.run_until(lambda: fleet.now_s > lost_at_s - TICK_S / 2)
    assert fleet.now_s < lost_at_s
    wakes_at_s = next_wake_at_s(fleet.state)
    assert lost_at_s < wakes_at_s <= lost_at_s + 0.002
    fleet.now_s = wakes_at_s
    fleet.handle(Tick())
    assert "b" not in fleet.state.members


def test_next_epoch_is_formed_at_once_where_a_member_fell_silent() -> None:
    fleet = fleet_of("abc", loss_gather_s=5.0)
    fleet.run_steps(5)
    fleet.alive["b"].is_frozen = True
    fleet.run_until(lambda: "b" not in fleet.state.members)
    lost_at_s = fleet.now_s
    fleet.run_until(lambda: fleet.state.phase == "building")
    assert fleet.now_s - lost_at_s <= 0.02
