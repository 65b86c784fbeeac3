"""The environment of NCCL, UCX and Gloo that fits a host, and why. Printed, never set."""

from __future__ import annotations

from collections.abc import Iterator

from geartrain.topology.advice import sources
from geartrain.topology.advice.ethernet import candidates, show_rate
from geartrain.topology.advice.finding import EnvironmentSetting
from geartrain.topology.advice.roce import (
    DEFAULT_PRIORITY,
    lossless_priorities,
    roce_ports,
)
from geartrain.topology.fabric.affinity import DISTANCES, is_farther, nearest_nics
from geartrain.topology.fabric.facts import (
    FabricFacts,
    Gid,
    NetworkInterface,
    RdmaDevice,
    RdmaPort,
)

_DSCP_BY_PRIORITY = {3: 26}
"""26 (AF31) is what RoCE sends by convention; others follow dscp = 8 x priority."""
_ECN_CAPABLE = 2
"""The two bits below the DSCP: ECT(0), so that switches mark instead of drop."""


def advise_environment(
    facts: FabricFacts, interface: str | None = None
) -> tuple[EnvironmentSetting, ...]:
    """Find the variables that this host wants.

    Args:
        facts: Of one host.
        interface: The network interface to use for TCP; None chooses.

    Returns:
        Settings; only those that differ from what the libraries would find themselves,
        or that pin a choice that could go wrong.
    """
    chosen = interface or choose_interface(facts)
    rails = rdma_rails(facts)
    settings = [*_sockets(facts, chosen, has_rdma=bool(rails))]
    if rails:
        settings += [*_nccl_rdma(facts, rails), *_ucx_rdma(rails, chosen)]
    elif chosen is not None:
        settings += [*_ucx_tcp(chosen)]
    return tuple(settings)


def choose_interface(facts: FabricFacts) -> str | None:
    """Choose the interface for TCP: the default route's, else the fastest with an address.

    On hosts with RDMA rails the default route is usually a management network, which is
    right for TCP: bootstrap and rendezvous are small.
    """
    usable = candidates(facts) or tuple(
        one for one in facts.interfaces if one.is_up and one.has_address
    )
    if not usable:
        return None

    def worth(one: NetworkInterface) -> tuple[bool, float]:
        return (one.is_default_route, one.bytes_per_s or 0.0)

    if not facts.rdma_devices:  # then TCP carries the gradients: the fastest
        return max(usable, key=lambda one: worth(one)[::-1]).name
    return max(usable, key=worth).name


def rdma_rails(facts: FabricFacts) -> tuple[tuple[RdmaDevice, RdmaPort], ...]:
    """Choose the RDMA ports for training: active, of the highest rate there is.

    InfiniBand and RoCE are never mixed: the kind with more such ports is the rails, and
    the other one is for storage.
    """
    ports = [
        (device, port) for device in facts.rdma_devices for port in device.active_ports
    ]
    best = max((port.bytes_per_s or 0.0 for _, port in ports), default=0.0)
    fastest = [pair for pair in ports if (pair[1].bytes_per_s or 0.0) == best]
    layers = [port.link_layer for _, port in fastest]
    layer = max(layers, key=layers.count, default=None)
    return tuple(pair for pair in fastest if pair[1].link_layer == layer)


def traffic_class(facts: FabricFacts) -> int:
    """Work out the traffic class that lands on the lossless priority.

    >>> traffic_class(FabricFacts(host="a"))
    106
    """
    for _, _, interface in roce_ports(facts):
        lossless = lossless_priorities(interface) if interface is not None else None
        if lossless is not None and len(lossless) == 1:
            dscp = _DSCP_BY_PRIORITY.get(lossless[0], 8 * lossless[0])
            return (dscp << 2) | _ECN_CAPABLE
    return (_DSCP_BY_PRIORITY[DEFAULT_PRIORITY] << 2) | _ECN_CAPABLE


def best_gid(port: RdmaPort) -> Gid | None:
    """Choose a port's RoCE v2 GID: IPv4 first, then a routable IPv6 one."""
    return min(
        port.routable_gids, key=lambda gid: (not gid.is_ipv4, gid.index), default=None
    )


