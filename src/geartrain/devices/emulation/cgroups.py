"""The two cgroup interfaces, v1 and v2, as one small protocol."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Protocol

from geartrain.devices.emulation.cgroup_files import CgroupFiles
from geartrain.errors import DeviceError

PERIOD_US = 20_000
LONG_PERIOD_US = 50_000
MIN_QUOTA_US = 1_000
"""The kernel refuses a smaller quota."""

SHARES_V1 = 16 * 1024
WEIGHT_V2 = 16 * 100
"""Of a whole fleet against everything else on the host: 16 times the usual. A device
of half a core should have its half also while something else computes; the quotas see
to it that it gets no more."""

_CGROUP_ROOT = Path("/sys/fs/cgroup")


class Cgroups(Protocol):
    """One version of the kernel's control groups."""

    name: str
    files: CgroupFiles

    @property
    def roots(self) -> tuple[Path, ...]:
        """Where groups are made, one directory a hierarchy."""

    def prepare(self, owner_name: str) -> None:
        """Make an owner's directory, in which groups can then be limited."""

    def limit_cores(self, group: str, core_fraction: float) -> None:
        """Hold a group to a share of one core."""

    def core_fraction(self, group: str) -> float:
        """Read that share back."""

    def limit_memory(self, group: str, limit_bytes: int) -> None:
        """Have the kernel kill what grows beyond this many bytes."""

    def out_of_memory_kills(self, group: str) -> int:
        """How often the kernel killed a process of the group for its memory."""


def quota_and_period_us(core_fraction: float) -> tuple[int, int]:
    """Quota and period of a share of one core.

    A short period keeps the throttling fine-grained against a training step; shares
    below a twentieth need the longer one, as the kernel wants 1 ms of quota.

    >>> quota_and_period_us(0.5), quota_and_period_us(0.02)
    ((10000, 20000), (1000, 50000))
    """
    period_us = PERIOD_US if core_fraction * PERIOD_US >= MIN_QUOTA_US else LONG_PERIOD_US
    return max(round(core_fraction * period_us), MIN_QUOTA_US), period_us


class CgroupV1:
    """Control groups, version 1: a hierarchy a controller."""

    name = "cgroup-v1"

    def __init__(self, files: CgroupFiles, root: Path = _CGROUP_ROOT) -> None:
        self.files = files
        self._cpu = root / "cpu"
        self._memory = root / "memory"

    @property
    def roots(self) -> tuple[Path, ...]:
        """The cpu and the memory hierarchy."""
        return (self._cpu, self._memory)

    def is_usable(self) -> bool:
        """Whether both controllers are mounted and may be written."""
        return (
            (self._cpu / "cpu.cfs_quota_us").exists()
            and (self._memory / "memory.limit_in_bytes").exists()
            and all(os.access(root, os.W_OK) for root in self.roots)
        )

    def prepare(self, owner_name: str) -> None:
        """Make the owner's directory in both hierarchies, and give it weight."""
        for root in self.roots:
            self.files.make(root / owner_name)
        self.files.write_checked(self._cpu / owner_name / "cpu.shares", str(SHARES_V1))

    def limit_cores(self, group: str, core_fraction: float) -> None:
        """Set the group's CFS quota."""
        quota_us, period_us = quota_and_period_us(core_fraction)
        directory = self._cpu / group
        self.files.write_checked(directory / "cpu.cfs_period_us", str(period_us))
        self.files.write_checked(directory / "cpu.cfs_quota_us", str(quota_us))

    def core_fraction(self, group: str) -> float:
        """Read the group's quota over its period."""
        directory = self._cpu / group
        quota_us = int(self.files.read(directory / "cpu.cfs_quota_us"))
        return quota_us / int(self.files.read(directory / "cpu.cfs_period_us"))

    def limit_memory(self, group: str, limit_bytes: int) -> None:
        """Limit memory, and memory with swap where the kernel counts that."""
        page = os.sysconf("SC_PAGE_SIZE")
        directory = self._memory / group
        for name in ("memory.limit_in_bytes", "memory.memsw.limit_in_bytes"):
            path = directory / name
            if name == "memory.limit_in_bytes" or path.exists():
                self.files.write_checked(path, str(limit_bytes), tolerance=page)

    def out_of_memory_kills(self, group: str) -> int:
        """Read the kernel's count of kills."""
        text = self.files.read(self._memory / group / "memory.oom_control")
        return _counter(text, "oom_kill")


