"""``geartrain report``."""

from __future__ import annotations

from pathlib import Path

import click

from geartrain.cli.verb import Verb, json_option, print_json
from geartrain.monitoring.report import write_report


@click.command(cls=Verb)
@click.argument("run_dir", metavar="RUN", type=click.Path(path_type=Path))
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    help="A .html or .png file; report.html in the run directory by default.",
)
@json_option
def report(run_dir: Path, output: Path | None, as_json: bool) -> None:
    """Write a run's report: loss, throughput, each device's time, shares, events.

    RUN is a run directory; the page opens from disk and needs no network.
    """
    path = write_report(run_dir, output)
    if as_json:
        print_json({"report": str(path)})
    else:
        click.echo(f"report written to {path}")
