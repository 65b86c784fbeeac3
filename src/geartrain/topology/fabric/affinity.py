"""Who is near whom: accelerators and network cards, by PCIe path and memory node."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from geartrain.topology.fabric.facts import FabricFacts, PciDevice, RdmaDevice

Distance = Literal["PIX", "PXB", "PHB", "NODE", "SYS"]
"""As nvidia-smi and NCCL name it, nearest first: the same PCIe switch, several switches,
the same host bridge, the same memory node, the link between CPUs."""

DISTANCES: tuple[Distance, ...] = get_args(Distance)
"""Nearest first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NicAffinity:
    """An accelerator, and the RDMA devices by distance."""

    accelerator: str
    """PCI address."""
    nearest: tuple[str, ...]
    """Names of the RDMA devices at the least distance."""
    distance: Distance
    distances: dict[str, Distance]
    """Of all RDMA devices."""


def pci_distance(one: PciDevice, other: PciDevice) -> Distance:
    """Tell how far apart two devices are.

    Paths count as sharing a switch if they meet below the root port; a function of the
    same card shares its whole path but the last number.
    """
    if not one.path or not other.path or one.path[0] != other.path[0]:
        return "NODE" if _same_numa_node(one, other) else "SYS"
    shared = 0
    for left, right in zip(one.path, other.path, strict=False):
        if left != right:
            break
        shared += 1
    if shared <= 1:  # only the root complex
        return "PHB"
    if _same_card(one, other):
        return "PIX"
    if shared == 2:  # noqa: PLR2004 - complex and root port, so the first switch's upstream
        return "PXB"
    # Below a root port a switch is two bridges: its upstream port, then one downstream
    # port a device. Meeting in the last upstream port is the same switch.
    is_same_switch = max(len(one.path), len(other.path)) - shared <= 2  # noqa: PLR2004
    return "PIX" if is_same_switch else "PXB"


def nearest_nics(facts: FabricFacts) -> tuple[NicAffinity, ...]:
    """Find the RDMA devices nearest to every accelerator.

    Args:
        facts: Of one host.

    Returns:
        An entry an accelerator, in PCI order; none where there is no RDMA device with
        an active port.
    """
    usable = [device for device in facts.rdma_devices if device.active_ports]
    found = []
    for accelerator in facts.accelerators:
        distances = {}
        for device in usable:
            place = _place(facts, device)
            if place is not None:
                distances[device.name] = pci_distance(accelerator, place)
        if distances:
            least = min(distances.values(), key=DISTANCES.index)
            found.append(
                NicAffinity(
                    accelerator=accelerator.address,
                    nearest=tuple(n for n, far in distances.items() if far == least),
                    distance=least,
                    distances=distances,
                )
            )
    return tuple(found)


def is_farther(one: Distance, other: Distance) -> bool:
    """Whether one distance is greater than another.

    >>> is_farther("SYS", "PIX"), is_farther("PIX", "PXB")
    (True, False)
    """
    return DISTANCES.index(one) > DISTANCES.index(other)


def _place(facts: FabricFacts, device: RdmaDevice) -> PciDevice | None:
    return facts.pci_device(device.pci_address)


def _same_card(one: PciDevice, other: PciDevice) -> bool:
    return one.address.rpartition(".")[0] == other.address.rpartition(".")[0]


def _same_numa_node(one: PciDevice, other: PciDevice) -> bool:
    return one.numa_node is not None and one.numa_node == other.numa_node
