"""What the operating system says about this node. Never reaches torch."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import psutil

_CGROUP_ROOT = Path("/sys/fs/cgroup")
_EMULATION_PREFIX = "geartrain-"
"""Of the groups of emulated fleets, see ``emulation.owner``."""


def node_id() -> str:
    """Return this host's name."""
    return platform.node() or "localhost"


def host_memory_bytes() -> int:
    """Return the memory that this host has."""
    return int(psutil.virtual_memory().total)


def cpu_name(cpuinfo: str | None = None) -> tuple[str, str]:
    r"""Return the CPU's vendor and model name.

    Args:
        cpuinfo: Text of ``/proc/cpuinfo``; None reads it.

    >>> cpu_name("vendor_id : GenuineIntel\nmodel name : Xeon")
    ('GenuineIntel', 'Xeon')
    """
    text = _read(Path("/proc/cpuinfo")) if cpuinfo is None else cpuinfo
    fields: dict[str, str] = {}
    for line in text.splitlines():
        key, _, value = line.partition(":")
        fields.setdefault(key.strip(), value.strip())
    vendor = fields.get("vendor_id", platform.machine() or "unknown")
    return vendor, fields.get("model name", platform.processor() or vendor)


def cores_present(
    cgroup_root: Path = _CGROUP_ROOT, own_cgroups: str | None = None
) -> float:
    """Return the cores this process may use: its affinity, less by cgroup quotas.

    Args:
        cgroup_root: Where the cgroup file systems are mounted.
        own_cgroups: Text of ``/proc/self/cgroup``; None reads it.

    Returns:
        Cores; a quota may make them a fraction.
    """
    count = (
        len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count() or 1
    )
    text = _read(Path("/proc/self/cgroup")) if own_cgroups is None else own_cgroups
    return min([float(count), *_quotas(cgroup_root, text)])


def _quotas(root: Path, own_cgroups: str) -> list[float]:
    quotas = []
    for line in own_cgroups.splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if not controllers:
            for mount in (root, root / "unified"):
                quotas += [_v2_quota(group) for group in _up(mount, path)]
        elif "cpu" in controllers.split(","):
            for mount in (root / controllers, root / "cpu"):
                quotas += [_v1_quota(group) for group in _up(mount, path)]
    return [quota for quota in quotas if quota is not None]


def _up(mount: Path, path: str) -> list[Path]:
    """Return a cgroup's directory and those above it: each may set a quota.

    What emulation made is left out: a worker's own share says nothing about its host.
    """
    relative = Path()
    for part in Path(path.lstrip("/")).parts:
        if part.startswith(_EMULATION_PREFIX):
            break
        relative /= part
    return [mount / part for part in (relative, *relative.parents)]


def _v1_quota(group: Path) -> float | None:
    quota, period = _read(group / "cpu.cfs_quota_us"), _read(group / "cpu.cfs_period_us")
    if not quota or not period or int(quota) <= 0:
        return None
    return int(quota) / int(period)


def _v2_quota(group: Path) -> float | None:
    quota, _, period = _read(group / "cpu.max").partition(" ")
    if not period or quota == "max":
        return None
    return int(quota) / int(period)


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
