"""``geartrain run``."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any

import click

from geartrain.cli.comeback_options import comeback_options, take_respawn
from geartrain.cli.fleet import find_fleet, read_links
from geartrain.cli.memory_options import memory_options, take_peer_memory
from geartrain.cli.saves import find_resume, name_drift, save_options, take_cadence
from geartrain.cli.tables import make_console, print_table
from geartrain.cli.verb import (
    Verb,
    fleet_option,
    json_option,
    links_option,
    oversubscribe_option,
    print_json,
)
from geartrain.launch import (
    LaunchResult,
    LaunchSettings,
    check_script,
    create_run_directory,
    launch,
)
from geartrain.monitoring.live_display import LiveDisplay
from geartrain.monitoring.plain_display import PlainDisplay
from geartrain.monitoring.report import summary_rows
from geartrain.monitoring.run_files import read_plan
from geartrain.monitoring.run_summary import RunSummary, summarise
from geartrain.telemetry import RunLogReader

PRELOAD = ("torch", "geartrain.session")
"""Imported by workers at full speed, before an emulated device is throttled."""


@click.command(cls=Verb, context_settings={"allow_interspersed_args": False})
@fleet_option
@click.option(
    "--plan",
    "plan_path",
    type=click.Path(path_type=Path),
    help="Carry out this plan.json as it stands, never corrected.",
)
@click.option(
    "--run-dir",
    type=click.Path(path_type=Path),
    help="Where the run is written; runs/TIME-SCRIPT by default.",
)
@oversubscribe_option
@click.option(
    "--deterministic",
    is_flag=True,
    help="Bit-identical results from run to run; no work is shared on the fly.",
)
@click.option(
    "--replan-threshold",
    type=float,
    default=0.15,
    show_default=True,
    help="Change of a device's speed that moves shares.",
)
@click.option(
    "--tail-fraction",
    type=float,
    default=0.0,
    show_default=True,
    help="Part of each global batch that whoever is free computes.",
)
@click.option(
    "--on-loss",
    type=click.Choice(["finish", "shrink", "stop", "continue"]),
    default="finish",
    show_default=True,
    help="Where a worker is lost the others make its step whole, or make it without its "
    "samples, or stop. (continue: as finish.)",
)
@click.option(
    "--min-devices",
    type=int,
    default=1,
    show_default=True,
    help="With fewer devices left the run ends.",
)
@click.option(
    "--emulate-schedule",
    "schedule_path",
    type=click.Path(path_type=Path),
    help="CSV t_s,device_id,core_fraction: emulated devices change speed over time.",
)
@links_option
@comeback_options
@save_options
@memory_options
@json_option
@click.argument("script", type=click.Path(path_type=Path))
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def run(
    *,
    fleet_spec: str | None,
    oversubscribe: bool,
    links: str | None,
    as_json: bool,
    **options: Any,  # Any: the fields of LaunchSettings, which checks them
) -> None:
    """Train with SCRIPT on all devices of the fleet.

    What follows SCRIPT is handed to it untouched. Ctrl-C saves the state at the next
    step boundary and stops; a second one kills. --resume goes on from there, or from
    what was saved meanwhile, on this or any other fleet.
    """
    wanted_dir, script = options.pop("run_dir"), options["script"]
    check_script(script)  # before the devices are probed
    resume_from = options.pop("resume_from")
    options["resume"] = find_resume(resume_from, options["durable_url"])
    options["cadence"] = take_cadence(options)
    options["respawn"] = take_respawn(options)
    options["peer_memory"] = take_peer_memory(options)
    fleet = find_fleet(fleet_spec, oversubscribe=oversubscribe)
    # Checked before a directory is made, so that a wrong option leaves none behind.
    settings = LaunchSettings(
        fleet=fleet,
        run_dir=wanted_dir or Path(),
        links=read_links(links, fleet),
        preload=PRELOAD,
        **options,
    )
    for difference in name_drift(resume_from, settings) if resume_from else ():
        click.echo(f"differs from the run before: {difference}", err=True)
    run_dir = create_run_directory(script, wanted_dir)
    settings = dataclasses.replace(settings, run_dir=run_dir)
    title = f"{script} on {fleet.spec or 'all local devices'} ({', '.join(fleet.labels)})"
    title += f", links {links}" if links else ""
    with open_display(run_dir, title) as display:
        result = launch(settings, display)
    _print_result(result, _summary_of(run_dir), as_json=as_json)
    raise click.exceptions.Exit(result.exit_code)


def open_display(run_dir: Path, title: str) -> LiveDisplay | PlainDisplay:
    """The live display in a terminal, plain lines elsewhere."""
    console = make_console()
    if console.is_terminal and console.is_interactive:
        return LiveDisplay(run_dir, title, console)
    return PlainDisplay(run_dir, sys.stdout.buffer, sys.stderr.buffer)


def report_failure(result: LaunchResult) -> None:
    """Print the traceback of the worker that failed first, then what it means."""
    if result.details:
        click.echo(result.details.rstrip(), err=True)
    click.echo(f"error: {result.message}", err=True)


def _print_result(
    result: LaunchResult, summary: RunSummary | None, *, as_json: bool
) -> None:
    if result.outcome == "failed":
        report_failure(result)
    else:
        click.echo(result.message, err=True)
    if as_json:
        shown = {
            "outcome": result.outcome,
            "exit_code": result.exit_code,
            "run_dir": str(result.run_dir),
            "message": result.message,
            "checkpoint_dir": result.checkpoint_dir and str(result.checkpoint_dir),
        }
        print_json(shown | ({} if summary is None else dataclasses.asdict(summary)))
    elif summary is None and result.outcome == "finished":
        click.echo("no step was made: a script trains on the fleet by gt.Session")
    elif summary is not None and result.outcome != "failed":
        print_table(("", ""), summary_rows(summary), num_text_columns=2)
        click.echo(f"geartrain report {result.run_dir} draws it")


def _summary_of(run_dir: Path) -> RunSummary | None:
    reader = RunLogReader(run_dir)
    records, events = reader.new_steps(), reader.new_events()
    reader.close()
    return summarise(records, events, read_plan(run_dir)) if records else None
