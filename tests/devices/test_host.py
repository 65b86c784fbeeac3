from __future__ import annotations

import os
from pathlib import Path

from geartrain.devices.host import cores_present, cpu_name, host_memory_bytes, node_id


def test_cores_are_those_of_the_affinity_without_a_quota(tmp_path: Path) -> None:
    assert cores_present(tmp_path, "3:cpu:/a\n0::/b") == len(os.sched_getaffinity(0))


def test_version_1_quota_limits_the_cores(tmp_path: Path) -> None:
    group = tmp_path / "cpu" / "jobs"
    group.mkdir(parents=True)
    (group / "cpu.cfs_quota_us").write_text("50000\n")
    (group / "cpu.cfs_period_us").write_text("100000\n")

    assert cores_present(tmp_path, "4:memory:/\n3:cpu,cpuacct:/jobs") == 0.5


def test_version_2_quota_limits_the_cores(tmp_path: Path) -> None:
    (tmp_path / "jobs").mkdir()
    (tmp_path / "jobs" / "cpu.max").write_text("25000 100000\n")

    assert cores_present(tmp_path, "0::/jobs") == 0.25


def test_quota_of_an_outer_group_holds_as_well(tmp_path: Path) -> None:
    (tmp_path / "jobs" / "mine").mkdir(parents=True)
    (tmp_path / "jobs" / "cpu.max").write_text("25000 100000")
    (tmp_path / "jobs" / "mine" / "cpu.max").write_text("max 100000")

    assert cores_present(tmp_path, "0::/jobs/mine") == 0.25


def test_absent_quota_limits_nothing(tmp_path: Path) -> None:
    (tmp_path / "cpu.max").write_text("max 100000")
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text("-1")
    (tmp_path / "cpu" / "cpu.cfs_period_us").write_text("100000")

    assert cores_present(tmp_path, "3:cpu:/\n0::/") == len(os.sched_getaffinity(0))


def test_this_host_has_a_name_a_cpu_and_memory() -> None:
    assert node_id()
    assert all(cpu_name())
    assert cpu_name("")[0]
    assert host_memory_bytes() > 2**28


def test_an_emulated_devices_quota_is_not_its_hosts(tmp_path: Path) -> None:
    group = tmp_path / "jobs" / "geartrain-12-345" / "emulated-0"
    group.mkdir(parents=True)
    (group / "cpu.max").write_text("2000 20000")

    cores = cores_present(tmp_path, "0::/jobs/geartrain-12-345/emulated-0")

    assert cores == len(os.sched_getaffinity(0))
