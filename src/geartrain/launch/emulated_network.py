"""Puts every emulated device of a run on a host of its own; nothing without links."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace

from geartrain.devices.emulation.network import HUB, NetworkHost, NetworkLab
from geartrain.devices.profile import Fleet
from geartrain.launch.settings import LaunchSettings

_LOOPBACK = "127.0.0.1"


class EmulatedNetwork:
    """The hosts and links of a run.

    The launcher itself stays outside: it talks to its workers by sockets it has made
    before, and the rendezvous store is on the hub, which all hosts reach.

    Args:
        settings: Of the run; the hosts are those of the fleet's devices in this order.

    Raises:
        DeviceError: If the network can't be made.
    """

    def __init__(self, settings: LaunchSettings) -> None:
        self._lab: NetworkLab | None = None
        self._hosts: dict[str, NetworkHost] = {}
        if settings.links is None:
            return
        self._lab = NetworkLab(settings.links)
        self._lab.__enter__()
        device_ids = [device.device_id for device in settings.fleet.devices]
        self._hosts = dict(zip(device_ids, self._lab.hosts, strict=True))

    @property
    def store_address(self) -> str:
        """Where the rendezvous store listens: the hub, or loopback without links."""
        return _LOOPBACK if self._lab is None else self._lab.host(HUB).address

    def store_command(self, argv: Sequence[str]) -> list[str]:
        """The command line that starts the rendezvous store where all reach it."""
        return list(argv) if self._lab is None else self._lab.command(HUB, argv)

    def worker_command(self, device_id: str, argv: Sequence[str]) -> list[str]:
        """The command line that starts a device's worker on the device's host."""
        if self._lab is None:
            return list(argv)
        return self._lab.command(self._hosts[device_id].index, argv)

    def host_of(self, device_id: str) -> NetworkHost | None:
        """The host that a device is on; None without links."""
        return self._hosts.get(device_id)

    def name_nodes(self, fleet: Fleet) -> Fleet:
        """The same fleet, each device on a node of its own where it is so."""
        if self._lab is None:
            return fleet
        devices = []
        for device in fleet.devices:
            host = self._hosts[device.device_id]
            node_id = f"{device.node_id}/host{host.index}"
            devices.append(replace(device, node_id=node_id))
        return replace(fleet, devices=tuple(devices))

    @contextlib.contextmanager
    def coordinator_side(self) -> Iterator[None]:
        """Work in this thread where the coordinator and the store are reached."""
        if self._lab is None:
            yield
            return
        with self._lab.entered(HUB):
            yield

    def close(self) -> None:
        """Remove the network; call when the workers have ended."""
        if self._lab is not None:
            self._lab.close()
