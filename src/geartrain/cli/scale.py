"""``geartrain scale``."""

from __future__ import annotations

from pathlib import Path

import click

from geartrain.cli.run_changes import report_change, run_argument, wait_option
from geartrain.cli.verb import Verb, json_option
from geartrain.devices.probe import resolve_fleet
from geartrain.launch.control_messages import ListRequest, ScaleRequest, read_change
from geartrain.launch.control_socket import ask_run, find_run


@click.command(cls=Verb)
@run_argument
@click.option(
    "--devices",
    required=True,
    metavar="SPEC|+N|-N",
    help="All devices it is to train on, as for run --fleet; or how many more or fewer.",
)
@wait_option
@json_option
def scale(run: Path, devices: str, wait_s: float | None, as_json: bool) -> None:
    """Give a running RUN more devices, or fewer, or others.

    Those that go leave at a step boundary, those that come join at one; no step fails.
    With +N devices that left come back first; with -N the last ones in rank order leave.
    """
    run_dir = find_run(run)
    change = read_change(devices.strip())
    if change is not None:
        request = ScaleRequest(change=change)
    else:
        now = ask_run(run_dir, ListRequest()).run
        oversubscribe = now is not None and now.oversubscribed
        fleet = resolve_fleet(devices, oversubscribe=oversubscribe)
        request = ScaleRequest(devices=fleet.devices)
    report_change(run_dir, ask_run(run_dir, request), wait_s, as_json=as_json)
