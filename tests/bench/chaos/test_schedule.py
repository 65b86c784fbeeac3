from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from geartrain.bench.chaos.kinds import GROUPS, KINDS, Capability, choose_kinds
from geartrain.bench.chaos.schedule import (
    Fault,
    ScheduleSettings,
    count_by_kind,
    make_schedule,
)
from geartrain.errors import ConfigError


@st.composite
def all_settings(draw: st.DrawFn) -> ScheduleSettings:
    num_devices = draw(st.integers(1, 8))
    device_ids = tuple(f"emulated:{index}" for index in range(num_devices))
    names = draw(st.sets(st.sampled_from(sorted(KINDS)), min_size=1))
    return ScheduleSettings(
        seed=draw(st.integers(0, 2**31)),
        duration_s=draw(st.floats(0.5, 90.0)),
        faults_per_s=draw(st.floats(0.05, 4.0)),
        device_ids=device_ids,
        kinds=tuple(KINDS[name] for name in sorted(names)),
        min_left=draw(st.integers(1, num_devices)),
        can_rejoin=draw(st.booleans()),
        protected=device_ids[: draw(st.integers(0, 1))],
    )


@given(all_settings())
def test_schedule_follows_from_its_settings_and_keeps_to_them(
    settings: ScheduleSettings,
) -> None:
    faults = make_schedule(settings)

    assert faults == make_schedule(settings)
    assert [f.at_s for f in faults] == sorted(f.at_s for f in faults)
    for fault in faults:
        kind = KINDS[fault.kind]
        assert 0 <= fault.at_s <= settings.duration_s
        assert fault.device_id in settings.device_ids
        assert fault.duration_s == 0 or fault.duration_s >= kind.least_s * 0.999
        assert fault.duration_s <= kind.most_s * 1.001
        assert not (kind.loses_device and fault.device_id in settings.protected)


@given(all_settings())
def test_no_more_devices_are_lost_than_may_be_and_the_dead_are_left_alone(
    settings: ScheduleSettings,
) -> None:
    if settings.can_rejoin:
        return
    lost: set[str] = set()
    for fault in make_schedule(settings):
        assert fault.device_id not in lost
        if KINDS[fault.kind].loses_device:
            lost.add(fault.device_id)

    assert len(settings.device_ids) - len(lost) >= settings.min_left


@given(all_settings())
def test_a_lasting_fault_ends_before_the_same_comes_to_the_device_again(
    settings: ScheduleSettings,
) -> None:
    until_s: Counter[tuple[str, str]] = Counter()
    for fault in make_schedule(settings):
        place = (fault.device_id, fault.kind)
        if fault.duration_s:
            assert fault.at_s >= until_s[place]
            until_s[place] = fault.until_s  # type: ignore[assignment]  # a time


def test_other_seed_gives_another_schedule_of_about_the_rate_asked_for() -> None:
    def schedule(seed: int) -> tuple[Fault, ...]:
        return make_schedule(
            ScheduleSettings(
                seed=seed,
                duration_s=600.0,
                faults_per_s=1.0,
                device_ids=("a", "b", "c", "d"),
                kinds=(KINDS["stop"], KINDS["slow"]),
            )
        )

    assert schedule(1) != schedule(2)
    assert 450 < len(schedule(1)) < 750
    assert set(count_by_kind(schedule(1))) == {"stop", "slow"}


def test_kill_during_a_rebuild_comes_soon_after_the_kill_that_began_it() -> None:
    faults = make_schedule(
        ScheduleSettings(
            seed=3,
            duration_s=30.0,
            faults_per_s=1.0,
            device_ids=("a", "b", "c", "d", "e"),
            kinds=(KINDS["kill_in_rebuild"],),
        )
    )

    assert [fault.kind for fault in faults] == ["kill", "kill_in_rebuild"] * 2
    assert len({fault.device_id for fault in faults}) == 4
    for first, second in zip(faults[::2], faults[1::2], strict=True):
        assert 0 <= second.at_s - first.at_s <= 0.3


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("duration_s", 0.0),
        ("duration_s", float("nan")),
        ("faults_per_s", -1.0),
        ("min_left", 3),
        ("kinds", ()),
    ],
)
def test_wrong_settings_are_refused_with_their_value(field: str, value: object) -> None:
    settings = {
        "seed": 0,
        "duration_s": 1.0,
        "faults_per_s": 1.0,
        "device_ids": ("a", "b"),
        "kinds": (KINDS["kill"],),
    }

    with pytest.raises(ConfigError, match=r"duration_s|faults_per_s|min_left|--kinds"):
        ScheduleSettings(**(settings | {field: value}))  # type: ignore[arg-type]  # wrong


def test_kinds_that_need_what_is_missing_are_refused_with_the_reason() -> None:
    missing: dict[Capability, str] = {
        "coordinator": "runs have no coordinator",
        "emulated links": "give --links",
    }

    with pytest.raises(ConfigError, match=r"coordinator_kill .* runs have no coordinator"):
        choose_kinds(["kill", "coordinator_kill"], missing)
    with pytest.raises(ConfigError, match="give --links"):
        choose_kinds(["link"], missing)
    possible = {kind.name for kind in choose_kinds([], missing)}
    usual = {kind.name for kind in KINDS.values() if kind.by_default}
    assert possible == usual - {"coordinator_kill", "link_slow", "link_cut"}
    assert [kind.name for kind in choose_kinds(["kill_all"], missing)] == ["kill_all"]


def test_group_stands_for_those_of_its_kinds_that_are_possible() -> None:
    missing: dict[Capability, str] = {"small disk": "needs root"}

    assert [k.name for k in choose_kinds(["disk"], missing)] == ["bit_flip"]
    assert {name for names in GROUPS.values() for name in names} <= set(KINDS)


def test_unknown_kind_is_refused_with_those_that_are_known() -> None:
    with pytest.raises(ConfigError, match="'meteor'; known are kill, stop"):
        choose_kinds(["meteor"], {})
