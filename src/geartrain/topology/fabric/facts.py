"""Facts of one host: PCIe, NUMA, network interfaces, RDMA devices, kernel settings.

None stands for "could not be read"; ``FabricFacts.absent`` says why.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from geartrain.devices.interconnect.facts import AbsentFact, DeviceLink

PciKind = Literal["gpu", "accelerator", "ethernet", "infiniband", "network"]
LinkLayer = Literal["Ethernet", "InfiniBand", "unknown"]

_ENCODING = 128 / 130
"""Of PCIe 3 to 5; PCIe 1 and 2 use 8/10, PCIe 6 has no such overhead."""
_OLD_ENCODING = 8 / 10
_LAST_OLD_TRANSFERS_PER_S = 5e9
_LAST_ENCODED_TRANSFERS_PER_S = 32e9


@dataclass(frozen=True, slots=True, kw_only=True)
class PciLink:
    """What a device's PCIe link runs at, and what both ends could."""

    transfers_per_s: float
    """Of one lane, such as 16e9 for "16.0 GT/s"."""
    num_lanes: int
    max_transfers_per_s: float
    max_num_lanes: int

    @property
    def bytes_per_s(self) -> float:
        """Raw rate of one direction, before packet headers."""
        return _pci_bytes_per_s(self.transfers_per_s, self.num_lanes)


@dataclass(frozen=True, slots=True, kw_only=True)
class PciDevice:
    """A GPU, another accelerator or a network card."""

    address: str
    """``0000:17:00.0``."""
    kind: PciKind
    vendor_id: str
    device_id: str
    path: tuple[str, ...]
    """From the root complex (``pci0000:00``) over root port and switches to the device."""
    numa_node: int | None = None
    link: PciLink | None = None
    driver: str | None = None
    iommu_type: str | None = None
    """``identity`` (passed through), ``DMA`` or ``DMA-FQ`` (translated)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NumaNode:
    """A memory node, and how far the others are (10 is itself)."""

    node: int
    cpus: str
    distances: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowControl:
    """How a port keeps from losing frames, one entry a priority 0 to 7."""

    pfc: tuple[bool, ...] | None = None
    ecn_notification: tuple[bool, ...] | None = None
    """Whether a receiver reports marked packets to their sender (DCQCN's NP)."""
    ecn_reaction: tuple[bool, ...] | None = None
    """Whether a sender slows down when told (DCQCN's RP)."""
    trust: str | None = None
    """What a packet's priority is taken from: ``dscp`` or ``pcp``."""
    pause_receive: bool | None = None
    """Global pause, all priorities alike."""
    pause_transmit: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Bond:
    """Several interfaces used as one."""

    mode: str
    transmit_hash: str
    """Which header fields choose the member: ``layer2``, ``layer3+4``..."""
    member_names: tuple[str, ...]
    monitor_interval_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkInterface:
    """A network interface as the kernel shows it."""

    name: str
    is_physical: bool
    is_up: bool
    has_address: bool
    """Whether IP packets are routed over it."""
    is_default_route: bool
    mtu_bytes: int
    bytes_per_s: float | None = None
    """Nominal rate; None for virtual interfaces, which know none."""
    is_full_duplex: bool | None = None
    transmit_queue_length: int | None = None
    pci_address: str | None = None
    numa_node: int | None = None
    driver: str | None = None
    bond: Bond | None = None
    master: str | None = None
    """The bond or bridge that it belongs to."""
    flow_control: FlowControl = field(default_factory=FlowControl)
    receive_ring: int | None = None
    max_receive_ring: int | None = None
    num_received: int | None = None
    num_dropped: int | None = None
    """Received packets that were dropped or missed since boot."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gid:
    """An entry of a port's table of global identifiers: under which address it sends."""

    index: int
    gid: str
    kind: str
    """``RoCE v2``, ``IB/RoCE v1``; ``IB`` where the driver says nothing."""
    interface: str | None = None

    @property
    def is_ipv4(self) -> bool:
        """Whether it is an IPv4 address mapped into IPv6."""
        return self.gid.lower().startswith("0000:0000:0000:0000:0000:ffff:")

    @property
    def is_link_local(self) -> bool:
        """Whether routers would drop it."""
        return self.gid.lower().startswith("fe80:")


@dataclass(frozen=True, slots=True, kw_only=True)
class RdmaPort:
    """A port of an RDMA device."""

    port: int
    is_active: bool
    state: str
    link_layer: LinkLayer
    bytes_per_s: float | None = None
    gids: tuple[Gid, ...] = ()
    traffic_class: int | None = None
    """Forced for all queue pairs, where the driver offers that; else None."""
    counters: dict[str, int] = field(default_factory=dict)
    """Error and congestion counters that are not zero."""

    @property
    def routable_gids(self) -> tuple[Gid, ...]:
        """RoCE v2 addresses that routers pass on."""
        return tuple(g for g in self.gids if "v2" in g.kind and not g.is_link_local)


@dataclass(frozen=True, slots=True, kw_only=True)
class RdmaDevice:
    """An RDMA device: InfiniBand or RoCE."""

    name: str
    ports: tuple[RdmaPort, ...]
    pci_address: str | None = None
    numa_node: int | None = None
    interfaces: tuple[str, ...] = ()
    """Network interfaces of the same hardware."""
    firmware: str | None = None

    @property
    def active_ports(self) -> tuple[RdmaPort, ...]:
        """Ports that could carry traffic now."""
        return tuple(port for port in self.ports if port.is_active)


@dataclass(frozen=True, slots=True, kw_only=True)
class FabricFacts:
    """All that was read of one host."""

    host: str
    pci_devices: tuple[PciDevice, ...] = ()
    numa_nodes: tuple[NumaNode, ...] = ()
    interfaces: tuple[NetworkInterface, ...] = ()
    rdma_devices: tuple[RdmaDevice, ...] = ()
    device_links: tuple[DeviceLink, ...] = ()
    sysctls: dict[str, str] = field(default_factory=dict)
    is_locked_memory_unlimited: bool | None = None
    locked_memory_limit_bytes: int | None = None
    """What a process of this user may pin, where that is limited."""
    has_gpu_direct: bool | None = None
    """Whether a kernel module lets network cards reach GPU memory; None without a GPU."""
    absent: tuple[AbsentFact, ...] = ()
    schema_version: int = 1

    def interface(self, name: str) -> NetworkInterface | None:
        """The interface of that name, if any."""
        return next((one for one in self.interfaces if one.name == name), None)

    def pci_device(self, address: str | None) -> PciDevice | None:
        """The PCI device at that address, if it is one that matters here."""
        return next((one for one in self.pci_devices if one.address == address), None)

    @property
    def accelerators(self) -> tuple[PciDevice, ...]:
        """GPUs and other accelerators."""
        kinds = {"gpu", "accelerator"}
        return tuple(one for one in self.pci_devices if one.kind in kinds)


def _pci_bytes_per_s(transfers_per_s: float, num_lanes: int) -> float:
    if transfers_per_s <= _LAST_OLD_TRANSFERS_PER_S:
        encoding = _OLD_ENCODING
    elif transfers_per_s <= _LAST_ENCODED_TRANSFERS_PER_S:
        encoding = _ENCODING
    else:
        encoding = 1.0
    return transfers_per_s * encoding * num_lanes / 8
