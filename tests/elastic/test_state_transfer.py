"""A state, and the steps after it, from one process to others."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import pytest
import torch

from geartrain.elastic.greeting import Credentials
from geartrain.elastic.state_giver import StateGiver
from geartrain.elastic.state_receiver import StateReceiver
from geartrain.errors import CommunicationError

OWN = Credentials(run_id="run", token=b"0123456789abcdef")
WEIGHT = torch.arange(1000.0)
STATE = {"step": 7, "weights": {"w": WEIGHT}, "names": ["a", "b"]}


@pytest.fixture
def giver() -> Iterator[StateGiver]:
    with closing(StateGiver("127.0.0.1", OWN)) as giver:
        yield giver


def wait_until(condition: Callable[[], bool], within_s: float = 20.0) -> None:
    deadline_s = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.002)


def test_receiver_gets_the_state_and_then_each_step_in_order(giver: StateGiver) -> None:
    with closing(StateReceiver(giver.address, OWN)) as receiver:
        wait_until(lambda: giver.has_waiting)
        giver.give(STATE)
        steps = [{"step": 8 + i, "flat": torch.full((3,), float(i))} for i in range(5)]
        for step in steps:
            giver.pass_on(step)
        found = receiver.state(20.0)
        came: list[Any] = []

        def have_all_come() -> bool:
            came.extend(receiver.take_steps())
            return len(came) == len(steps)

        wait_until(have_all_come)

    assert found is not None
    assert found["step"] == 7
    assert found["names"] == ["a", "b"]
    assert torch.equal(found["weights"]["w"], WEIGHT)
    assert [step["step"] for step in came] == [8, 9, 10, 11, 12]
    assert torch.equal(came[3]["flat"], torch.full((3,), 3.0))


def test_several_receivers_get_the_same_copy(giver: StateGiver) -> None:
    receivers = [StateReceiver(giver.address, OWN) for _ in range(3)]

    def has_given_to_all() -> bool:
        if giver.has_waiting:
            giver.give(STATE)
        return all(receiver.state(0.0) is not None for receiver in receivers)

    wait_until(has_given_to_all)
    assert all((receiver.state(0.0) or {})["step"] == 7 for receiver in receivers)
    for receiver in receivers:
        receiver.close()


def test_who_does_not_know_the_token_gets_nothing(giver: StateGiver) -> None:
    stranger = Credentials(run_id="run", token=b"another token 16")
    with (
        closing(StateReceiver(giver.address, stranger)) as receiver,
        pytest.raises(CommunicationError, match="token"),
    ):
        receiver.state(20.0)
    assert not giver.has_waiting


def test_giver_that_is_somebody_else_is_not_believed(giver: StateGiver) -> None:
    other = Credentials(run_id="other", token=b"0123456789abcdef")
    with (
        closing(StateReceiver(giver.address, other)) as receiver,
        pytest.raises(CommunicationError, match="run 'run'"),
    ):
        receiver.state(20.0)


def test_receiver_is_told_where_nobody_listens() -> None:
    with closing(StateGiver("127.0.0.1", OWN)) as giver:
        address = giver.address
    with (
        closing(StateReceiver(address, OWN)) as receiver,
        pytest.raises(CommunicationError, match=address.rpartition(":")[2]),
    ):
        receiver.state(20.0)


def test_followers_that_are_dropped_hear_the_end(giver: StateGiver) -> None:
    with closing(StateReceiver(giver.address, OWN)) as receiver:
        wait_until(lambda: giver.has_waiting)
        giver.give(STATE)
        assert receiver.state(20.0) is not None
        giver.drop_followers()
        wait_until(lambda: receiver.failure is not None)

    assert not giver.has_followers
