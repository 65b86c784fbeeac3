"""When to save what."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from geartrain.checkpoint.cadence import (
    Cadence,
    Moment,
    Save,
    SaveInterval,
    TierCadence,
    due_saves,
)
from geartrain.errors import ConfigError

BEGUN = Moment(step=0, clock_s=0.0)


def run(cadence: Cadence, moments: list[Moment], begun: Moment = BEGUN) -> list[Save]:
    made: list[Save] = []
    for now in moments:
        made += due_saves(cadence, made, begun=begun, now=now)
    return made


def test_by_default_the_disk_gets_a_version_each_5_minutes_and_the_store_each_30() -> None:
    moments = [Moment(step=step, clock_s=10.0 * step) for step in range(1, 721)]  # 2 hours

    made = run(Cadence(), moments)

    assert [save.clock_s for save in made if save.tier == "local"] == [
        300.0 * count for count in range(1, 25)
    ]
    assert [save.clock_s for save in made if save.tier == "durable"] == [
        1800.0 * count for count in range(1, 5)
    ]
    assert {save.kind for save in made} == {"full"}


def test_weights_and_optimizer_are_saved_apart_and_never_both_at_one_step() -> None:
    cadence = Cadence.by_steps(weights=1000, optimizer=5000)
    moments = [Moment(step=step, clock_s=float(step)) for step in range(500, 10_001, 500)]

    made = [save for save in run(cadence, moments) if save.tier == "durable"]

    assert [(save.step, save.kind) for save in made] == [
        (step, "full" if step % 5000 == 0 else "weights")
        for step in range(1000, 10_001, 1000)
    ]


def test_after_a_resumption_steps_are_counted_from_zero_and_not_from_there() -> None:
    cadence = Cadence.by_steps(weights=100, optimizer=100)
    begun = Moment(step=150, clock_s=0.0)
    moments = [Moment(step=step, clock_s=float(step)) for step in range(151, 302)]

    assert [save.step for save in run(cadence, moments, begun) if save.tier == "local"] == [
        200,
        300,
    ]


def test_steps_that_come_again_after_a_restore_are_saved_again() -> None:
    cadence = Cadence.by_steps(weights=100, optimizer=100)
    saved = Save(tier="local", kind="full", step=500, clock_s=5.0)
    others = Save(tier="durable", kind="full", step=500, clock_s=5.0)

    def due(step: int) -> tuple[Save, ...]:
        now = Moment(step=step, clock_s=9.0)
        return due_saves(cadence, (saved, others), begun=BEGUN, now=now)

    assert not due(399)
    assert {save.step for save in due(400)} == {400}


def test_nothing_is_saved_twice_at_one_step_however_much_time_has_passed() -> None:
    saved = Save(tier="local", kind="full", step=7, clock_s=0.0)

    due = due_saves(Cadence(), [saved], begun=BEGUN, now=Moment(step=7, clock_s=1e6))

    assert [save.tier for save in due] == ["durable"]


def test_a_tier_without_intervals_is_given_nothing() -> None:
    cadence = Cadence(durable=TierCadence(full=None))

    due = due_saves(cadence, (), begun=BEGUN, now=Moment(step=7, clock_s=1e6))

    assert [save.tier for save in due] == ["local"]


def test_an_interval_that_never_comes_or_is_negative_is_refused() -> None:
    with pytest.raises(ConfigError, match="needs every_s or every_steps"):
        SaveInterval()
    with pytest.raises(ConfigError, match="every_steps=0 must be > 0"):
        SaveInterval(every_steps=0)


@given(
    steps=st.lists(st.integers(1, 40), min_size=1, max_size=60),
    weights=st.integers(1, 50),
    optimizer=st.integers(1, 50),
)
def test_no_multiple_of_the_interval_is_missed_however_many_steps_lie_between(
    steps: list[int], weights: int, optimizer: int
) -> None:
    cadence = Cadence.by_steps(weights=weights, optimizer=optimizer)
    position, moments = 0, []
    for index, count in enumerate(steps, start=1):
        position += count
        moments.append(Moment(step=position, clock_s=float(index)))

    made = [save for save in run(cadence, moments) if save.tier == "local"]

    last = {"full": 0, "any": 0}
    saved = {save.step: save.kind for save in made}
    for moment in moments:
        kind = saved.get(moment.step)
        if moment.step // optimizer > last["full"] // optimizer:
            assert kind == "full"
        elif moment.step // weights > last["any"] // weights:
            assert kind == "weights"
        else:
            assert kind is None
        if kind is not None:
            last["any"] = moment.step
        if kind == "full":
            last["full"] = moment.step
