"""A worker's client against a coordinator over real sockets."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time
import timeit
from collections.abc import Callable

import pytest

from geartrain.elastic.control import ControlSettings
from geartrain.elastic.greeting import Credentials
from geartrain.elastic.limits import Limits
from geartrain.elastic.outcome import Committed, Interrupted, MembershipEnded
from geartrain.elastic.records import Committed as CommitRecord
from geartrain.elastic.view import HeldState
from geartrain.errors import CommunicationError
from running_coordinator import (
    LIMIT_S,
    Member,
    MemoryLedger,
    commit_together,
    coordinator,
    follow_together,
    members,
)


def _limits(expected: int, unmeasured_s: float = 30.0) -> Limits:
    return Limits(
        expected_members=expected,
        rejoin_s=5.0,
        build_s=5.0,
        unmeasured_s=unmeasured_s,
        longest_s=max(unmeasured_s, 0.4),
    )


def test_a_step_is_applied_only_when_all_have_voted() -> None:
    with coordinator(_limits(2)) as place, members("ab", place.settings()) as (a, b):
        a.vote()
        with pytest.raises(CommunicationError, match="waits for other members"):
            a.settle(limit_s=0.2)
        b.vote()
        assert isinstance(a.settle(), Committed)
        assert isinstance(b.settle(), Committed)
        assert a.client.held == b.client.held == HeldState(step=1, lineage=a.lineage)


def test_a_closed_connection_is_told_to_all_others_at_once() -> None:
    with coordinator(_limits(3)) as place, members("abc", place.settings()) as (a, b, c):
        commit_together([a, b, c])
        a.vote()
        c.client.close()
        told_at_s = time.monotonic()
        outcome = a.settle()
        assert isinstance(outcome, Interrupted)
        assert "c is lost" in outcome.reason
        assert "c is lost" in b.interruptions.get(timeout=LIMIT_S)
        # Long before any silence could be noticed.
        assert time.monotonic() - told_at_s < Limits().unmeasured_s
        for member in (a, b):
            assert [m.member_id for m in member.enter_epoch().members] == ["a", "b"]
        commit_together([a, b])


def test_a_hung_main_thread_is_dropped_though_its_control_thread_lives() -> None:
    limits = _limits(2, unmeasured_s=0.4)
    with coordinator(limits) as place, members("ab", place.settings()) as (a, b):
        a.vote()
        assert isinstance(a.settle(), Interrupted)  # b never comes
        assert a.enter_epoch().lost[0].reason.startswith("its main loop")
        assert "main loop" in b.interruptions.get(timeout=LIMIT_S)


def test_a_main_thread_that_gets_on_is_not_dropped_however_long_it_computes() -> None:
    limits = _limits(2, unmeasured_s=0.4)
    with coordinator(limits) as place, members("ab", place.settings()) as (a, b):
        a.vote()
        ends_at_s = time.monotonic() + 1.2
        while time.monotonic() < ends_at_s:
            b.client.progress()
        b.vote()
        assert isinstance(a.settle(), Committed)


def test_progress_costs_less_than_two_microseconds() -> None:
    member = Member("a", _nowhere())
    count = 20_000
    best_s = min(timeit.repeat(member.client.progress, number=count, repeat=5)) / count
    member.client.close()
    assert best_s < 2e-6


def test_a_vote_that_was_out_when_the_coordinator_died_counts_after_its_return() -> None:
    ledger = MemoryLedger()
    with contextlib.ExitStack() as stack:
        with coordinator(_limits(2), ledger=ledger) as place:
            a, b = stack.enter_context(members("ab", place.settings()))
            commit_together([a, b])
            a.vote()
        _wait_until(lambda: not a.client.is_connected and not b.client.is_connected)
        b.vote()  # to nobody: it is in the join
        with coordinator(_limits(2), ledger=ledger, port=place.address[1]):
            assert isinstance(a.settle(), Committed)
            assert isinstance(b.settle(), Committed)
            assert {m.enter_epoch().epoch for m in (a, b)} == {2}
            commit_together([a, b])
    steps = [r.step for r in ledger.records if isinstance(r, CommitRecord)]
    assert steps == [1, 2, 3]


def test_no_step_is_applied_while_the_coordinator_is_gone() -> None:
    with contextlib.ExitStack() as stack:
        with coordinator(_limits(1)) as place:
            (a,) = stack.enter_context(members("a", place.settings()))
        _wait_until(lambda: not a.client.is_connected)
        a.vote()
        with pytest.raises(CommunicationError, match="no coordinator"):
            a.settle(limit_s=0.3)
        assert a.client.held.step == 0
        assert a.interruptions.empty()


def test_a_coordinator_that_stays_away_ends_the_membership() -> None:
    with contextlib.ExitStack() as stack:
        with coordinator(_limits(1)) as place:
            (a,) = stack.enter_context(members("a", place.settings(reconnect_s=0.3)))
        a.vote()
        with pytest.raises(MembershipEnded, match=r"no coordinator for 0\.3 s") as caught:
            a.settle()
        assert caught.value.ending.kind == "unreachable"
        assert a.interruptions.get(timeout=LIMIT_S)


def test_a_wrong_token_is_refused_and_said_so() -> None:
    with coordinator(_limits(1)) as place:
        wrong = ControlSettings(
            credentials=Credentials(run_id="test", token=b"another, wrong token"),
            reconnect_s=0.2,
            find_address=lambda: place.address,
        )
        with (
            members("a", wrong, have_begun=False) as (a,),
            pytest.raises(MembershipEnded, match="token") as caught,
        ):
            a.enter_epoch()
        assert caught.value.ending.kind == "refused"
        assert place.ledger.records == []


def test_the_coordinator_of_another_run_is_not_followed() -> None:
    with coordinator(_limits(1)) as place:
        other = ControlSettings(
            credentials=Credentials(run_id="other", token=b"0123456789abcdef"),
            reconnect_s=0.2,
            find_address=lambda: place.address,
        )
        with (
            members("a", other, have_begun=False) as (a,),
            pytest.raises(MembershipEnded, match="run 'test'"),
        ):
            a.enter_epoch()


def test_a_member_that_leaves_is_left_out_without_a_failed_step() -> None:
    with coordinator(_limits(2)) as place, members("ab", place.settings()) as (a, b):
        b.client.leave("preempted")
        _wait_until(lambda: b.client.drain_reason == "preempted")
        commit_together([a, b])
        found = a.enter_epoch()
        assert [m.member_id for m in found.members] == ["a"]
        assert not found.lost[0].is_failure
        with pytest.raises(MembershipEnded) as caught:
            b.client.next_epoch(b.epoch, LIMIT_S)
        assert not caught.value.ending.is_failure


def test_a_death_is_heard_of_though_a_forked_child_lives_on() -> None:
    """The child has copies of all descriptors; the connection must end all the same."""
    with coordinator(_limits(2)) as place, members("ab", place.settings()) as (a, b):
        child = os.fork()
        if child == 0:
            _be_a_data_loader(b)
        try:
            b.client.close()
            assert "b is lost" in a.interruptions.get(timeout=LIMIT_S)
        finally:
            os.kill(child, signal.SIGKILL)
            _, status = os.waitpid(child, 0)
        assert os.WTERMSIG(status) == signal.SIGKILL  # it lived until here


def _be_a_data_loader(member: Member) -> None:
    try:
        with contextlib.suppress(CommunicationError):
            member.client.vote(1, 1, "11" * 8)
            os._exit(3)  # a vote in the parent's name
        member.client.progress()
        member.client.close()
        signal.pause()
    finally:
        os._exit(4)


def test_closing_takes_less_than_a_second_also_without_a_coordinator() -> None:
    before = threading.active_count()
    member = Member("a", _nowhere()).start()
    started_at_s = time.monotonic()
    member.client.close()
    took_s = time.monotonic() - started_at_s
    assert took_s < 2.0
    _wait_until(lambda: threading.active_count() <= before)


def test_a_dismissed_process_comes_back_after_the_wait_that_it_was_given() -> None:
    limits = _limits(2, unmeasured_s=0.4)
    with coordinator(limits) as place, members("ab", place.settings()) as (a, b):
        a.vote()
        assert isinstance(a.settle(), Interrupted)
        assert "main loop" in b.interruptions.get(timeout=LIMIT_S)
        _wait_until(lambda: place.server.state.peers.keys() == {"a", "b"})
        follow_together([a, b])  # it is alive after all


def test_a_cut_connection_costs_an_epoch_and_not_the_member() -> None:
    with coordinator(_limits(2)) as place, members("ab", place.settings()) as (a, b):
        commit_together([a, b])
        a.vote()
        connection = b.client._link._connection
        assert connection is not None
        connection._socket.shutdown(socket.SHUT_RDWR)
        follow_together([a, b])
        assert a.epoch > 2


def _nowhere() -> ControlSettings:
    """Nobody listens there."""

    def find_address() -> tuple[str, int]:
        msg = "not known yet"
        raise CommunicationError(msg)

    return ControlSettings(
        credentials=Credentials(run_id="test"),
        reconnect_s=LIMIT_S,
        find_address=find_address,
    )


def _wait_until(is_true: Callable[[], bool], limit_s: float = LIMIT_S) -> None:
    deadline_s = time.monotonic() + limit_s
    while not is_true():
        assert time.monotonic() < deadline_s
        threading.Event().wait(0.005)
