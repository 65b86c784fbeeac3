"""XGMI (Infinity Fabric) between AMD GPUs, from the kernel's KFD topology in sysfs."""

from __future__ import annotations

from pathlib import Path

from geartrain.devices.interconnect.facts import AbsentFact, DeviceLink, InterconnectFacts

_XGMI = 11
"""``HSA_IOLINK_TYPE_XGMI`` in the kernel's ``kfd_topology``; PCIe is 2."""
_BYTES_PER_MEGABYTE = 10**6


def read_xgmi(sysfs_root: Path = Path("/sys")) -> InterconnectFacts:
    """Read the links between AMD GPUs.

    Args:
        sysfs_root: Where sysfs is mounted.

    Returns:
        A record an ordered pair of GPUs; absence with its reason.
    """
    nodes_dir = sysfs_root / "class/kfd/kfd/topology/nodes"
    if not nodes_dir.is_dir():
        return _absent("no AMD compute driver (no /sys/class/kfd)")
    addresses = {}
    for node in sorted(nodes_dir.iterdir()):
        address = _pci_address(_properties(node / "properties"))
        if address is not None:
            addresses[node.name] = address
    links = [
        link
        for name in addresses
        for entry in sorted((nodes_dir / name / "io_links").glob("*"))
        if (link := _read_link(_properties(entry / "properties"), addresses)) is not None
    ]
    if not links:
        return _absent("the AMD compute driver lists no XGMI link")
    return InterconnectFacts(links=tuple(links))


def _absent(reason: str) -> InterconnectFacts:
    return InterconnectFacts(absent=(AbsentFact(what="XGMI", reason=reason),))


def _read_link(values: dict[str, int], addresses: dict[str, str]) -> DeviceLink | None:
    source = addresses.get(str(values.get("node_from")))
    target = addresses.get(str(values.get("node_to")))
    if values.get("type") != _XGMI or source is None or target is None:
        return None  # to a CPU node, or over PCIe
    rate = values.get("max_bandwidth", 0) * _BYTES_PER_MEGABYTE
    return DeviceLink(
        source=source,
        target=target,
        kind="xgmi",
        num_links=1,
        num_active=1,
        bytes_per_s=float(rate) if rate else None,
        read_from="/sys/class/kfd/kfd/topology",
    )


def _properties(path: Path) -> dict[str, int]:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return {}
    pairs = (line.split() for line in lines)
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdigit()}  # noqa: PLR2004


def _pci_address(values: dict[str, int]) -> str | None:
    """Take the PCI address apart that KFD keeps as ``location_id``.

    >>> _pci_address({"simd_count": 304, "location_id": 0x2F00, "domain": 0})
    '0000:2f:00.0'
    """
    if not values.get("simd_count"):
        return None  # a CPU
    place = values.get("location_id", 0)
    bus, device, function = place >> 8, (place >> 3) & 0x1F, place & 0x7
    return f"{values.get('domain', 0):04x}:{bus:02x}:{device:02x}.{function:x}"
