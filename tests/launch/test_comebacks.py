"""Who comes back, and what the user hears of it."""

from __future__ import annotations

from geartrain.launch.comebacks import Comebacks
from geartrain.launch.respawn import RespawnSettings


def test_lost_device_waits_and_the_user_hears_how_long() -> None:
    comebacks = Comebacks(RespawnSettings(first_wait_s=30.0))

    notice = comebacks.note_lost("cuda:1", "was killed by SIGKILL")

    assert notice == "cuda:1 starts again in 30 s (failure 1)"
    assert comebacks.returns("cuda:1")
    assert not comebacks.returns("cuda:0")
    assert comebacks.due == ()


def test_device_that_failed_too_often_is_left_out_with_its_reason() -> None:
    comebacks = Comebacks(RespawnSettings(max_device_failures=0))

    notice = comebacks.note_lost("cuda:1", "was killed by SIGKILL")

    assert notice is not None
    assert notice.startswith("cuda:1 is not started again: failed 1 times")
    assert not comebacks.returns("cuda:1")
    assert "SIGKILL" in comebacks.left_out["cuda:1"]


def test_nobody_comes_back_where_that_is_not_wanted_and_nothing_is_said() -> None:
    comebacks = Comebacks(None)

    assert comebacks.note_lost("cuda:1", "was killed by SIGKILL") is None
    assert not comebacks.returns("cuda:1")
    assert not comebacks.are_possible


def test_operator_brings_back_also_who_was_left_out() -> None:
    comebacks = Comebacks(None)
    comebacks.note_lost("cuda:1", "was killed by SIGKILL")

    comebacks.readmit("cuda:1")

    assert list(comebacks.due) == ["cuda:1"]
    comebacks.note_started("cuda:1")
    assert not comebacks.due


def test_device_that_left_stays_away_and_none_returns_to_a_run_that_ends() -> None:
    comebacks = Comebacks(RespawnSettings(first_wait_s=1e-9, max_wait_s=1e-9))
    comebacks.note_left("cuda:0", "it was drained")
    comebacks.note_lost("cuda:1", "was killed by SIGKILL")
    assert list(comebacks.due) == ["cuda:1"]

    comebacks.end()

    assert not comebacks.due
    assert not comebacks.returns("cuda:1")