class CgroupV2:
    """Control groups, version 2: one hierarchy, controllers enabled level by level."""

    name = "cgroup-v2"

    def __init__(self, files: CgroupFiles, root: Path = _CGROUP_ROOT) -> None:
        self.files = files
        self._root = root

    @property
    def roots(self) -> tuple[Path, ...]:
        """The one hierarchy."""
        return (self._root,)

    def is_usable(self) -> bool:
        """Whether cpu and memory exist here and groups may be made.

        ``prepare`` may still fail: in a container the visible root often has processes
        of its own, and then the kernel enables no controllers below it.
        """
        try:
            present = self.files.read(self._root / "cgroup.controllers").split()
        except DeviceError:
            return False
        return {"cpu", "memory"} <= set(present) and os.access(self._root, os.W_OK)

    def prepare(self, owner_name: str) -> None:
        """Enable the controllers at the root, make the directory, and enable there.

        Raises:
            DeviceError: If the kernel refuses.
        """
        self._enable(self._root)
        self.files.make(self._root / owner_name)
        self._enable(self._root / owner_name)
        path = self._root / owner_name / "cpu.weight"
        self.files.write_checked(path, str(WEIGHT_V2))

    def _enable(self, directory: Path) -> None:
        path = directory / "cgroup.subtree_control"
        if {"cpu", "memory"} <= set(self.files.read(path).split()):
            return
        self.files.write(path, "+cpu +memory")
        enabled = set(self.files.read(path).split())
        if not {"cpu", "memory"} <= enabled:
            msg = f"{path} holds {sorted(enabled)} after enabling; expected cpu and memory"
            raise DeviceError(msg)

    def limit_cores(self, group: str, core_fraction: float) -> None:
        """Set the group's ``cpu.max``."""
        quota_us, period_us = quota_and_period_us(core_fraction)
        path = self._root / group / "cpu.max"
        self.files.write_checked(path, f"{quota_us} {period_us}")

    def core_fraction(self, group: str) -> float:
        """Read the group's quota over its period."""
        quota_us, period_us = self.files.read(self._root / group / "cpu.max").split()
        return int(quota_us) / int(period_us)

    def limit_memory(self, group: str, limit_bytes: int) -> None:
        """Limit memory and forbid swap where the kernel counts that."""
        directory = self._root / group
        page = os.sysconf("SC_PAGE_SIZE")
        self.files.write_checked(directory / "memory.max", str(limit_bytes), tolerance=page)
        if (directory / "memory.swap.max").exists():
            self.files.write_checked(directory / "memory.swap.max", "0")

    def out_of_memory_kills(self, group: str) -> int:
        """Read the kernel's count of kills."""
        return _counter(self.files.read(self._root / group / "memory.events"), "oom_kill")


def usable_cgroups(
    files: CgroupFiles | None = None, root: Path = _CGROUP_ROOT
) -> Cgroups | None:
    """Return the interface this process may use; None where there is none."""
    files = files or CgroupFiles()
    for cgroups in (CgroupV1(files, root), CgroupV2(files, root)):
        if cgroups.is_usable():
            return cgroups
    return None


def _counter(text: str, name: str) -> int:
    for line in text.splitlines():
        key, _, value = line.partition(" ")
        if key == name:
            return int(value)
    return 0  # kernels before 4.13 count no kills
