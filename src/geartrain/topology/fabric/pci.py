"""The PCIe devices that an exchange goes through, and the switches above them."""

from __future__ import annotations

import re
from pathlib import Path

from geartrain.topology.fabric.facts import PciDevice, PciKind, PciLink
from geartrain.topology.fabric.small_files import list_dir, pci_path, read_int, read_text

_KINDS: tuple[tuple[str, PciKind], ...] = (
    ("0x0200", "ethernet"),
    ("0x0207", "infiniband"),
    ("0x02", "network"),
    ("0x03", "gpu"),
    ("0x12", "accelerator"),
)
"""By class code, longest first. Source: PCI Code and ID Assignment Specification."""
_CONSOLE_VENDORS = {"0x1a03", "0x102b", "0x1234", "0x1013", "0x15ad", "0x1b36"}
"""ASPEED, Matrox and virtual screens: VGA of a server's console, nothing to compute on."""
_SPEED = re.compile(r"(?P<number>[\d.]+)\s*GT/s")
_TRANSFERS_PER_GIGATRANSFER = 1e9


def read_pci(sysfs_root: Path) -> tuple[PciDevice, ...]:
    """Read GPUs, accelerators and network cards.

    Args:
        sysfs_root: Where sysfs is mounted.
    """
    entries = list_dir(sysfs_root / "bus/pci/devices")
    found = (_read_device(entry) for entry in entries)
    return tuple(device for device in found if device is not None)


def read_numa_node(device: Path) -> int | None:
    """Read the memory node of a device; None where the firmware tells none (-1)."""
    node = read_int(device / "numa_node")
    return node if node is not None and node >= 0 else None


def read_driver(device: Path) -> str | None:
    """Read the name of the driver that holds a device."""
    link = device / "driver"
    return link.resolve().name if link.exists() else None


def _read_device(entry: Path) -> PciDevice | None:
    code = read_text(entry / "class") or ""
    vendor = read_text(entry / "vendor") or ""
    kind = next((kind for start, kind in _KINDS if code.startswith(start)), None)
    if kind is None or (kind == "gpu" and vendor in _CONSOLE_VENDORS):
        return None
    return PciDevice(
        address=entry.name,
        kind=kind,
        vendor_id=vendor,
        device_id=read_text(entry / "device") or "",
        path=pci_path(entry),
        numa_node=read_numa_node(entry),
        link=_read_link(entry),
        driver=read_driver(entry),
        iommu_type=read_text(entry / "iommu_group/type"),
    )


def _read_link(entry: Path) -> PciLink | None:
    speed = _transfers_per_s(read_text(entry / "current_link_speed"))
    max_speed = _transfers_per_s(read_text(entry / "max_link_speed"))
    width = read_int(entry / "current_link_width")
    max_width = read_int(entry / "max_link_width")
    if not (speed and max_speed and width and max_width):
        return None  # a virtual machine's bus has no links
    return PciLink(
        transfers_per_s=speed,
        num_lanes=width,
        max_transfers_per_s=max_speed,
        max_num_lanes=max_width,
    )


def _transfers_per_s(text: str | None) -> float | None:
    """Read "16.0 GT/s PCIe".

    >>> _transfers_per_s("16.0 GT/s PCIe"), _transfers_per_s("Unknown")
    (16000000000.0, None)
    """
    match = _SPEED.search(text or "")
    return float(match["number"]) * _TRANSFERS_PER_GIGATRANSFER if match else None
