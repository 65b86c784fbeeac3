"""Changing the speed of a running fleet, by command and by schedule."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from geartrain.devices import DeviceProfile
from geartrain.devices.emulation import control as control_module
from geartrain.devices.emulation.control import (
    CONTROL_NAME,
    EmulationControl,
    Registration,
    running_fleets,
    set_running_core_fraction,
)
from geartrain.devices.emulation.owner import Owner
from geartrain.devices.emulation.schedule import (
    ScheduleEntry,
    check_schedule,
    parse_schedule,
)
from geartrain.errors import ConfigError
from geartrain.telemetry import read_document, write_document

IDS = ("emulated:0", "emulated:1")


class FakeThrottle:
    name = "fake"

    def __init__(self) -> None:
        self.fractions = {"emulated:0": 1.0, "emulated:1": 0.5}
        self.num_changes = 0

    def add(self, device: DeviceProfile) -> None:
        self.fractions[device.device_id] = device.core_fraction or 1.0

    def attach(self, device_id: str, pid: int) -> None: ...

    def set_core_fraction(self, device_id: str, core_fraction: float) -> None:
        self.fractions[device_id] = core_fraction
        self.num_changes += 1

    def core_fraction(self, device_id: str) -> float:
        return self.fractions[device_id]

    def out_of_memory_kills(self, device_id: str) -> int:
        return 0

    def close(self) -> None: ...


class FakeClock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def open_control(
    tmp_path: Path, throttle: FakeThrottle, **options: object
) -> EmulationControl:
    run_dir = tmp_path / "run"
    return EmulationControl(
        run_dir,
        throttle,
        IDS,
        state_dir=tmp_path / "state",
        # Where a test does not say so itself, the machine's cores play no part.
        **{"oversubscribed": True} | options,  # type: ignore[arg-type]  # passed through as given
    )


def test_command_reaches_the_throttle_of_the_one_running_fleet(tmp_path: Path) -> None:
    throttle = FakeThrottle()
    control = open_control(tmp_path, throttle)

    run_dir = set_running_core_fraction("emulated:1", 0.25, state_dir=tmp_path / "state")
    (change,) = control.poll()

    assert run_dir == tmp_path / "run"
    assert (change.device_id, change.before, change.after) == ("emulated:1", 0.5, 0.25)
    assert throttle.fractions == {"emulated:0": 1.0, "emulated:1": 0.25}


def test_device_that_is_added_while_the_fleet_runs_can_be_changed(tmp_path: Path) -> None:
    throttle = FakeThrottle()
    control = open_control(tmp_path, throttle)

    throttle.fractions["emulated:2"] = 0.5
    control.add("emulated:2")
    assert control.poll() == ()
    set_running_core_fraction("emulated:2", 0.25, state_dir=tmp_path / "state")
    (change,) = control.poll()

    assert (change.device_id, change.before, change.after) == ("emulated:2", 0.5, 0.25)
    assert throttle.fractions["emulated:0"] == 1.0


def test_poll_without_a_change_touches_nothing(tmp_path: Path) -> None:
    throttle = FakeThrottle()
    control = open_control(tmp_path, throttle)

    assert control.poll() == ()
    assert throttle.num_changes == 0


def test_control_file_that_cannot_be_applied_is_ignored(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    throttle = FakeThrottle()
    control = open_control(tmp_path, throttle)

    write_document(tmp_path / "run" / CONTROL_NAME, {"emulated:0": 7.0})

    assert control.poll() == ()
    assert "core_fraction=7" in caplog.text
    assert throttle.num_changes == 0


def test_schedule_is_applied_in_time_and_shown_in_the_file(tmp_path: Path) -> None:
    throttle, clock = FakeThrottle(), FakeClock()
    schedule = [
        ScheduleEntry(t_s=10, device_id="emulated:0", core_fraction=0.5),
        ScheduleEntry(t_s=20, device_id="emulated:0", core_fraction=1.0),
    ]
    control = open_control(tmp_path, throttle, schedule=schedule, clock=clock)
    clock.now_s += 5
    control.restart_clock()

    clock.now_s += 9
    assert control.poll() == ()
    clock.now_s += 1
    assert [change.after for change in control.poll()] == [0.5]
    shown = read_document(tmp_path / "run" / CONTROL_NAME, dict[str, float])
    assert shown == {"emulated:0": 0.5, "emulated:1": 0.5}
    clock.now_s += 10
    assert [change.after for change in control.poll()] == [1.0]
    assert control.poll() == ()


def test_schedule_of_an_unknown_device_is_refused_at_the_start(tmp_path: Path) -> None:
    entry = ScheduleEntry(t_s=1, device_id="emulated:7", core_fraction=0.5)

    with pytest.raises(ConfigError, match="known are emulated:0, emulated:1"):
        open_control(tmp_path, FakeThrottle(), schedule=[entry])


def test_schedule_that_hands_out_too_many_cores_is_refused() -> None:
    entries = [
        ScheduleEntry(t_s=1, device_id="emulated:0", core_fraction=0.5),
        ScheduleEntry(t_s=1, device_id="emulated:1", core_fraction=1.0),
        ScheduleEntry(t_s=2, device_id="emulated:0", core_fraction=1.0),
    ]
    fractions = {"emulated:0": 1.0, "emulated:1": 0.5}

    check_schedule(entries[:2], fractions, 1.5, oversubscribe=False)
    check_schedule(entries, fractions, 1.5, oversubscribe=True)
    with pytest.raises(ConfigError, match=r"from t_s=2 .* add up to 2 but 1\.5 cores"):
        check_schedule(entries, fractions, 1.5, oversubscribe=False)


def test_more_cores_than_there_are_reach_no_running_fleet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(control_module, "cores_present", lambda: 1.5)
    throttle = FakeThrottle()
    control = open_control(tmp_path, throttle, oversubscribed=False)

    with pytest.raises(ConfigError, match=r"add up to 2 but 1\.5 cores"):
        set_running_core_fraction("emulated:1", 1.0, state_dir=tmp_path / "state")
    write_document(tmp_path / "run" / CONTROL_NAME, {"emulated:1": 1.0})

    assert control.poll() == ()
    assert "add up to 2" in caplog.text
    assert throttle.num_changes == 0


def test_no_running_fleet_is_an_error(tmp_path: Path) -> None:
    control = open_control(tmp_path, FakeThrottle())
    control.close()

    with pytest.raises(ConfigError, match="no emulated fleet is running"):
        set_running_core_fraction("emulated:0", 0.5, state_dir=tmp_path / "state")


def test_unknown_device_and_bad_share_are_errors(tmp_path: Path) -> None:
    state_dir = tmp_path / "state"
    open_control(tmp_path, FakeThrottle())

    with pytest.raises(ConfigError, match="known are emulated:0, emulated:1"):
        set_running_core_fraction("emulated:5", 0.5, state_dir=state_dir)
    with pytest.raises(ConfigError, match=r"must lie in 0\.02\.\.1"):
        set_running_core_fraction("emulated:0", 2.0, state_dir=state_dir)


def test_several_fleets_are_named_until_one_is_chosen(tmp_path: Path) -> None:
    state_dir = tmp_path / "state"
    throttle = FakeThrottle()
    control = open_control(tmp_path, throttle)
    parent = Owner(pid=os.getppid(), start_ticks=start_ticks(os.getppid()))
    other = Registration(run_dir=str(tmp_path / "other"), device_ids=IDS)
    write_document(state_dir / f"{parent.key}.json", other)

    with pytest.raises(ConfigError, match=r"2 emulated fleets are running: .*other"):
        set_running_core_fraction("emulated:0", 0.5, state_dir=state_dir)
    set_running_core_fraction("emulated:0", 0.5, tmp_path / "run", state_dir=state_dir)

    assert len(control.poll()) == 1
    assert len(running_fleets(state_dir)) == 2


def test_schedule_file_reads_in_order_of_time(tmp_path: Path) -> None:
    path = tmp_path / "schedule.csv"
    path.write_text(
        "t_s,device_id,core_fraction\n# slow, then fast\n20,emulated:1,0.5\n\n"
        "2.5, emulated:0 ,0.25\n"
    )

    first, second = parse_schedule(path)

    assert (first.t_s, first.device_id, first.core_fraction) == (2.5, "emulated:0", 0.25)
    assert second.t_s == 20


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "line 1.*expected the header"),
        ("time,device\n", "line 1.*expected the header"),
        ("t_s,device_id,core_fraction\n1,emulated:0\n", "line 2: 2 values"),
        ("t_s,device_id,core_fraction\n1,emulated:0,0.5\nx,emulated:0,1\n", "line 3"),
        ("t_s,device_id,core_fraction\n-1,emulated:0,0.5\n", "line 2: t_s=-1"),
        ("t_s,device_id,core_fraction\n1,,0.5\n", "line 2: device_id is empty"),
        ("t_s,device_id,core_fraction\n1,emulated:0,3\n", "line 2: .*core_fraction=3"),
    ],
)
def test_wrong_schedule_names_the_line(tmp_path: Path, text: str, expected: str) -> None:
    path = tmp_path / "schedule.csv"
    path.write_text(text)

    with pytest.raises(ConfigError, match=expected):
        parse_schedule(path)


def test_schedule_that_a_spreadsheet_saved_is_read(tmp_path: Path) -> None:
    path = tmp_path / "schedule.csv"
    path.write_bytes(b"\xef\xbb\xbft_s,device_id,core_fraction\r\n1,emulated:1,0.1\r\n")

    (entry,) = parse_schedule(path)

    assert (entry.t_s, entry.device_id, entry.core_fraction) == (1, "emulated:1", 0.1)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="not UTF-8 text"):
        parse_schedule(path)


def test_missing_schedule_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read the schedule"):
        parse_schedule(tmp_path / "absent.csv")


def start_ticks(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
