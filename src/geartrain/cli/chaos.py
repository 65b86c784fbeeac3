"""``geartrain chaos``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from geartrain.bench.chaos.kinds import GROUPS, KINDS
from geartrain.bench.chaos.report import write_chaos_report
from geartrain.bench.chaos.result import CHECK_TABLE_HEAD, ChaosResult, check_rows
from geartrain.bench.chaos.run import run_chaos
from geartrain.bench.chaos.settings import DEFAULT_DEVICES, ChaosOptions
from geartrain.cli.fleet import find_fleet
from geartrain.cli.tables import print_table
from geartrain.cli.verb import (
    Verb,
    json_option,
    links_option,
    oversubscribe_option,
    print_json,
)
from geartrain.telemetry import write_document
from geartrain.units import format_seconds, parse_bytes


@click.command(cls=Verb, context_settings={"allow_interspersed_args": False})
@click.option("--seed", type=int, default=0, show_default=True, help="Of the schedule.")
@click.option(
    "--duration",
    "duration_s",
    type=float,
    default=60.0,
    show_default=True,
    metavar="S",
    help="Seconds in which faults come; the start comes on top.",
)
@click.option(
    "--faults-per-s",
    type=float,
    default=0.5,
    show_default=True,
    metavar="R",
    help="How many come on average.",
)
@click.option(
    "--kinds",
    metavar="KINDS",
    help=f"Some of {', '.join(KINDS)}; or {', '.join(GROUPS)} for several. All that are "
    "possible by default.",
)
@click.option(
    "--devices",
    default=DEFAULT_DEVICES,
    show_default=True,
    metavar="SPEC",
    help="The fleet, as for geartrain run --fleet.",
)
@click.option(
    "--trace",
    type=click.Path(path_type=Path),
    help="Faults from a CSV at_s,node_id,kind instead of the seed.",
)
@click.option(
    "--speed",
    type=float,
    default=1.0,
    metavar="X",
    help="Seconds of the trace that pass in one.",
)
@click.option(
    "--min-left",
    type=click.IntRange(min=1),
    default=2,
    show_default=True,
    help="Devices that are never taken away.",
)
@click.option(
    "--saved",
    metavar="PATH",
    help="Where SCRIPT saves its state, below the run directory.",
)
@click.option(
    "--max-pause-s",
    type=float,
    help="The longest time without a committed step, instead of each kind's own.",
)
@click.option(
    "--tolerance",
    type=float,
    default=1e-3,
    show_default=True,
    help="Of the final weights, where bits may differ.",
)
@click.option(
    "--deterministic",
    is_flag=True,
    help="As for geartrain run; without a lost device weights must agree to the bit.",
)
@click.option(
    "--no-reference",
    "with_reference",
    is_flag=True,
    flag_value=False,
    default=True,
    help="Don't train once more without faults to compare weights.",
)
@click.option(
    "--disk",
    default="64MiB",
    show_default=True,
    metavar="SIZE",
    help="Of the disk that disk_full fills.",
)
@links_option
@oversubscribe_option
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    help="An empty folder for all that is written; a new one below runs by default.",
)
@click.option(
    "--report",
    "report_path",
    type=click.Path(path_type=Path),
    help="An .html page with the timeline of the run.",
)
@click.option(
    "--result",
    "result_path",
    type=click.Path(path_type=Path),
    help="Write the whole result, timeline included, as JSON.",
)
@json_option
@click.argument("script", type=click.Path(path_type=Path), required=False)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def chaos(
    context: click.Context,
    /,
    *,
    report_path: Path | None,
    result_path: Path | None,
    as_json: bool,
    **options: Any,  # Any: the fields of ChaosOptions, which checks them
) -> None:
    """Train with SCRIPT while workers are killed, stopped, slowed and cut off.

    A seeded schedule of faults against `geartrain run` on an emulated fleet; then what must
    hold is checked: one state on all members after every step, every sample once an epoch,
    pauses within limits, the weights of a run without faults, and nothing left behind.
    Without SCRIPT a built-in training runs, whose weights must agree to the bit.

    Ends with 1 if a check failed.
    """
    kinds = options.pop("kinds") or ""
    names = tuple(name.strip() for name in kinds.split(",") if name.strip())
    disk_bytes = parse_bytes(options.pop("disk"))
    asked = ChaosOptions(kinds=names, disk_bytes=disk_bytes, **options)
    if report_path is not None and report_path.suffix != ".html":
        msg = f"--report {report_path} must be an .html file"
        raise click.BadParameter(msg)
    fleet = find_fleet(asked.devices, oversubscribe=asked.oversubscribe)
    result = run_chaos(asked, fleet, _show_progress)
    _show(result)
    if result_path is not None:
        write_document(result_path, result)
        click.echo(f"result: {result_path}")
    if report_path is not None:
        write_chaos_report(result, report_path)
        click.echo(f"report: {report_path}")
    if as_json:
        print_json(result.as_json())
    if not result.has_passed:
        context.exit(1)


def _show(result: ChaosResult) -> None:
    print_table(CHECK_TABLE_HEAD, check_rows(result), num_text_columns=3)
    for check in result.checks:
        for detail in check.details[1:]:
            click.echo(f"  {check.name}: {detail}")
    counts = ", ".join(f"{number} {kind}" for kind, number in result.num_by_kind.items())
    click.echo(
        f"{result.num_steps} steps, {result.num_faults} faults ({counts or 'none'}), "
        f"{result.num_left} of {len(result.device_ids)} devices left; longest pause "
        f"{format_seconds(result.longest_pause_s)} at steps of "
        f"{format_seconds(result.calm_step_s)}; load {result.load_average:g}"
    )


def _show_progress(text: str) -> None:
    click.echo(f"[chaos] {text}", err=True)
