"""Real processes held to their share, by the kernel and by the duty cycle."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from devices.emulation.busy_process import busy_process, cpu_share, favour, favour_cgroups
from devices.emulation.fake_kernel import FakeKernel
from geartrain.devices import DeviceProfile
from geartrain.devices.emulation import start
from geartrain.devices.emulation.cgroup_files import CgroupFiles
from geartrain.devices.emulation.cgroup_throttle import CgroupThrottle
from geartrain.devices.emulation.cgroups import CgroupV1, usable_cgroups
from geartrain.devices.emulation.duty_cycle import Account, DutyCycleThrottle
from geartrain.devices.emulation.owner import current_owner
from geartrain.devices.emulation.start import open_throttle
from geartrain.devices.emulation.throttle import MEMORY_BACKSTOP_BYTES, Throttle
from geartrain.errors import ConfigError, DeviceError

LENGTH_S = 1.5
TOLERANCE = 0.15


def emulated(fraction: float, index: int = 0, limit: int | None = None) -> DeviceProfile:
    return DeviceProfile(
        device_id=f"emulated:{index}",
        node_id="here",
        vendor="any",
        kind="emulated",
        name="part of a core",
        memory_bytes=limit or 2**30,
        core_fraction=fraction,
        memory_limit_bytes=limit,
        source="emulated",
    )


@pytest.fixture
def cgroup_throttle() -> Iterator[Throttle]:
    cgroups = usable_cgroups()
    if cgroups is None:
        pytest.skip("no cgroup controllers can be used here")
    throttle = CgroupThrottle(cgroups, [emulated(0.3)])
    favour_cgroups()
    yield throttle
    throttle.close()


@pytest.fixture
def duty_cycle() -> Iterator[Throttle]:
    throttle = DutyCycleThrottle([emulated(0.3)])
    assert throttle._thread.native_id is not None
    favour(throttle._thread.native_id)
    yield throttle
    throttle.close()


@pytest.mark.root
def test_cgroup_holds_a_process_to_its_share_and_follows_a_change(
    cgroup_throttle: Throttle,
) -> None:
    check_share(cgroup_throttle)


def test_duty_cycle_holds_a_process_to_its_share_and_follows_a_change(
    duty_cycle: Throttle,
) -> None:
    check_share(duty_cycle)


def check_share(throttle: Throttle) -> None:
    with busy_process() as pid:
        favour(pid)
        throttle.attach("emulated:0", pid)
        check_window(pid, 0.3)

        throttle.set_core_fraction("emulated:0", 0.1)
        assert throttle.core_fraction("emulated:0") == pytest.approx(0.1)
        check_window(pid, 0.1)


def check_window(pid: int, fraction: float) -> None:
    """Within the tolerance in one of three windows.

    On a starved host a window may hold less than the share, or the debt of one late
    wake-up, which the next window pays back.
    """
    shares: list[float] = []
    while len(shares) < 3:
        shares.append(cpu_share(pid, LENGTH_S))
        if shares[-1] == pytest.approx(fraction, rel=TOLERANCE):
            return
    pytest.fail(f"shares {shares} in three windows, expected {fraction}")


@pytest.mark.root
def test_cgroup_is_made_for_a_device_that_comes_later(cgroup_throttle: Throttle) -> None:
    check_added(cgroup_throttle)


def test_duty_cycle_takes_a_device_that_comes_later(duty_cycle: Throttle) -> None:
    check_added(duty_cycle)


def check_added(throttle: Throttle) -> None:
    throttle.set_core_fraction("emulated:0", 0.2)
    for device in (emulated(0.4, index=1), emulated(0.3)):
        throttle.add(device)

    with busy_process() as pid:
        throttle.attach("emulated:1", pid)

    assert throttle.core_fraction("emulated:1") == pytest.approx(0.4)
    assert throttle.core_fraction("emulated:0") == pytest.approx(0.2), "it was there"


def test_duty_cycle_lets_a_stopped_process_run_on_when_it_closes() -> None:
    throttle = DutyCycleThrottle([emulated(0.02)])
    with busy_process() as pid:
        throttle.attach("emulated:0", pid)
        assert cpu_share(pid, 0.3) < 0.2

        throttle.close()

        assert process_state(pid) == "R"


def test_duty_cycle_forgets_a_process_that_ended(duty_cycle: Throttle) -> None:
    with busy_process() as pid:
        duty_cycle.attach("emulated:0", pid)

    with pytest.raises(DeviceError, match=f"process {pid} does not run"):
        duty_cycle.attach("emulated:0", pid)


def test_account_pays_an_overshoot_back() -> None:
    account = Account(0.5)

    account.advance(wall_s=0.02, used_s=0.03)  # 10 ms earned, 30 ms used
    wait_s = account.advance(wall_s=0.0, used_s=0.0)

    assert account.is_stopped
    assert wait_s == pytest.approx(0.05)  # 20 ms of debt and half a quota, at 0.5


def test_account_keeps_what_it_earned_while_it_was_stopped_too_long() -> None:
    account = Account(0.5, is_stopped=True)

    account.advance(wall_s=0.1, used_s=0.0)  # the controller woke late
    account.advance(wall_s=0.01, used_s=0.0)  # and then it was free to run

    assert account.credit_s == pytest.approx(0.05)


def test_account_carries_no_savings_over_to_another_share() -> None:
    account = Account(0.5, credit_s=0.05)

    account.change(0.1)

    assert account.credit_s == pytest.approx(0.002)


def test_account_of_an_idle_process_keeps_one_period_only() -> None:
    account = Account(0.5)

    account.advance(wall_s=10.0, used_s=0.0)

    assert account.credit_s == pytest.approx(0.01)
    assert not account.is_stopped


@pytest.mark.root
def test_kernel_kill_above_the_memory_backstop_is_reported() -> None:
    cgroups = usable_cgroups()
    if cgroups is None:
        pytest.skip("no cgroup controllers can be used here")
    device = emulated(1.0, limit=2**20)
    throttle = CgroupThrottle(cgroups, [device])
    code = "import sys; sys.stdin.readline(); held = b'x' * int(sys.argv[1]); print(1)"
    size = str(MEMORY_BACKSTOP_BYTES + 2**26)
    process = subprocess.Popen([sys.executable, "-c", code, size], stdin=subprocess.PIPE)
    try:
        throttle.attach("emulated:0", process.pid)
        assert throttle.out_of_memory_kills("emulated:0") == 0

        process.communicate(b"\n", timeout=60)

        assert process.returncode == -signal.SIGKILL
        assert throttle.out_of_memory_kills("emulated:0") == 1
    finally:
        process.kill()
        process.wait()
        throttle.close()
    assert throttle.out_of_memory_kills("emulated:0") == 1  # known after closing


@pytest.mark.root
def test_close_removes_the_groups(cgroup_throttle: Throttle) -> None:
    cgroups = usable_cgroups()
    assert cgroups is not None
    made = [root / current_owner().name for root in cgroups.roots]
    assert all(path.is_dir() for path in made)

    cgroup_throttle.close()
    cgroup_throttle.close()

    assert not any(path.exists() for path in made)


def test_wrong_requests_name_the_device_and_the_range(duty_cycle: Throttle) -> None:
    for fraction in (0.0, -0.5, 0.01, 1.5, float("nan")):
        with pytest.raises(ConfigError, match=r"emulated:0.*0\.02\.\.1"):
            duty_cycle.set_core_fraction("emulated:0", fraction)
    with pytest.raises(ConfigError, match="known are emulated:0"):
        duty_cycle.attach("emulated:9", os.getpid())


def test_fallback_to_the_duty_cycle_says_that_memory_has_no_backstop(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    monkeypatch.setattr(start, "usable_cgroups", lambda: None)
    monkeypatch.setattr(start, "default_state_dir", lambda: tmp_path)

    with caplog.at_level(logging.WARNING):
        throttle = open_throttle([emulated(0.5, limit=2**30)])
    throttle.close()

    assert throttle.name == "duty-cycle"
    assert "backs no memory limit" in caplog.text


def test_refusing_kernel_leads_to_the_duty_cycle(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    kernel = FakeKernel(tmp_path, 1)
    kernel.refused["cpu.cfs_quota_us"] = "-1"
    monkeypatch.setattr(start, "usable_cgroups", lambda: CgroupV1(kernel, tmp_path))
    monkeypatch.setattr(start, "default_state_dir", lambda: tmp_path)

    throttle = open_throttle([emulated(0.5)])
    throttle.close()

    assert throttle.name == "duty-cycle"
    assert "expected the same" in caplog.text
    assert not list(tmp_path.glob("*/geartrain-*"))


def test_busy_group_is_left_after_a_bounded_wait(tmp_path: Path) -> None:
    (tmp_path / "group" / "child").mkdir(parents=True)

    assert not CgroupFiles().remove(tmp_path / "group")
    assert CgroupFiles().remove(tmp_path / "group" / "child")
    assert CgroupFiles().remove(tmp_path / "absent")


def process_state(pid: int) -> str:
    stat = Path(f"/proc/{pid}/stat").read_text()
    return stat.rpartition(")")[2].split()[0]
