"""Networks of emulated hosts: a network namespace each, racks, shaped links."""

from geartrain.devices.emulation.network.kernel import missing_for_networks
from geartrain.devices.emulation.network.lab import (
    HUB,
    LinkBytes,
    NetworkHost,
    NetworkLab,
)
from geartrain.devices.emulation.network.leftovers import sweep_networks
from geartrain.devices.emulation.network.namespaces import enter, entered, processes_in
from geartrain.devices.emulation.network.spec import (
    ExtraNic,
    LinkRate,
    NetworkSpec,
    parse_link_rate,
    parse_links,
)

__all__ = [
    "HUB",
    "ExtraNic",
    "LinkBytes",
    "LinkRate",
    "NetworkHost",
    "NetworkLab",
    "NetworkSpec",
    "enter",
    "entered",
    "missing_for_networks",
    "parse_link_rate",
    "parse_links",
    "processes_in",
    "sweep_networks",
]
