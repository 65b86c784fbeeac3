"""The coordinator as the launcher keeps it."""

from __future__ import annotations

import dataclasses
import os
import select
import signal
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from example_fleets import cpu_fleet
from geartrain.elastic.address_file import read_address
from geartrain.errors import CommunicationError
from geartrain.launch import LaunchSettings
from geartrain.launch.coordinator_process import (
    ADDRESS_NAME,
    MAX_DEATHS,
    TOKEN_NAME,
    CoordinatorProcess,
    Deaths,
    Place,
    limits_of,
    needs_coordinator,
)
from geartrain.launch.coordinator_question import ask_to_drain
from geartrain.launch.emulated_network import EmulatedNetwork


@pytest.fixture
def settings(tmp_path: Path) -> LaunchSettings:
    script = tmp_path / "train.py"
    script.touch()
    return LaunchSettings(
        script=script, fleet=cpu_fleet(3), run_dir=tmp_path, min_devices=2
    )


@pytest.fixture
def coordinator(settings: LaunchSettings) -> Iterator[CoordinatorProcess]:
    coordinator = CoordinatorProcess(settings, Place())
    yield coordinator
    coordinator.close()


def wait_until(condition: Callable[[], bool], within_s: float = 60.0) -> None:
    deadline_s = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline_s, "it did not come to that in time"
        select.select([], [], [], 0.005)


def serving_process(run_dir: Path) -> int:
    try:
        return read_address(run_dir / ADDRESS_NAME).process_id
    except CommunicationError:
        return 0


def test_coordinator_that_is_killed_is_started_again_and_the_user_is_told(
    coordinator: CoordinatorProcess, tmp_path: Path
) -> None:
    first = coordinator.process_id
    wait_until(lambda: serving_process(tmp_path) == first)
    assert coordinator.poll() is None

    os.kill(first, signal.SIGKILL)
    told: list[str | None] = []

    def is_told() -> bool:
        told.append(coordinator.poll())
        return told[-1] is not None

    wait_until(is_told)

    assert str(told[-1]).startswith("the coordinator died (by signal 9), started again")
    assert coordinator.process_id != first
    wait_until(lambda: serving_process(tmp_path) == coordinator.process_id)
    assert coordinator.failure is None


def test_token_is_the_users_alone_and_goes_with_the_run(
    coordinator: CoordinatorProcess, tmp_path: Path
) -> None:
    token = tmp_path / TOKEN_NAME
    command = Path(f"/proc/{coordinator.process_id}/cmdline").read_bytes()

    assert stat.S_IMODE(token.stat().st_mode) == 0o600
    assert token.read_bytes() not in command
    coordinator.close()
    assert not token.exists()
    assert not Path(f"/proc/{coordinator.process_id}").exists()


def test_question_about_somebody_unknown_is_refused(
    coordinator: CoordinatorProcess, settings: LaunchSettings, tmp_path: Path
) -> None:
    wait_until(lambda: serving_process(tmp_path) == coordinator.process_id)

    question = ask_to_drain(coordinator.spec, ("cpu:7",), EmulatedNetwork(settings))

    assert question.wait(within_s=30.0)
    assert question.refusal == "cpu:7 takes no part; those that do: nobody"


def test_question_without_a_coordinator_has_an_answer(
    settings: LaunchSettings, coordinator: CoordinatorProcess
) -> None:
    spec = dataclasses.replace(coordinator.spec, address_file="/nowhere/coordinator.json")

    question = ask_to_drain(spec, ("cpu:0",), EmulatedNetwork(settings))

    assert question.wait(within_s=30.0)
    assert question.refusal is not None
    assert question.refusal.startswith("the coordinator could not be asked")


def test_wait_grows_with_each_death_of_late_and_ends_some_time() -> None:
    deaths, waits_s = Deaths(), []
    while not deaths.are_too_many:
        deaths = deaths.noted(100.0)
        waits_s.append(deaths.wait_s)

    assert waits_s[:4] == [0.0, 0.1, 0.2, 0.4]
    assert max(waits_s) == 2.0
    assert len(waits_s) == MAX_DEATHS


def test_one_that_had_served_for_a_while_comes_back_at_once() -> None:
    deaths = Deaths().noted(100.0).noted(100.1).noted(100.3)

    again = deaths.noted(110.0, lived_s=9.5)

    assert deaths.wait_s == 0.2
    assert again.wait_s == 0.0
    assert again.noted(110.2, lived_s=0.1).wait_s == 0.1


def test_deaths_of_long_ago_are_forgotten() -> None:
    deaths = Deaths()
    for minute in range(3 * MAX_DEATHS):
        deaths = deaths.noted(60.0 * minute)

    assert deaths.wait_s == 0.0
    assert not deaths.are_too_many


def test_only_training_whose_members_may_change_has_one(settings: LaunchSettings) -> None:
    assert needs_coordinator(settings)
    assert not needs_coordinator(dataclasses.replace(settings, on_loss="stop"))
    assert not needs_coordinator(dataclasses.replace(settings, mode="plan"))
    alone = dataclasses.replace(settings, fleet=cpu_fleet(1), min_devices=1)
    assert not needs_coordinator(alone)


def test_coordinator_waits_for_all_and_holds_with_fewer_than_wanted(
    settings: LaunchSettings,
) -> None:
    limits = limits_of(settings)

    assert (limits.expected_members, limits.min_members) == (3, 2)
