"""A network of emulated hosts on this machine, as long as a ``with`` block lasts.

Every host is a network namespace with one card, ``eth0``; racks are bridges, joined by
a core bridge, all in a namespace of their own, the fabric. Nothing is made in the
machine's own namespace, so that removing ours removes everything. A hub, a host on the
core whose link is not shaped, holds what all must reach, such as a rendezvous store.

    with NetworkLab(parse_links("2x4:500Mbit:50Mbit")) as lab:
        subprocess.Popen(lab.command(3, ["iperf3", "-s"]))
        lab.set_rate("rack0", LinkRate.both_ways(1.5e6))
        lab.bytes()["rack0"].send_bytes
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from geartrain.devices.emulation.network import wiring
from geartrain.devices.emulation.network.addresses import HUB_INDEX, addresses_of
from geartrain.devices.emulation.network.kernel import (
    check_networks_usable,
    program,
    run_batch,
)
from geartrain.devices.emulation.network.leftovers import (
    lab_prefix,
    remove_namespaces,
    sweep_networks,
)
from geartrain.devices.emulation.network.namespaces import (
    NAMESPACES_DIR,
    entered,
    namespace_path,
)
from geartrain.devices.emulation.network.spec import LinkRate, NetworkSpec
from geartrain.errors import ConfigError, DeviceError

HUB = -1
"""Stands for the hub where a host's index is asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkBytes:
    """What a link has carried since the lab was made, by the kernel's counters.

    Frames with their headers; a train of segments that the kernel hands on as one
    counts its headers once, so that payload <= this <= bytes on a real wire.
    """

    send_bytes: int
    receive_bytes: int

    def __sub__(self, earlier: LinkBytes) -> LinkBytes:
        """What was carried since an earlier reading."""
        return LinkBytes(
            send_bytes=self.send_bytes - earlier.send_bytes,
            receive_bytes=self.receive_bytes - earlier.receive_bytes,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkHost:
    """One emulated host."""

    index: int
    """From 0, rack by rack; the hub's is -1."""
    rack_index: int | None
    """None: the hub."""
    namespace: str
    """The name iproute2 knows; /run/netns has the file."""
    interface: str
    address: str
    """Of the interface: IPv4 where it has one, else IPv6."""
    addresses: tuple[str, ...]
    """All of the interface's own addresses."""


class NetworkLab:
    """Makes the network on entering and removes it on leaving.

    Whatever still runs inside is killed on leaving. What a killed owner left is removed
    when the next lab of any process is made. Labs side by side do not meet.

    Args:
        spec: The network.

    Raises:
        DeviceError: If this process or kernel can't emulate networks; says what is
            missing.
    """

    def __init__(self, spec: NetworkSpec) -> None:
        self.spec = spec
        self._prefix = ""

    def __enter__(self) -> Self:
        check_networks_usable()
        sweep_networks()
        try:
            self._make_fabric()
            self._make_hosts()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End what runs inside and remove the network."""
        if not self._prefix:
            return
        # By name, not by a list, which an interrupted start would have left short.
        made = sorted(path.name for path in NAMESPACES_DIR.glob(f"{self._prefix}*"))
        remove_namespaces(made)

    # -- hosts --------------------------------------------------------------------

    @property
    def hosts(self) -> tuple[NetworkHost, ...]:
        """All hosts, in order; the hub left out."""
        return tuple(self.host(index) for index in range(self.spec.num_hosts))

    def host(self, host_index: int) -> NetworkHost:
        """A host by its index, or the hub.

        Raises:
            ConfigError: If there is none.
        """
        is_hub = host_index == HUB
        rack_index = None if is_hub else self.spec.rack_of(host_index)
        position = HUB_INDEX if is_hub else host_index
        found = addresses_of(position, self.spec.families)
        return NetworkHost(
            index=host_index,
            rack_index=rack_index,
            namespace=self._prefix + ("hub" if is_hub else f"h{host_index}"),
            interface=wiring.INTERFACE,
            address=found[0].ip,
            addresses=tuple(address.ip for address in found),
        )

    def command(self, host_index: int, argv: Sequence[str]) -> list[str]:
        """The command line that runs ``argv`` on a host (or on the hub, ``HUB``).

        The process that is started becomes ``argv`` itself: its id, parent, cgroups and
        mounts are as without. (``ip netns exec`` mounts /sys anew and so hides cgroups.)
        """
        path = namespace_path(self.host(host_index).namespace)
        return [program("nsenter"), f"--net={path}", "--", *argv]

    @contextlib.contextmanager
    def entered(self, host_index: int) -> Iterator[None]:
        """Work on a host in this thread; sockets made there stay there."""
        with entered(self.host(host_index).namespace):
            yield

    # -- links --------------------------------------------------------------------

    @property
    def links(self) -> tuple[str, ...]:
        """``host0`` ... and ``rack0`` ...: what ``bytes`` and ``set_rate`` know."""
        hosts = (f"host{index}" for index in range(self.spec.num_hosts))
        racks = (f"rack{index}" for index in range(len(self.spec.racks)))
        return (*hosts, *racks)

    def bytes(self) -> dict[str, LinkBytes]:
        """What every link has carried in each direction, as its lower end sees it.

        ``bytes()["rack0"].send_bytes`` went from rack 0 to the core.
        """
        counters = self._fabric_counters()
        return {
            link: LinkBytes(
                send_bytes=counters[wiring.port(link)].received_bytes,
                receive_bytes=counters[wiring.port(link)].sent_bytes,
            )
            for link in self.links
        }

    def set_rate(self, link: str, rate: LinkRate) -> None:
        """Give a link of the running network another rate; what is queued stays queued.

        Args:
            link: ``host3`` or ``rack0``.
            rate: In each direction, as the link's lower end sees it.

        Raises:
            ConfigError: If there is no such link.
            DeviceError: If the kernel refuses.
        """
        self._check_link(link)
        up = wiring.shape_line(wiring.sender(link), rate.send_bytes_per_s)
        down = wiring.shape_line(wiring.port(link), rate.receive_bytes_per_s)
        run_batch("tc", [up], namespace=self._sender_namespace(link))
        run_batch("tc", [down], namespace=self._fabric)

    def cut(self, link: str) -> None:
        """Pull the cable of ``host3`` or ``rack0``: nothing passes, nobody is told.

        The host's card loses its carrier, but keeps its addresses and routes.
        """
        self._check_link(link)
        run_batch("ip", [f"link set {wiring.port(link)} down"], namespace=self._fabric)

    def restore(self, link: str) -> None:
        """Plug the cable in again."""
        self._check_link(link)
        run_batch("ip", [f"link set {wiring.port(link)} up"], namespace=self._fabric)

    # -- internals ----------------------------------------------------------------

    @property
    def _fabric(self) -> str:
        return self._prefix + "fabric"

    def _sender_namespace(self, link: str) -> str:
        if link.startswith("host"):
            return self.host(int(link.removeprefix("host"))).namespace
        return self._fabric

    def _check_link(self, link: str) -> None:
        if link not in self.links:
            msg = f"no link {link!r}; the network has {', '.join(self.links)}"
            raise ConfigError(msg)

    def _make_fabric(self) -> None:
        """Claim a number no other lab of this process has, by making the fabric."""
        lab_index = 0
        while True:
            prefix = lab_prefix(lab_index)
            if not namespace_path(f"{prefix}fabric").exists():
                try:
                    run_batch("ip", [f"netns add {prefix}fabric"])
                except DeviceError:
                    if not namespace_path(f"{prefix}fabric").exists():
                        raise
                else:
                    self._prefix = prefix
                    return
            lab_index += 1

    def _make_hosts(self) -> None:
        hub = self.host(HUB)
        hosts = self.hosts
        names = [host.namespace for host in (hub, *hosts)]
        run_batch("ip", [f"netns add {name}" for name in names])
        with entered(self._fabric):
            wiring.quiet_namespace(has_ipv6=False)
        for name in names:
            with entered(name):
                self._quiet_host()
        run_batch("ip", wiring.bridge_lines(self.spec), namespace=self._fabric)
        ports = wiring.port_lines(self.spec, [h.namespace for h in hosts], hub.namespace)
        run_batch("ip", ports, namespace=self._fabric)
        run_batch("tc", wiring.fabric_shape_lines(self.spec), namespace=self._fabric)
        for host in (*hosts, hub):
            self._set_up(host)

    def _quiet_host(self) -> None:
        has_ipv6 = self.spec.families != "ipv4"
        if has_ipv6:
            wiring.check_ipv6()
        wiring.quiet_namespace(has_ipv6=has_ipv6)

    def _set_up(self, host: NetworkHost) -> None:
        spec = self.spec
        position = HUB_INDEX if host.index == HUB else host.index
        run_batch("ip", wiring.host_lines(spec, position), namespace=host.namespace)
        if host.index == HUB:
            return
        run_batch("tc", wiring.host_shape_lines(spec, position), namespace=host.namespace)
        if spec.congestion_control is not None:
            with entered(host.namespace):
                wiring.set_congestion_control(spec.congestion_control)

    def _fabric_counters(self) -> dict[str, wiring.DeviceBytes]:
        with entered(self._fabric):
            # The thread's own entry: /proc/net is the process's, elsewhere.
            text = Path("/proc/thread-self/net/dev").read_text()
        return wiring.parse_device_bytes(text)
