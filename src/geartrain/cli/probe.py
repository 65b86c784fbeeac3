"""``geartrain probe``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import click

from geartrain.cli.fleet import show_progress
from geartrain.cli.tables import print_table
from geartrain.cli.verb import (
    Verb,
    fleet_option,
    json_option,
    oversubscribe_option,
    print_json,
)
from geartrain.devices.probe import resolve_fleet
from geartrain.devices.profile import DeviceProfile, Fleet, MeasuredRate
from geartrain.telemetry import write_document
from geartrain.units import format_bytes, format_rate

_NOISY_FRACTION = 0.5
"""A spread above half of the median says more about the machine's other work."""


@click.command(cls=Verb)
@fleet_option
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Write the fleet to this file, for --fleet.",
)
@click.option("--no-cache", is_flag=True, help="Measure again what was measured before.")
@oversubscribe_option
@json_option
def probe(
    fleet_spec: str | None,
    output: Path | None,
    no_cache: bool,
    oversubscribe: bool,
    as_json: bool,
) -> None:
    """Measure the devices: how fast they multiply, read memory, and copy."""
    fleet = resolve_fleet(
        fleet_spec,
        oversubscribe=oversubscribe,
        probe=True,
        use_cache=not no_cache,
        on_progress=show_progress,
    )
    if output is not None:
        write_document(output, fleet)
    if as_json:
        print_json(fleet)
        return
    print_fleet(fleet)
    if output is not None:
        click.echo(f"fleet written to {output}")


def print_fleet(fleet: Fleet) -> None:
    """Print what was measured, a line a quantity."""
    for device in fleet.devices:
        memory = format_bytes(device.memory_limit_bytes or device.memory_bytes)
        share = (
            "" if device.core_fraction is None else f", {device.core_fraction:g} of a core"
        )
        click.echo(
            f"{device.device_id}  {device.name} ({device.vendor}), {memory}{share}, "
            f"{device.source}"
        )
        rows = (("  ", *row) for row in rate_rows(device))
        print_table(("", "", "", ""), rows, num_text_columns=2)
    count = len(fleet.devices)
    noun = "device" if count == 1 else "devices"
    click.echo(f"{count} {noun}, {', '.join(fleet.labels)}")
    rates = [rate for device in fleet.devices for _, rate, _ in _rates(device)]
    if any(rate.spread_fraction > _NOISY_FRACTION for rate in rates):
        click.echo("noisy: something else was using the device; --no-cache measures again")


def rate_rows(device: DeviceProfile) -> Iterator[tuple[str, str, str]]:
    """Name, rate and spread of all that was measured on a device."""
    for name, rate, unit in _rates(device):
        spread = f"median of {rate.num_repeats}, spread {rate.spread_fraction:.0%}"
        noisy = ", noisy" if rate.spread_fraction > _NOISY_FRACTION else ""
        yield name, format_rate(rate.per_s, unit), spread + noisy


def _rates(device: DeviceProfile) -> list[tuple[str, MeasuredRate, str]]:
    rates: list[tuple[str, MeasuredRate | None, str]] = [
        (f"{dtype} matmul", rate, "FLOP/s") for dtype, rate in device.flop_per_s.items()
    ]
    rates += [
        ("memory", device.memory_bytes_per_s, "B/s"),
        ("host to device", device.host_to_device_bytes_per_s, "B/s"),
        ("device to host", device.device_to_host_bytes_per_s, "B/s"),
    ]
    return [(name, rate, unit) for name, rate, unit in rates if rate is not None]
