"""How long a silence may last, by what was heard so far."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from geartrain.collectives.faults.silence import FLOOR_S, Silence


def test_a_member_with_steady_heartbeats_is_lost_within_three_seconds() -> None:
    silence = Silence()
    for beat in range(50):
        silence.heard(0.2 * beat)

    ticks = 0
    while not silence.is_lost:
        silence.passed(0.2)
        ticks += 1

    assert 0.2 * ticks < 3.0


def test_a_member_that_is_often_late_is_given_three_times_its_longest_gap() -> None:
    silence = Silence()
    for at_s in (0.0, 2.0, 2.2):
        silence.heard(at_s)

    silence.passed(5.0)
    assert not silence.is_lost
    silence.passed(1.0)
    assert silence.is_lost


def test_a_late_heartbeat_is_forgotten_in_time() -> None:
    silence = Silence()
    silence.heard(0.0)
    silence.heard(2.0)
    for beat in range(200):
        silence.heard(2.2 + 0.2 * beat)

    assert silence.limit_s == FLOOR_S


@given(st.lists(st.floats(0.0, 100.0), min_size=1, max_size=50))
def test_the_limit_never_falls_below_the_floor_nor_without_end(gaps_s: list[float]) -> None:
    silence = Silence()
    now_s = 0.0
    for gap_s in gaps_s:
        now_s += gap_s
        silence.heard(now_s)

    assert FLOOR_S <= silence.limit_s <= 30.0
