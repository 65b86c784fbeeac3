"""Rules for PCIe, NUMA, GPU Direct and pinned memory."""

from __future__ import annotations

from collections.abc import Iterator

from geartrain.topology.advice import sources
from geartrain.topology.advice.ethernet import show_rate
from geartrain.topology.advice.finding import Finding
from geartrain.topology.fabric.affinity import is_farther, nearest_nics
from geartrain.topology.fabric.facts import FabricFacts, PciDevice, PciLink

_ENOUGH = 0.95
"""A PCIe link that carries the port's rate to within headers is no bottleneck."""


def check_pci_links(facts: FabricFacts) -> Iterator[Finding]:
    """A device whose PCIe link came up narrow or slow."""
    for device in facts.pci_devices:
        link = device.link
        if link is None:
            continue
        is_narrow = link.num_lanes < link.max_num_lanes
        is_slow = link.transfers_per_s < link.max_transfers_per_s
        # An idle GPU lowers its link's speed to save power, never its width.
        saves_power = device.kind == "gpu" and not is_narrow
        fits = _carries_port(facts, device, link)
        if is_narrow and not fits:
            severity, action = "warning", "reseat the card or use a wider slot; see dmesg"
        elif is_slow and not saves_power and not fits:
            severity, action = "warning", "set the slot's speed in the firmware; see dmesg"
        elif is_narrow or (is_slow and not saves_power):
            severity, action = "hint", "the link still carries the port's rate"
        else:
            severity, action = "good", ""
        yield Finding(
            rule="pci-link",
            severity=severity,  # type: ignore[arg-type]  # one of the literals above
            subject=_name(facts, device),
            found=_show_link(link.transfers_per_s, link.num_lanes)
            + (" (an idle GPU saves power)" if is_slow and saves_power else ""),
            read_from=f"/sys/bus/pci/devices/{device.address}/current_link_*",
            expected=_show_link(link.max_transfers_per_s, link.max_num_lanes),
            action=action,
            why=f"it carries {show_rate(link.bytes_per_s)} at most, each way",
            source=sources.KERNEL_PCI_SYSFS,
        )


def check_affinity(facts: FabricFacts) -> Iterator[Finding]:
    """An accelerator far from every RDMA device sends through the CPU."""
    for near in nearest_nics(facts):
        is_far = is_farther(near.distance, "PHB")
        yield Finding(
            rule="gpu-nic-distance",
            severity="hint" if is_far else "good",
            subject=near.accelerator,
            found=f"nearest RDMA device: {', '.join(near.nearest)} ({near.distance})",
            read_from="the PCIe tree below /sys/devices and numa_node",
            expected="PIX or PXB: below the same PCIe switches",
            action="move the card to a slot of the accelerator's CPU or switch, if there "
            "is one"
            if is_far
            else "",
            why="between CPUs the copy crosses their link twice and GPU Direct is off",
            source=sources.NCCL_ENVIRONMENT,
        )


def check_gpu_direct(facts: FabricFacts) -> Iterator[Finding]:
    """Without its module, every byte goes through host memory."""
    if facts.has_gpu_direct is None or not nearest_nics(facts):
        return
    is_good = facts.has_gpu_direct
    yield Finding(
        rule="gpu-direct",
        severity="good" if is_good else "warning",
        subject="host",
        found="the module is loaded" if is_good else "no nvidia_peermem module",
        read_from="/sys/module",
        expected="nvidia_peermem, or a kernel and driver with dma-buf",
        action=""
        if is_good
        else "modprobe nvidia_peermem (open drivers on kernels "
        "from 5.12 on use dma-buf instead; NCCL_DEBUG=INFO tells)",
        why="the card then reads GPU memory itself instead of through host memory",
        source=sources.NCCL_GPU_TROUBLES,
    )


