"""Applies all rules to the facts of a host."""

from __future__ import annotations

from collections.abc import Iterator

from geartrain.devices.interconnect.facts import AbsentFact
from geartrain.topology.advice import ethernet, hardware, roce, tcp
from geartrain.topology.advice.environment import advise_environment, rdma_rails
from geartrain.topology.advice.ethernet import show_rate
from geartrain.topology.advice.finding import FabricAdvice, Finding, Rule
from geartrain.topology.fabric.affinity import nearest_nics
from geartrain.topology.fabric.facts import FabricFacts

RULES: tuple[Rule, ...] = (
    roce.check_mtu,
    roce.check_pfc,
    roce.check_ecn,
    roce.check_trust,
    roce.check_pause,
    roce.check_gids,
    roce.check_losses,
    hardware.check_port_states,
    hardware.check_pci_links,
    hardware.check_affinity,
    hardware.check_gpu_direct,
    hardware.check_iommu,
    hardware.check_locked_memory,
    hardware.check_device_links,
    ethernet.check_jumbo,
    ethernet.check_duplex,
    ethernet.check_speeds,
    ethernet.check_bonds,
    ethernet.check_queues,
    ethernet.check_drops,
    tcp.check_buffers,
    tcp.check_congestion_control,
    tcp.check_slow_start,
    tcp.check_mtu_probing,
)
_ORDER = ("error", "warning", "hint", "good")


def advise(facts: FabricFacts, interface: str | None = None) -> FabricAdvice:
    """Check a host's settings against good practice.

    Args:
        facts: Of one host.
        interface: The network interface for TCP; None chooses.

    Returns:
        Findings, worst first; the environment for NCCL, UCX and Gloo; what could not be
        checked.
    """
    found: list[Finding] = [finding for rule in RULES for finding in rule(facts)]
    return FabricAdvice(
        facts=facts,
        summary=tuple(_summarise(facts)),
        findings=tuple(sorted(found, key=lambda one: _ORDER.index(one.severity))),
        environment=advise_environment(facts, interface),
        affinities=nearest_nics(facts),
        unchecked=relevant_absences(facts),
    )


def relevant_absences(facts: FabricFacts) -> tuple[AbsentFact, ...]:
    """What could not be read and would matter on this host.

    Flow control matters to RDMA only, and links between accelerators where there are
    several.
    """
    without = []
    if not facts.rdma_devices:
        without += ["PFC of ", "ECN of ", "pause of "]
    if len(facts.accelerators) < 2:  # noqa: PLR2004 - one has nobody to be linked to
        without += ["NVLink", "XGMI", "HCCS", "Xe Link"]
    return tuple(one for one in facts.absent if not one.what.startswith(tuple(without)))


def _summarise(facts: FabricFacts) -> Iterator[str]:
    rails = rdma_rails(facts)
    if not facts.rdma_devices:
        yield (
            f"{facts.host} has no RDMA device: exchanges between hosts go over TCP, and "
            "only what applies to TCP is advised"
        )
    elif not rails:
        names = ", ".join(device.name for device in facts.rdma_devices)
        yield f"{facts.host} has RDMA devices ({names}), but no port is active"
    else:
        layer = rails[0][1].link_layer
        network = "RoCE" if layer == "Ethernet" else layer
        rate = show_rate(rails[0][1].bytes_per_s)
        count = f"{len(rails)} active {network} port{'s' if len(rails) > 1 else ''}"
        yield f"{facts.host} has {count} of {rate}"
    kinds = [device.kind for device in facts.accelerators]
    for kind in sorted(set(kinds)):
        yield f"{kinds.count(kind)} {kind}{'s' if kinds.count(kind) > 1 else ''} on PCIe"
    links = [link.kind for link in facts.device_links]
    for link in sorted(set(links)):
        yield f"{links.count(link)} directed device pairs joined by {link}"
