"""Whether a run's devices may be changed as asked, and what that means."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from geartrain.devices.profile import DeviceProfile
from geartrain.errors import ConfigError
from geartrain.launch.control_messages import (
    DrainRequest,
    FleetChange,
    RunView,
    ScaleRequest,
    plan_change,
    read_change,
)
from running_run import device, view_of

FOUR = tuple(device(f"emulated:{i}", rank=i) for i in range(4))


def names(change: FleetChange) -> tuple[tuple[str, ...], tuple[str, ...]]:
    return tuple(p.device_id for p in change.add), change.remove


def profiles(*wanted: str) -> tuple[DeviceProfile, ...]:
    return tuple(device(name).profile for name in wanted)


def scale(view: RunView, change: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
    return names(plan_change(ScaleRequest(change=change), view))


def drain(view: RunView, target: str) -> tuple[str, ...]:
    return plan_change(DrainRequest(target=target), view).remove


def test_last_ones_leave_where_fewer_are_wanted() -> None:
    assert scale(view_of(*FOUR), -2) == ((), ("emulated:2", "emulated:3"))


def test_those_that_left_come_back_before_new_ones_are_made() -> None:
    view = view_of(*FOUR, device("emulated:7", "out"), device("emulated:8", "waiting"))

    assert scale(view, 4) == (("emulated:7", "emulated:8", "emulated:4", "emulated:5"), ())


def test_new_emulated_device_is_like_the_last_one() -> None:
    view = view_of(device("emulated:0"), device("emulated:1", core_fraction=0.125))

    (profile,) = plan_change(ScaleRequest(change=1), view).add

    assert (profile.device_id, profile.core_fraction) == ("emulated:2", 0.125)


def test_named_devices_replace_those_that_are_there() -> None:
    view = view_of(*FOUR[:3], device("emulated:5", "out"), device("emulated:6", "waiting"))
    wanted = profiles("emulated:0", "emulated:5", "emulated:9")

    change = plan_change(ScaleRequest(devices=wanted), view)

    assert names(change) == (
        ("emulated:5", "emulated:9"),
        ("emulated:1", "emulated:2", "emulated:6"),
    )


def test_same_devices_again_change_nothing() -> None:
    change = plan_change(ScaleRequest(devices=profiles("emulated:0")), view_of(FOUR[0]))

    assert names(change) == ((), ())


def test_device_or_all_of_a_node_can_be_drained() -> None:
    view = view_of(
        device("cuda:0", node_id="a"),
        device("cuda:1", node_id="a"),
        device("cuda:2", node_id="b"),
        device("cuda:3", "waiting", node_id="a"),
    )

    assert drain(view, "cuda:1") == ("cuda:1",)
    assert drain(view, "a") == ("cuda:0", "cuda:1", "cuda:3")
    assert drain(view, "cuda:3") == ("cuda:3",), "it is not started again"


def test_draining_twice_is_no_error() -> None:
    assert drain(view_of(*FOUR[:2], device("emulated:5", "draining")), "emulated:5") == ()


@pytest.mark.parametrize(
    ("view", "request_", "message"),
    [
        (
            view_of(*FOUR, ending="is saving its state to stop"),
            ScaleRequest(change=1),
            "run-1 is saving its state to stop; its devices can't be changed",
        ),
        (
            view_of(*FOUR),
            DrainRequest(target="cuda:9"),
            "no device or node 'cuda:9'; its devices are emulated:0, .* its nodes here",
        ),
        (
            view_of(*FOUR, device("emulated:9", "out", reason="failed 7 times")),
            DrainRequest(target="emulated:9"),
            "emulated:9 is not in the run: failed 7 times",
        ),
        (
            view_of(*FOUR, min_devices=3),
            ScaleRequest(change=-2),
            "without emulated:2, emulated:3 2 devices would be left, at least 3 must",
        ),
        (
            view_of(*FOUR),
            DrainRequest(target="here"),
            "0 devices would be left, at least 1 must",
        ),
        (view_of(*FOUR), ScaleRequest(change=-99), "0 devices would be left"),
        (view_of(*FOUR), ScaleRequest(change=10**12), "must lie in -10000"),
        (view_of(*FOUR), ScaleRequest(), "nothing was asked for"),
        (
            view_of(device("cuda:0"), device("cuda:1", "out")),
            ScaleRequest(change=2),
            "2 more devices are wanted, but .* only 1 are away",
        ),
        (
            view_of(*FOUR, fixed="the emulated links have 4 hosts"),
            ScaleRequest(change=1),
            "emulated:4 can't join: the emulated links have 4 hosts",
        ),
        (
            view_of(*FOUR, cores=1.0),
            ScaleRequest(change=1),
            "add up to 1.25 but 1 cores are present",
        ),
        (
            view_of(FOUR[0]),
            ScaleRequest(devices=(device("emulated:0", core_fraction=0.5).profile,)),
            "emulated:0 has core fraction 0.25, not 0.5; geartrain emulate set",
        ),
        (
            view_of(FOUR[0]),
            ScaleRequest(devices=profiles("emulated:0", "cuda:0")),
            "cuda:0 can't join: the devices of run run-1 are emulated",
        ),
        (
            view_of(FOUR[0], device("emulated:1", "draining")),
            ScaleRequest(devices=profiles("emulated:0", "emulated:1")),
            "emulated:1 is just leaving; ask for it again",
        ),
    ],
)
def test_what_can_not_be_is_refused_with_the_way_out(
    view: RunView, request_: ScaleRequest | DrainRequest, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        plan_change(request_, view)


def test_oversubscribed_run_may_get_more_than_there_are_cores() -> None:
    view = view_of(*FOUR, cores=1.0, oversubscribed=True)

    assert scale(view, 1) == (("emulated:4",), ())


def test_fixed_run_takes_back_what_it_has_had() -> None:
    view = view_of(*FOUR, device("emulated:4", "out"), fixed="the hosts are fixed")

    assert scale(view, 1) == (("emulated:4",), ())


@pytest.mark.parametrize("text", ["+", "-", "1", "", "+a", "cuda:0", "+1.5", "+²", "--1"])
def test_only_a_signed_number_is_a_change(text: str) -> None:
    assert read_change(text) is None


STATES = st.sampled_from(["starting", "training", "draining", "waiting", "out"])


@given(
    states=st.lists(STATES, min_size=1, max_size=6),
    min_devices=st.integers(1, 4),
    wanted=st.integers(-5, 5) | st.sets(st.integers(0, 8), min_size=1),
)
def test_accepted_changes_leave_enough_and_start_nothing_twice(
    states: list[str],
    min_devices: int,
    wanted: int | set[int],
) -> None:
    devices = [
        device(f"emulated:{i}", state)  # type: ignore[arg-type]  # sampled from them
        for i, state in enumerate(states)
    ]
    view = view_of(*devices, cores=100.0, min_devices=min_devices)
    if isinstance(wanted, int):
        request = ScaleRequest(change=wanted)
    else:
        request = ScaleRequest(devices=profiles(*(f"emulated:{i}" for i in wanted)))
    present = {d.device_id for d in view.present}

    try:
        change = plan_change(request, view)
    except ConfigError:
        return

    add, remove = names(change)
    assert len(set(add)) == len(add)
    assert not set(add) & (present | set(remove))
    left = len(present - set(remove) | set(add))
    assert left >= min_devices or left >= len(present)
    if isinstance(wanted, int):
        assert len(add) - len(set(remove) & present) == wanted
    else:
        assert present - set(remove) | set(add) == {f"emulated:{i}" for i in wanted}