def check_iommu(facts: FabricFacts) -> Iterator[Finding]:
    """A translating IOMMU sends device-to-device traffic through the root complex."""
    used = [one for one in facts.pci_devices if one.iommu_type is not None]
    if not facts.rdma_devices or not facts.accelerators or not used:
        return
    translated = [one for one in used if str(one.iommu_type).startswith("DMA")]
    yield Finding(
        rule="iommu",
        severity="warning" if translated else "good",
        subject="host",
        found=f"translated: {', '.join(one.address for one in translated)}"
        if translated
        else "devices are passed through",
        read_from="/sys/bus/pci/devices/*/iommu_group/type",
        expected="identity",
        action="boot with iommu=pt (Intel: intel_iommu=on iommu=pt), and turn PCI ACS off "
        "in the firmware unless virtual machines need it"
        if translated
        else "",
        why="GPU Direct traffic otherwise goes up to the CPU's root complex and back",
        source=sources.NCCL_GPU_TROUBLES,
    )


def check_locked_memory(facts: FabricFacts) -> Iterator[Finding]:
    """RDMA pins its buffers."""
    if not facts.rdma_devices or facts.is_locked_memory_unlimited is None:
        return
    is_good = facts.is_locked_memory_unlimited
    yield Finding(
        rule="locked-memory",
        severity="good" if is_good else "error",
        subject="host",
        found="unlimited"
        if is_good
        else f"a process may pin {facts.locked_memory_limit_bytes} bytes",
        read_from="/proc/self/limits",
        expected="unlimited",
        action=""
        if is_good
        else "memlock unlimited in /etc/security/limits.d (container: --ulimit memlock=-1)",
        why="registering a buffer for RDMA fails above the limit",
        source=sources.RED_HAT_RDMA,
    )


def check_port_states(facts: FabricFacts) -> Iterator[Finding]:
    """A port that is down, beside others that are up."""
    active = [one for one in facts.rdma_devices if one.active_ports]
    for device in facts.rdma_devices:
        for port in device.ports:
            if not port.is_active and active:
                yield Finding(
                    rule="port-state",
                    severity="hint",
                    subject=f"{device.name} port {port.port}",
                    found=f"state {port.state}",
                    read_from=f"/sys/class/infiniband/{device.name}/ports/{port.port}/state",
                    expected="4: ACTIVE",
                    action="check the cable, or leave the port out (see NCCL_IB_HCA below)",
                    why="a rail that is down makes this host slower than the others",
                    source=sources.NCCL_ENVIRONMENT,
                )


def check_device_links(facts: FabricFacts) -> Iterator[Finding]:
    """Links between accelerators that are down."""
    for link in facts.device_links:
        if link.num_active < link.num_links:
            yield Finding(
                rule="device-links",
                severity="warning",
                subject=f"{link.source} -> {link.target}",
                found=f"{link.num_active} of {link.num_links} {link.kind} links are active",
                read_from=link.read_from,
                expected="all active",
                action="see dmesg and the vendor's diagnosis; a reset may bring them back",
                why="collectives inside the host go at the speed of the weakest pair",
                source=sources.NCCL_GPU_TROUBLES,
            )


def _carries_port(facts: FabricFacts, device: PciDevice, link: PciLink) -> bool:
    """Whether a card's PCIe link is wide enough for its network port all the same."""
    rates = [
        port.bytes_per_s or 0.0
        for rdma in facts.rdma_devices
        if rdma.pci_address == device.address
        for port in rdma.ports
    ]
    rates += [
        one.bytes_per_s or 0.0
        for one in facts.interfaces
        if one.pci_address == device.address
    ]
    known = [rate for rate in rates if rate > 0]
    return bool(known) and link.bytes_per_s >= _ENOUGH * max(known)


def _show_link(transfers_per_s: float, num_lanes: int) -> str:
    return f"{transfers_per_s / 1e9:g} GT/s x{num_lanes}"


def _name(facts: FabricFacts, device: PciDevice) -> str:
    names = [one.name for one in facts.rdma_devices if one.pci_address == device.address]
    names += [one.name for one in facts.interfaces if one.pci_address == device.address]
    return f"{device.address} ({names[0] if names else device.kind})"
