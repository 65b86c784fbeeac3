"""``fleet.json`` with all that was measured: devices, and the links between hosts.

Devices lie below topology, so ``Fleet`` cannot name it; this document extends it.
Whoever only needs the devices reads the same file as a ``Fleet``.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from geartrain.devices.profile import Fleet
from geartrain.telemetry.documents import read_document
from geartrain.topology.fabric.facts import FabricFacts
from geartrain.topology.profile import Topology


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetDocument(Fleet):
    """A fleet and its links."""

    extension_names: ClassVar[frozenset[str]] = frozenset()
    """It knows all that it may hold."""

    topology: Topology | None = None
    """None where links were not measured."""
    fabric: FabricFacts | None = None
    """Of the host that the file was written on."""


def extend_fleet(
    fleet: Fleet, topology: Topology | None, fabric: FabricFacts | None = None
) -> FleetDocument:
    """Put a fleet and its links into one document.

    Args:
        fleet: The devices; what it knows of links already is replaced.
        topology: The links.
        fabric: Facts of this host.
    """
    return FleetDocument(
        devices=fleet.devices,
        spec=fleet.spec,
        oversubscribed=fleet.oversubscribed,
        topology=topology,
        fabric=fabric,
    )


def read_fleet_document(path: Path) -> FleetDocument:
    """Read a ``fleet.json``, with or without links.

    Raises:
        ConfigError: If it is missing or holds something else.
    """
    return read_document(path, FleetDocument)
