"""Which lost worker is started again, and when."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from geartrain.errors import ConfigError
from geartrain.launch.respawn import (
    RespawnSettings,
    RespawnState,
    due_devices,
    left_out_devices,
    next_due_at_s,
    note_failure,
    note_leave,
    note_start,
    readmit,
    wait_s,
)

SETTINGS = RespawnSettings(max_device_failures=4)


def fail(
    state: RespawnState,
    device_id: str,
    now_s: float,
    settings: RespawnSettings = SETTINGS,
) -> RespawnState:
    return note_failure(state, settings, device_id, now_s, "was killed by SIGKILL")


def test_device_waits_twice_as_long_after_each_failure() -> None:
    state, now_s, waits = RespawnState(), 100.0, []
    for _ in range(4):
        state = fail(state, "cuda:0", now_s)
        due_at_s = next_due_at_s(state)
        assert due_at_s is not None
        waits.append(due_at_s - now_s)
        assert due_devices(state, due_at_s - 0.001) == ()
        assert due_devices(state, due_at_s) == ("cuda:0",)
        state = note_start(state, "cuda:0")
        assert due_devices(state, due_at_s) == ()
        now_s = due_at_s

    assert waits == [1.0, 2.0, 4.0, 8.0]


def test_device_that_keeps_failing_is_left_out_with_its_reason() -> None:
    state = RespawnState()
    for now_s in range(5):
        state = fail(state, "cuda:0", float(now_s))

    assert due_devices(state, 1e9) == ()
    assert left_out_devices(state) == {
        "cuda:0": "failed 5 times, at most 4 are allowed without 300 s of quiet; the last "
        "time: was killed by SIGKILL"
    }


def test_quiet_time_counts_from_when_the_device_came_back() -> None:
    state = fail(fail(RespawnState(), "cuda:0", 0.0), "cuda:0", 1.0)
    back_at_s = 1.0 + 2.0

    soon = fail(state, "cuda:0", back_at_s + SETTINGS.quiet_s - 1)
    late = fail(state, "cuda:0", back_at_s + SETTINGS.quiet_s)

    assert soon.records["cuda:0"].num_failures == 3
    assert late.records["cuda:0"].num_failures == 1


def test_failures_of_one_device_do_not_delay_another() -> None:
    state = RespawnState()
    for now_s in (0.0, 0.1, 0.2):
        state = fail(state, "cuda:0", now_s)
    state = fail(state, "cuda:1", 0.3)

    assert due_devices(state, 1.4) == ("cuda:1",)
    assert due_devices(state, 10.0) == ("cuda:1", "cuda:0"), "the longest due first"


def test_run_that_failed_too_often_starts_nothing_again() -> None:
    settings = RespawnSettings(max_failures=2)
    state = RespawnState()
    for index in range(3):
        state = fail(state, f"cuda:{index}", 0.0, settings)

    assert due_devices(state, 10.0) == ("cuda:0", "cuda:1")
    assert "has had 3 failures, at most 2" in left_out_devices(state)["cuda:2"]


def test_device_that_was_asked_to_leave_stays_away_until_it_is_asked_back() -> None:
    state = note_leave(fail(RespawnState(), "cuda:0", 0.0), "cuda:0", "drained")
    assert due_devices(state, 10.0) == ()
    assert left_out_devices(state) == {"cuda:0": "drained"}

    state = readmit(state, "cuda:0", 20.0)

    assert due_devices(state, 20.0) == ("cuda:0",)
    assert left_out_devices(state) == {}
    assert state.num_failures == 1, "the run forgets nothing"


def test_new_device_can_be_asked_for() -> None:
    state = readmit(RespawnState(), "emulated:4", 5.0)

    assert due_devices(state, 5.0) == ("emulated:4",)


def test_no_failures_allowed_means_never_again() -> None:
    state = fail(RespawnState(), "cpu", 0.0, RespawnSettings(max_device_failures=0))

    assert due_devices(state, 1e9) == ()
    assert left_out_devices(state)


@pytest.mark.parametrize(
    "options",
    [
        {"first_wait_s": 0.0},
        {"first_wait_s": 9.0, "max_wait_s": 3.0},
        {"max_wait_s": float("inf")},
        {"first_wait_s": float("nan")},
        {"quiet_s": 0.0},
        {"quiet_s": float("nan")},
        {"max_failures": -1},
        {"max_device_failures": -1},
    ],
)
def test_impossible_settings_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        RespawnSettings(**options)


EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["fail", "start", "leave", "readmit"]),
        st.sampled_from(["a", "b", "c"]),
        st.floats(0, 400),
    ),
    max_size=40,
)


@given(events=EVENTS, max_failures=st.none() | st.integers(0, 10))
def test_rules_hold_for_all_orders_of_events(
    events: list[tuple[str, str, float]], max_failures: int | None
) -> None:
    settings = RespawnSettings(max_failures=max_failures, max_device_failures=3)
    state, now_s, num_failures = RespawnState(), 0.0, 0
    for what, device_id, passed_s in events:
        now_s += passed_s
        before = state
        if what == "fail":
            state = fail(state, device_id, now_s, settings)
            num_failures += 1
        elif what == "start":
            state = note_start(state, device_id)
        elif what == "leave":
            state = note_leave(state, device_id, "drained")
        else:
            state = readmit(state, device_id, now_s)
        others = set(before.records) - {device_id}
        assert all(state.records[i] == before.records[i] for i in others)
        record = state.records[device_id]
        assert record.due_at_s is None or not record.left_out
        assert record.num_failures <= settings.max_device_failures + 1 or record.left_out
        if what == "fail" and record.due_at_s is not None:
            assert record.due_at_s - now_s == pytest.approx(
                wait_s(settings, record.num_failures)
            )
            assert max_failures is None or num_failures <= max_failures
    assert state.num_failures == num_failures