def _sockets(
    facts: FabricFacts, chosen: str | None, *, has_rdma: bool
) -> Iterator[EnvironmentSetting]:
    if chosen is None:
        return
    one = facts.interface(chosen)
    rate = show_rate(one.bytes_per_s) if one is not None else "unknown rate"
    role = "bootstrap and rendezvous" if has_rdma else "all traffic between hosts"
    yield EnvironmentSetting(
        library="NCCL",
        name="NCCL_SOCKET_IFNAME",
        value=f"={chosen}",
        why=f"{role} over {chosen} ({rate}) only; without it NCCL may take a bridge or "
        "an interface that does not reach the other hosts; '=' means this name exactly",
        source=sources.NCCL_ENVIRONMENT,
    )
    yield EnvironmentSetting(
        library="Gloo",
        name="GLOO_SOCKET_IFNAME",
        value=chosen,
        why="Gloo otherwise resolves the host's name, which often is the loopback; "
        "geartrain binds its own groups by itself",
        source=sources.TORCH_DISTRIBUTED,
    )


def _nccl_rdma(
    facts: FabricFacts, rails: tuple[tuple[RdmaDevice, RdmaPort], ...]
) -> Iterator[EnvironmentSetting]:
    names = ",".join(f"{device.name}:{port.port}" for device, port in rails)
    yield EnvironmentSetting(
        library="NCCL",
        name="NCCL_IB_HCA",
        value=f"={names}",
        why=f"the active ports of {show_rate(rails[0][1].bytes_per_s)}; slower and "
        "inactive ports are left out, since NCCL goes as fast as the slowest rail",
        source=sources.NCCL_ENVIRONMENT,
    )
    if rails[0][1].link_layer == "Ethernet":
        yield from _nccl_roce(facts, rails)
    yield from _gpu_direct_level(facts)


def _nccl_roce(
    facts: FabricFacts, rails: tuple[tuple[RdmaDevice, RdmaPort], ...]
) -> Iterator[EnvironmentSetting]:
    gids = [best_gid(port) for _, port in rails]
    indices = {gid.index for gid in gids if gid is not None}
    if len(indices) == 1 and None not in gids:
        yield EnvironmentSetting(
            library="NCCL",
            name="NCCL_IB_GID_INDEX",
            value=str(indices.pop()),
            why="the RoCE v2 address of all these ports; from NCCL 2.21 on the default "
            "-1 finds it, before that it is needed",
            source=sources.NCCL_ENVIRONMENT,
        )
    value = traffic_class(facts)
    yield EnvironmentSetting(
        library="NCCL",
        name="NCCL_IB_TC",
        value=str(value),
        why=f"DSCP {value >> 2} with ECN: the lossless priority; the default 0 sends "
        "gradients through the lossy queue. Must agree with the switches",
        source=sources.NCCL_ENVIRONMENT,
    )


def _gpu_direct_level(facts: FabricFacts) -> Iterator[EnvironmentSetting]:
    distances = [near.distance for near in nearest_nics(facts)]
    if not distances or not facts.has_gpu_direct:
        return
    worst = max(distances, key=DISTANCES.index)
    if is_farther(worst, "PHB"):
        return  # NCCL's own choice is the careful one
    yield EnvironmentSetting(
        library="NCCL",
        name="NCCL_NET_GDR_LEVEL",
        value=worst,
        why=f"every GPU has a network card at distance {worst} or nearer, so GPU Direct "
        "is used up to there and not beyond",
        source=sources.NCCL_ENVIRONMENT,
    )


def _ucx_rdma(
    rails: tuple[tuple[RdmaDevice, RdmaPort], ...], chosen: str | None
) -> Iterator[EnvironmentSetting]:
    names = [f"{device.name}:{port.port}" for device, port in rails]
    yield EnvironmentSetting(
        library="UCX",
        name="UCX_NET_DEVICES",
        value=",".join([*names, *([chosen] if chosen else [])]),
        why="the same ports as NCCL, and the TCP interface for the wire-up",
        source=sources.UCX_CONFIGURATION,
    )
    gids = {gid.index for gid in (best_gid(port) for _, port in rails) if gid is not None}
    if rails[0][1].link_layer == "Ethernet" and len(gids) == 1:
        yield EnvironmentSetting(
            library="UCX",
            name="UCX_IB_GID_INDEX",
            value=str(gids.pop()),
            why="the RoCE v2 address; UCX's own choice is usually the same. Its traffic "
            "class is 106 on RoCE v2 by default",
            source=sources.UCX_CONFIGURATION,
        )


def _ucx_tcp(chosen: str) -> Iterator[EnvironmentSetting]:
    yield EnvironmentSetting(
        library="UCX",
        name="UCX_NET_DEVICES",
        value=chosen,
        why="without RDMA UCX uses TCP, over every interface it finds unless told",
        source=sources.UCX_CONFIGURATION,
    )
