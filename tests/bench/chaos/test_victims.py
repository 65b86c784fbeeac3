"""Whom a fault hits, from what is known of the fleet at that moment."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from geartrain.bench.chaos.kinds import KINDS
from geartrain.bench.chaos.victims import DeviceView, NotPossibleError, choose_victim

FLEET = tuple(DeviceView(device_id=name) for name in "abcd")


def with_device(name: str, **changes: object) -> list[DeviceView]:
    return [
        replace(device, **changes)  # type: ignore[arg-type]  # fields of a view
        if device.device_id == name
        else device
        for device in FLEET
    ]


def test_the_device_of_the_schedule_is_hit_where_it_can_be() -> None:
    assert choose_victim(KINDS["kill"], "c", FLEET, min_left=1) == "c"


@pytest.mark.parametrize(
    "changes", [{"is_running": False}, {"holds": False}, {"is_silenced": True}]
)
def test_the_next_one_is_hit_where_the_device_is_away(changes: dict[str, object]) -> None:
    devices = with_device("d", **changes)

    assert choose_victim(KINDS["freeze"], "d", devices, min_left=1) == "a"


def test_a_fault_does_not_come_twice_at_once_to_a_device() -> None:
    devices = with_device("a", lasting=frozenset({"slow"}))

    assert choose_victim(KINDS["slow"], "a", devices, min_left=1) == "b"
    assert choose_victim(KINDS["link_slow"], "a", devices, min_left=1) == "a"


def test_the_last_that_hold_the_state_and_are_heard_of_are_not_taken() -> None:
    devices = [
        replace(FLEET[0], holds=False),
        replace(FLEET[1], is_silenced=True),
        FLEET[2],
        FLEET[3],
    ]

    with pytest.raises(NotPossibleError, match="leave 1 devices, at least 2"):
        choose_victim(KINDS["kill"], "c", devices, min_left=2)
    assert choose_victim(KINDS["slow"], "b", devices, min_left=2) == "b"
    assert choose_victim(KINDS["stop"], "c", devices, min_left=1) == "c"


def test_who_gets_the_state_may_be_killed_over_it() -> None:
    devices = with_device("b", holds=False)

    assert choose_victim(KINDS["kill_in_heal"], "b", devices, min_left=3) == "b"
    assert choose_victim(KINDS["kill"], "b", devices, min_left=1) == "c"


def test_protected_devices_are_not_taken_away() -> None:
    found = choose_victim(KINDS["kill"], "a", FLEET, min_left=1, protected=("a", "b"))

    assert found == "c"


def test_what_is_done_to_the_run_needs_no_device() -> None:
    nobody = [replace(device, is_running=False) for device in FLEET]

    assert choose_victim(KINDS["disk_full"], "b", nobody, min_left=4) == "b"


@given(
    st.lists(
        st.builds(
            DeviceView,
            device_id=st.just(""),
            is_running=st.booleans(),
            holds=st.booleans(),
            is_silenced=st.booleans(),
        ),
        min_size=1,
        max_size=6,
    ),
    st.sampled_from(["kill", "freeze", "stop", "link_cut", "kill_in_heal"]),
    st.integers(1, 3),
)
def test_enough_that_hold_the_state_are_always_left(
    views: list[DeviceView], kind: str, min_left: int
) -> None:
    devices = [replace(view, device_id=str(index)) for index, view in enumerate(views)]
    try:
        victim = choose_victim(KINDS[kind], "0", devices, min_left=min_left)
    except NotPossibleError:
        return
    left = [
        d
        for d in devices
        if d.holds and d.is_running and not d.is_silenced and d.device_id != victim
    ]
    assert len(left) >= min_left
