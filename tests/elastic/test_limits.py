"""How patient the coordinator is with whom."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given

from geartrain.elastic.limits import Limits, Pace, backoff_s
from geartrain.errors import ConfigError

times = st.floats(1e-4, 10.0)


def pace_of(steps: list[float], gaps: list[float] | None = None) -> Pace:
    pace = Pace()
    for step_s in [99.0, 99.0, *steps]:  # warming up
        pace = pace.with_step(step_s)
    for gap_s in gaps or []:
        pace = pace.with_gap(gap_s)
    return pace


@given(st.lists(times, min_size=1, max_size=300))
def test_limit_lies_above_most_steps_within_its_bounds(
    steps: list[float],
) -> None:
    limits = Limits()
    limit_s = pace_of(steps).limit_s(limits)
    assert limits.shortest_s <= limit_s <= limits.longest_s
    slow = [step_s for step_s in steps[-128:] if step_s > limit_s]
    assert len(slow) <= 1


def test_fast_and_slow_members_have_limits_of_their_own() -> None:
    limits = Limits()
    assert pace_of([0.01] * 50).limit_s(limits) == pytest.approx(0.3)
    assert pace_of([1.0] * 50).limit_s(limits) == pytest.approx(8.0)


def test_first_steps_do_not_make_a_limit() -> None:
    assert Pace().with_step(3.0).with_step(3.0).limit_s(Limits()) == Limits().unmeasured_s


def test_one_slow_step_among_many_does_not_make_the_limit_long() -> None:
    steps = [0.05] * 127 + [4.0]
    assert pace_of(steps).limit_s(Limits()) == pytest.approx(0.4) or len(steps) < 100


def test_starved_host_gets_longer_silences() -> None:
    usual = pace_of([0.02] * 10, [0.05] * 64)
    starved = pace_of([0.02] * 10, [0.5] * 64)
    assert usual.silence_limit_s(Limits()) == pytest.approx(0.3)
    assert starved.silence_limit_s(Limits()) == pytest.approx(1.5)
    assert starved.limit_s(Limits()) == pytest.approx(0.3)


def test_irregular_steps_do_not_make_a_silence_long() -> None:
    """A fleet that loses somebody every second has a slow step every second."""
    disturbed = pace_of([0.05, 0.05, 0.05, 0.9] * 10)
    slow = pace_of([4.0] * 10)

    assert disturbed.limit_s(Limits()) == pytest.approx(7.2)
    assert disturbed.silence_limit_s(Limits()) == pytest.approx(1.0)
    assert slow.silence_limit_s(Limits()) == pytest.approx(4.0)


@given(st.integers(2, 40))
def test_backoff_doubles_up_to_its_longest(count: int) -> None:
    limits = Limits(backoff_s=0.5, longest_backoff_s=10.0)
    failed = tuple(float(k) for k in range(count))
    now_s = float(count)
    assert backoff_s(limits, failed, now_s) == min(0.5 * 2 ** (count - 2), 10.0)


def test_old_failures_are_forgotten() -> None:
    limits = Limits(forget_s=100.0)
    assert backoff_s(limits, (0.0, 1.0, 2.0), 101.5) == 0.0


@pytest.mark.parametrize(
    "wrong", [{"min_members": 0}, {"shortest_s": 100.0}, {"build_s": 0.0}]
)
def test_limits_that_make_no_sense_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        Limits(**wrong)
