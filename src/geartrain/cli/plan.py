"""``geartrain plan``."""

from __future__ import annotations

import dataclasses
import sys
import tempfile
from pathlib import Path

import click

from geartrain.cli.fleet import find_fleet, read_links
from geartrain.cli.profile_subset import select_devices
from geartrain.cli.run import PRELOAD, report_failure
from geartrain.cli.tables import print_table
from geartrain.cli.verb import (
    Verb,
    fleet_option,
    json_option,
    links_option,
    oversubscribe_option,
    print_json,
)
from geartrain.devices.profile import Fleet
from geartrain.errors import ConfigError
from geartrain.launch import LaunchSettings, check_script, create_run_directory, launch
from geartrain.monitoring.plain_display import PlainDisplay
from geartrain.planner import ModelProfile, Plan, Workload, solve
from geartrain.planner.explanation import Explanation, explain, render_text
from geartrain.telemetry import read_document, write_document
from geartrain.units import format_seconds


@click.command(cls=Verb, context_settings={"allow_interspersed_args": False})
@fleet_option
@click.option("--explain", "explained", is_flag=True, help="Say why, and what is lost.")
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Write the plan to this file, for run --plan.",
)
@click.option(
    "--model",
    "model_path",
    type=click.Path(path_type=Path),
    help="Plan from this model.json of an earlier plan or run, with no SCRIPT.",
)
@click.option(
    "--global-batch-size", type=int, help="With --model: samples of an optimizer step."
)
@click.option(
    "--run-dir",
    type=click.Path(path_type=Path),
    help="Keep the plan's own run directory here, with model.json in it.",
)
@oversubscribe_option
@links_option
@json_option
@click.argument("script", required=False, type=click.Path(path_type=Path))
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def plan(  # noqa: PLR0913 - one a command-line option
    *,
    fleet_spec: str | None,
    output: Path | None,
    model_path: Path | None,
    global_batch_size: int | None,
    run_dir: Path | None,
    script: Path | None,
    arguments: tuple[str, ...],
    explained: bool,
    oversubscribe: bool,
    links: str | None,
    as_json: bool,
) -> None:
    """Say who would do what, how fast, and where the limit is.

    Starts SCRIPT on the fleet, measures its model there, plans, and ends before the
    first step. With --model, plans from what was measured before.
    """
    if (script is None) == (model_path is None):
        msg = "give either a SCRIPT to measure or --model model.json"
        raise ConfigError(msg)
    if model_path is not None and links is not None:
        msg = "--links emulates links for a SCRIPT; --model holds what was measured"
        raise ConfigError(msg)
    if model_path is not None:
        found, profile = _plan_model(model_path, fleet_spec, global_batch_size)
    else:
        assert script is not None
        check_script(script)
        fleet = find_fleet(fleet_spec, oversubscribe=oversubscribe)
        asked = LaunchSettings(
            script=script,
            arguments=arguments,
            fleet=fleet,
            run_dir=run_dir or Path(),
            mode="plan",
            links=read_links(links, fleet),
            preload=PRELOAD,
        )
        found, profile = _plan_script(asked, run_dir)
    if output is not None:
        write_document(output, found)
    explanation = explain(found, profile)
    if as_json:
        print_json({"plan": found, "explanation": explanation})
        return
    click.echo(render_text(explanation)) if explained else _print_plan(explanation)
    if output is not None:
        click.echo(f"plan written to {output}")


def _plan_model(
    model_path: Path, fleet_spec: str | None, global_batch_size: int | None
) -> tuple[Plan, ModelProfile]:
    if global_batch_size is None:
        msg = "--model needs --global-batch-size, the samples of an optimizer step"
        raise ConfigError(msg)
    profile = read_document(model_path, ModelProfile)
    if fleet_spec is not None:
        if not fleet_spec.endswith(".json"):
            msg = (
                f"with --model, --fleet is a fleet.json, not {fleet_spec!r}; leave it out "
                "to plan for all devices of the model.json"
            )
            raise ConfigError(msg)
        fleet = read_document(Path(fleet_spec), Fleet)
        profile = select_devices(profile, [d.device_id for d in fleet.devices])
    return solve(profile, Workload(global_batch_size=global_batch_size)), profile


def _plan_script(
    settings: LaunchSettings, run_dir: Path | None
) -> tuple[Plan, ModelProfile]:
    script = settings.script
    with tempfile.TemporaryDirectory(prefix="geartrain-plan-") as temporary:
        where = create_run_directory(script, run_dir or Path(temporary))
        settings = dataclasses.replace(settings, run_dir=where)
        # What the script prints goes to stderr: stdout is the plan's.
        with PlainDisplay(where, sys.stderr.buffer, sys.stderr.buffer) as display:
            result = launch(settings, display)
        if result.outcome == "stopped":
            raise click.exceptions.Exit(result.exit_code)
        if result.outcome == "failed":
            report_failure(result)
            raise click.exceptions.Exit(result.exit_code)
        if not (where / "plan.json").exists():
            msg = (
                f"{script} ended without a plan; it must call gt.Session().setup(...) "
                "and setup_dataloader(...), and take a first step"
            )
            raise ConfigError(msg)
        found = read_document(where / "plan.json", Plan)
        return found, read_document(where / "model.json", ModelProfile)


def _print_plan(explanation: Explanation) -> None:
    print_table(
        ("device", "share", "micro-batches", "compute", "exchange", "idle"),
        (
            (
                row.device_id,
                str(row.share),
                row.micro_batches,
                format_seconds(row.compute_s),
                format_seconds(row.exchange_s),
                format_seconds(row.idle_s),
            )
            for row in explanation.rows
        ),
    )
    rate = explanation.global_batch_size / explanation.predicted_step_s
    click.echo(
        f"predicted {format_seconds(explanation.predicted_step_s)} a step, "
        f"{rate:.1f} samples/s, {explanation.efficiency:.3f} of the bound; "
        "--explain says why"
    )
