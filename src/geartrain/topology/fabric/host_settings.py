"""Kernel settings and limits that an exchange depends on."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from geartrain.topology.fabric.facts import NumaNode
from geartrain.topology.fabric.small_files import list_dir, read_text

_SYSCTLS = (
    "net.core.rmem_max",
    "net.core.wmem_max",
    "net.core.default_qdisc",
    "net.core.netdev_max_backlog",
    "net.ipv4.tcp_rmem",
    "net.ipv4.tcp_wmem",
    "net.ipv4.tcp_congestion_control",
    "net.ipv4.tcp_available_congestion_control",
    "net.ipv4.tcp_ecn",
    "net.ipv4.tcp_mtu_probing",
    "net.ipv4.tcp_slow_start_after_idle",
)
_GPU_DIRECT_MODULES = {
    "0x10de": ("nvidia_peermem", "nv_peer_mem"),
    "0x1002": ("amdgpu",),  # which has it built in
}
"""By PCI vendor: NVIDIA, AMD."""


def read_sysctls(proc_root: Path) -> dict[str, str]:
    """Read the settings of the TCP stack that are there.

    Args:
        proc_root: Where procfs is mounted.
    """
    found = {}
    for name in _SYSCTLS:
        text = read_text(proc_root / "sys" / name.replace(".", "/"))
        if text is not None:
            found[name] = " ".join(text.split())
    return found


def read_locked_memory(proc_root: Path) -> tuple[bool | None, int | None]:
    """Read how much memory this process may pin.

    Returns:
        Whether that is unlimited, and the limit in bytes where it is not.
    """
    text = read_text(proc_root / "self/limits") or ""
    for line in text.splitlines():
        if line.startswith("Max locked memory"):
            limit = line.removeprefix("Max locked memory").split()[0]
            return (True, None) if limit == "unlimited" else (False, int(limit))
    return None, None


def read_numa(sysfs_root: Path) -> tuple[NumaNode, ...]:
    """Read the memory nodes and their distances."""
    nodes = []
    for entry in list_dir(sysfs_root / "devices/system/node"):
        number = entry.name.removeprefix("node")
        if entry.name.startswith("node") and number.isdigit():
            distances = (read_text(entry / "distance") or "").split()
            nodes.append(
                NumaNode(
                    node=int(number),
                    cpus=read_text(entry / "cpulist") or "",
                    distances=tuple(int(distance) for distance in distances),
                )
            )
    return tuple(nodes)


def has_gpu_direct_module(sysfs_root: Path, vendor_ids: Collection[str]) -> bool | None:
    """Whether a module that lets network cards reach GPU memory is loaded.

    Args:
        sysfs_root: Where sysfs is mounted.
        vendor_ids: Of the GPUs here.

    Returns:
        None if no GPU is of a vendor whose modules are known.
    """
    known = [vendor for vendor in vendor_ids if vendor in _GPU_DIRECT_MODULES]
    if not known:
        return None
    return all(
        any((sysfs_root / "module" / name).is_dir() for name in _GPU_DIRECT_MODULES[vendor])
        for vendor in known
    )
