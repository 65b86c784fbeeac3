"""Leftovers of killed launchers go, what belongs to the living stays."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from devices.emulation.fake_kernel import FakeKernel
from geartrain.devices.emulation.cgroups import usable_cgroups
from geartrain.devices.emulation.leftovers import sweep_cgroups, sweep_registrations
from geartrain.devices.emulation.owner import Owner, current_owner, parse_owner

OWNER_CODE = """
import subprocess, sys, time
from geartrain.devices import DeviceProfile
from geartrain.devices.emulation.cgroup_throttle import CgroupThrottle
from geartrain.devices.emulation.cgroups import usable_cgroups
from geartrain.devices.emulation.owner import current_owner

device = DeviceProfile(device_id="emulated:0", node_id="n", vendor="v", kind="emulated",
                       name="n", memory_bytes=2**30, core_fraction=0.5)
throttle = CgroupThrottle(usable_cgroups(), [device])
worker = subprocess.Popen(["sleep", "600"])
throttle.attach("emulated:0", worker.pid)
print(current_owner().name, worker.pid, flush=True)
time.sleep(600)
"""


@pytest.mark.root
def test_groups_of_a_killed_owner_go_with_the_processes_left_inside() -> None:
    cgroups = usable_cgroups()
    if cgroups is None:
        pytest.skip("no cgroup controllers can be used here")
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER_CODE], stdout=subprocess.PIPE, text=True
    )
    assert owner.stdout is not None
    with owner.stdout:
        name, worker_pid = owner.stdout.readline().split()
    worker = psutil.Process(int(worker_pid))
    made = [root / name for root in cgroups.roots]
    try:
        sweep_cgroups(cgroups.roots, cgroups.files)
        assert all(path.is_dir() for path in made), "its owner lives"
        assert worker.is_running()

        owner.send_signal(signal.SIGKILL)
        owner.wait(10)
        removed = sweep_cgroups(cgroups.roots, cgroups.files)

        assert set(made) <= set(removed)
        assert not any(path.exists() for path in made)
        assert not worker.is_running() or worker.status() == psutil.STATUS_ZOMBIE
    finally:
        owner.kill()
        owner.wait()
        if worker.is_running():
            worker.kill()


def dead_owner() -> Owner:
    """An owner whose number this process has now: it started at another time."""
    living = current_owner()
    return Owner(pid=living.pid, start_ticks=living.start_ticks - 1)


def test_owner_is_told_from_a_later_process_of_its_number() -> None:
    assert current_owner().is_alive()
    assert not dead_owner().is_alive()


def test_owner_reads_back_from_its_name() -> None:
    assert parse_owner(current_owner().name) == current_owner()
    assert parse_owner("geartrain-12-x") is None


def test_ended_child_that_nobody_waited_for_is_dead() -> None:
    child = subprocess.Popen(["true"])
    stat = Path(f"/proc/{child.pid}/stat")
    start_ticks = int(stat.read_text().rpartition(")")[2].split()[19])
    psutil.wait_procs([psutil.Process(child.pid)], timeout=0)
    child.wait()

    assert not Owner(pid=child.pid, start_ticks=start_ticks).is_alive()


def test_sweep_leaves_the_living_and_strangers(tmp_path: Path) -> None:
    kernel = FakeKernel(tmp_path, 2)
    kernel.write(tmp_path / "cgroup.subtree_control", "+cpu +memory")
    dead, living = dead_owner().name, current_owner().name
    for name in (dead, living, "system.slice", "geartrain-mine"):
        kernel.make(tmp_path / name / "emulated-0")

    removed = sweep_cgroups((tmp_path,), kernel)

    assert removed == [tmp_path / dead]
    left = {path.name for path in tmp_path.iterdir() if path.is_dir()}
    assert left == {living, "system.slice", "geartrain-mine"}


def test_sweep_leaves_groups_of_another_container(tmp_path: Path) -> None:
    kernel = FakeKernel(tmp_path, 2)
    group = tmp_path / dead_owner().name / "emulated-0"
    kernel.make(group)
    (group / "cgroup.procs").write_text("0\n")

    assert sweep_cgroups((tmp_path,), kernel) == []
    assert group.is_dir()


def test_registrations_of_dead_owners_go(tmp_path: Path) -> None:
    dead = tmp_path / f"{dead_owner().key}.json"
    living = tmp_path / f"{current_owner().key}.json"
    other = tmp_path / "notes.json"
    for path in (dead, living, other):
        path.write_text("{}")

    assert sweep_registrations(tmp_path) == [dead]
    assert living.exists()
    assert other.exists()
