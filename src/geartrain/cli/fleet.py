"""Finds the fleet that a verb works on, without torch in this process."""

from __future__ import annotations

from pathlib import Path

import click

from geartrain.devices.emulation.network import NetworkSpec, parse_links
from geartrain.devices.probe import probe_fleet, resolve_fleet
from geartrain.devices.profile import Fleet
from geartrain.topology.fleet_document import extend_fleet, read_fleet_document


def find_fleet(spec: str | None, *, oversubscribe: bool) -> Fleet:
    """Resolve a fleet; real devices are probed unless their rates are known.

    Emulated devices are not: a session measures the user's own model anyway, and how
    they compare follows from their core fractions.

    Raises:
        ConfigError: If the specification is wrong or names an absent device.
        DeviceError: If a device can't be measured.
    """
    fleet = resolve_fleet(spec, oversubscribe=oversubscribe, probe=False)
    fleet = _with_links(fleet, spec)
    is_real = all(device.kind != "emulated" for device in fleet.devices)
    if is_real and not all(device.flop_per_s for device in fleet.devices):
        return probe_fleet(fleet, on_progress=show_progress)
    return fleet


def read_links(text: str | None, fleet: Fleet) -> NetworkSpec | None:
    """Read ``--links`` for a fleet, a host a device; None where it was not given.

    Raises:
        ConfigError: If it can't be read or has another number of hosts.
    """
    return None if text is None else parse_links(text, len(fleet.devices))


def _with_links(fleet: Fleet, spec: str | None) -> Fleet:
    """Keep the links that a fleet.json holds beside its devices."""
    if spec is None or not Path(spec.strip()).is_file():
        return fleet
    document = read_fleet_document(Path(spec.strip()))
    if document.topology is None:
        return fleet
    return extend_fleet(fleet, document.topology, document.fabric)


def show_progress(text: str) -> None:
    """Print what is being measured."""
    click.echo(f"[geartrain] {text}", err=True)
