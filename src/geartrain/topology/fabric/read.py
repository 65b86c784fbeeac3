"""Reads everything about this host once."""

from __future__ import annotations

from pathlib import Path

from geartrain.devices.host import node_id
from geartrain.devices.interconnect.facts import AbsentFact
from geartrain.devices.interconnect.nvlink import Nvml
from geartrain.devices.interconnect.read import read_interconnect
from geartrain.devices.interconnect.tools import AskTool, ask_tool
from geartrain.topology.fabric.facts import FabricFacts
from geartrain.topology.fabric.host_settings import (
    has_gpu_direct_module,
    read_locked_memory,
    read_numa,
    read_sysctls,
)
from geartrain.topology.fabric.network import read_interfaces
from geartrain.topology.fabric.pci import read_pci
from geartrain.topology.fabric.rdma import read_rdma


def read_fabric(
    sysfs_root: Path = Path("/sys"),
    proc_root: Path = Path("/proc"),
    *,
    ask: AskTool = ask_tool,
    nvml: Nvml | None = None,
    host: str | None = None,
) -> FabricFacts:
    """Read the facts of this host; nothing is changed and nothing is sent.

    Args:
        sysfs_root: Where sysfs is mounted.
        proc_root: Where procfs is mounted.
        ask: Runs a tool that only reads (ethtool, mlnx_qos, dcb, vendors' tools).
        nvml: The ``pynvml`` module; None imports it where it is installed.
        host: The host's name; None asks the system.

    Returns:
        What is there; what could not be read is in ``absent``, with its reason.
    """
    pci_devices = read_pci(sysfs_root)
    interfaces, absent_of_interfaces = read_interfaces(sysfs_root, proc_root, ask)
    rdma_devices = read_rdma(sysfs_root)
    interconnect = read_interconnect(sysfs_root, ask=ask, nvml=nvml)
    is_unlimited, limit_bytes = read_locked_memory(proc_root)
    gpu_vendors = {device.vendor_id for device in pci_devices if device.kind == "gpu"}
    absent = [*interconnect.absent, *absent_of_interfaces]
    if not rdma_devices:
        where = sysfs_root / "class/infiniband"
        what = "has no entry" if where.is_dir() else "does not exist"
        absent.append(AbsentFact(what="RDMA devices", reason=f"{where} {what}"))
    return FabricFacts(
        host=host or node_id(),
        pci_devices=pci_devices,
        numa_nodes=read_numa(sysfs_root),
        interfaces=interfaces,
        rdma_devices=rdma_devices,
        device_links=interconnect.links,
        sysctls=read_sysctls(proc_root),
        is_locked_memory_unlimited=is_unlimited,
        locked_memory_limit_bytes=limit_bytes,
        has_gpu_direct=has_gpu_direct_module(sysfs_root, gpu_vendors),
        absent=tuple(absent),
    )
