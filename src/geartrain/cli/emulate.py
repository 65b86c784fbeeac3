"""``geartrain emulate``."""

from __future__ import annotations

from pathlib import Path

import click

from geartrain.cli.verb import Verb, json_option, print_json
from geartrain.devices.emulation.control import set_running_core_fraction
from geartrain.devices.emulation.start import sweep_leftovers


@click.group()
def emulate() -> None:
    """Change emulated devices while they run, or clean up after them."""


@emulate.command("set", cls=Verb)
@click.argument("device_id", metavar="DEVICE")
@click.argument("core_fraction", metavar="CORE_FRACTION", type=float)
@click.option(
    "--run-dir",
    type=click.Path(path_type=Path),
    help="Which run; needed where several are running.",
)
@json_option
def set_core_fraction(
    device_id: str, core_fraction: float, run_dir: Path | None, as_json: bool
) -> None:
    """Give a running emulated device another share of a core, such as 0.4."""
    where = set_running_core_fraction(device_id, core_fraction, run_dir)
    if as_json:
        values = {"device_id": device_id, "core_fraction": core_fraction}
        print_json(values | {"run_dir": str(where)})
    else:
        click.echo(f"{device_id} has {core_fraction:g} of a core now, in {where}")


@emulate.command("sweep", cls=Verb)
@json_option
def sweep(as_json: bool) -> None:
    """Remove what launchers that were killed left behind."""
    num_removed = sweep_leftovers()
    if as_json:
        print_json({"num_removed": num_removed})
    else:
        click.echo(f"removed {num_removed} leftovers of dead launchers")
