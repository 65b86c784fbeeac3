"""Finds the fleet that a verb works on, without torch in this process."""

from __future__ import annotations

import click

from geartrain.devices.probe import probe_fleet, resolve_fleet
from geartrain.devices.profile import Fleet


def find_fleet(spec: str | None, *, oversubscribe: bool) -> Fleet:
    """Resolve a fleet; real devices are probed unless their rates are known.

    Emulated devices are not: a session measures the user's own model anyway, and how
    they compare follows from their core fractions.

    Raises:
        ConfigError: If the specification is wrong or names an absent device.
        DeviceError: If a device can't be measured.
    """
    fleet = resolve_fleet(spec, oversubscribe=oversubscribe, probe=False)
    is_real = all(device.kind != "emulated" for device in fleet.devices)
    if is_real and not all(device.flop_per_s for device in fleet.devices):
        return probe_fleet(fleet, on_progress=show_progress)
    return fleet


def show_progress(text: str) -> None:
    """Print what is being measured."""
    click.echo(f"[geartrain] {text}", err=True)
