"""Both cgroup interfaces, on a fake kernel."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from devices.emulation.fake_kernel import FakeKernel
from geartrain.devices import DeviceProfile
from geartrain.devices.emulation.cgroup_throttle import CgroupThrottle
from geartrain.devices.emulation.cgroups import (
    MIN_QUOTA_US,
    Cgroups,
    CgroupV1,
    CgroupV2,
    quota_and_period_us,
    usable_cgroups,
)
from geartrain.devices.emulation.owner import current_owner
from geartrain.devices.emulation.throttle import MEMORY_BACKSTOP_BYTES
from geartrain.errors import DeviceError

LIMIT_BYTES = 2**30 + 1000
DEVICE = DeviceProfile(
    device_id="emulated:0",
    node_id="here",
    vendor="any",
    kind="emulated",
    name="half a core",
    memory_bytes=LIMIT_BYTES,
    core_fraction=0.5,
    memory_limit_bytes=LIMIT_BYTES,
    source="emulated",
)


def open_version(tmp_path: Path, version: int) -> tuple[FakeKernel, Cgroups]:
    kernel = FakeKernel(tmp_path, version)
    cgroups = usable_cgroups(kernel, tmp_path)
    assert isinstance(cgroups, CgroupV1 if version == 1 else CgroupV2)
    return kernel, cgroups


@given(st.floats(0.02, 1.0))
def test_quota_gives_the_share_and_the_kernel_takes_it(fraction: float) -> None:
    quota_us, period_us = quota_and_period_us(fraction)

    assert quota_us >= MIN_QUOTA_US
    assert 20_000 <= period_us <= 50_000
    assert quota_us / period_us == pytest.approx(fraction, rel=0.03)


def test_version_1_writes_quota_memory_and_swap(tmp_path: Path) -> None:
    _, cgroups = open_version(tmp_path, 1)
    throttle = CgroupThrottle(cgroups, [DEVICE])
    cpu = tmp_path / "cpu" / current_owner().name / "emulated-0"
    memory = tmp_path / "memory" / current_owner().name / "emulated-0"

    throttle.attach("emulated:0", 4242)

    assert (cpu / "cpu.cfs_period_us").read_text() == "20000"
    assert (cpu / "cpu.cfs_quota_us").read_text() == "10000"
    assert throttle.core_fraction("emulated:0") == 0.5
    assert (cpu.parent / "cpu.shares").read_text() == "16384"
    limit = int((memory / "memory.limit_in_bytes").read_text())
    assert 0 <= LIMIT_BYTES + MEMORY_BACKSTOP_BYTES - limit < 4096
    assert int((memory / "memory.memsw.limit_in_bytes").read_text()) == limit
    assert (cpu / "cgroup.procs").read_text() == "4242\n"
    assert (memory / "cgroup.procs").read_text() == "4242\n"


def test_version_2_enables_controllers_level_by_level(tmp_path: Path) -> None:
    _, cgroups = open_version(tmp_path, 2)
    throttle = CgroupThrottle(cgroups, [DEVICE])
    owner = tmp_path / current_owner().name

    throttle.set_core_fraction("emulated:0", 0.02)

    assert (tmp_path / "cgroup.subtree_control").read_text() == "cpu memory"
    assert (owner / "cgroup.subtree_control").read_text() == "cpu memory"
    assert (owner / "emulated-0" / "cpu.max").read_text() == "1000 50000"
    assert throttle.core_fraction("emulated:0") == pytest.approx(0.02)
    assert (owner / "cpu.weight").read_text() == "1600"
    limit = int((owner / "emulated-0" / "memory.max").read_text())
    assert 0 <= LIMIT_BYTES + MEMORY_BACKSTOP_BYTES - limit < 4096
    assert (owner / "emulated-0" / "memory.swap.max").read_text() == "0"


@pytest.mark.parametrize(
    ("version", "name"),
    [(1, "memory/{group}/memory.oom_control"), (2, "{group}/memory.events")],
)
def test_kills_are_counted_and_remembered(tmp_path: Path, version: int, name: str) -> None:
    _, cgroups = open_version(tmp_path, version)
    throttle = CgroupThrottle(cgroups, [DEVICE])
    path = tmp_path / name.format(group=f"{current_owner().name}/emulated-0")
    before = throttle.out_of_memory_kills("emulated:0")

    path.write_text(path.read_text().replace("oom_kill 0", "oom_kill 2"))
    throttle.close()

    assert before == 0
    assert throttle.out_of_memory_kills("emulated:0") == 2


@pytest.mark.parametrize(
    ("version", "name"),
    [(1, "cpu.cfs_quota_us"), (1, "memory.limit_in_bytes"), (2, "cpu.max")],
)
def test_write_that_the_kernel_changes_is_an_error_and_leaves_nothing(
    tmp_path: Path, version: int, name: str
) -> None:
    kernel, cgroups = open_version(tmp_path, version)
    kernel.refused[name] = "77"

    with pytest.raises(DeviceError, match=f"{name} but it holds '77'"):
        CgroupThrottle(cgroups, [DEVICE])

    assert not list(tmp_path.rglob("geartrain-*"))


def test_version_2_without_delegation_is_an_error_and_leaves_nothing(
    tmp_path: Path,
) -> None:
    kernel, cgroups = open_version(tmp_path, 2)
    kernel.refused["cgroup.subtree_control"] = ""

    with pytest.raises(DeviceError, match="expected cpu and memory"):
        CgroupThrottle(cgroups, [DEVICE])

    assert not list(tmp_path.rglob("geartrain-*"))


def test_looking_for_cgroups_changes_nothing(tmp_path: Path) -> None:
    open_version(tmp_path, 2)

    assert (tmp_path / "cgroup.subtree_control").read_text() == ""


def test_version_2_without_the_memory_controller_is_not_used(tmp_path: Path) -> None:
    kernel = FakeKernel(tmp_path, 2)
    (tmp_path / "cgroup.controllers").write_text("cpu io pids")

    assert usable_cgroups(kernel, tmp_path) is None


def test_process_that_did_not_move_is_an_error(tmp_path: Path) -> None:
    kernel, cgroups = open_version(tmp_path, 2)
    throttle = CgroupThrottle(cgroups, [DEVICE])
    kernel.refused["cgroup.procs"] = "1"

    with pytest.raises(DeviceError, match="process 4242 is not in"):
        throttle.attach("emulated:0", 4242)
