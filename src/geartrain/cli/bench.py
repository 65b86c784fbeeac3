"""``geartrain bench``."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import click

from geartrain.bench.checkpoint.result import (
    NUM_TEXT_COLUMNS as CHECKPOINT_TEXT_COLUMNS,
)
from geartrain.bench.checkpoint.result import (
    TABLE_HEAD as CHECKPOINT_TABLE_HEAD,
)
from geartrain.bench.checkpoint.result import (
    table_rows as checkpoint_table_rows,
)
from geartrain.bench.checkpoint.run import CheckpointOptions, run_checkpoint
from geartrain.bench.comm.rank_order import DEFAULT_SEED
from geartrain.bench.comm.result import (
    NUM_TEXT_COLUMNS,
)
from geartrain.bench.comm.result import (
    TABLE_HEAD as COMM_TABLE_HEAD,
)
from geartrain.bench.comm.result import (
    table_rows as comm_table_rows,
)
from geartrain.bench.comm.run import run_comm
from geartrain.bench.comm.settings import CASES, CommOptions
from geartrain.bench.elastic.result import (
    NUM_TEXT_COLUMNS as ELASTIC_TEXT_COLUMNS,
)
from geartrain.bench.elastic.result import (
    TABLE_HEAD as ELASTIC_TABLE_HEAD,
)
from geartrain.bench.elastic.result import (
    table_rows as elastic_table_rows,
)
from geartrain.bench.elastic.run import ElasticOptions, run_elastic
from geartrain.bench.gpu import run_gpu
from geartrain.bench.macro import (
    DEFAULT_FLEET,
    MacroOptions,
    default_output,
    run_macro,
)
from geartrain.bench.macro_report import TABLE_HEAD, MacroResult, flatten, table_rows
from geartrain.bench.provenance import command_line, current_commit
from geartrain.bench.tail import TailOptions, run_tail
from geartrain.bench.tail_result import TAIL_TABLE_HEAD, TailResult, tail_table_rows
from geartrain.cli.tables import print_table
from geartrain.cli.verb import (
    Verb,
    json_option,
    links_option,
    oversubscribe_option,
    print_json,
)
from geartrain.launch.run_directory import collect_versions
from geartrain.telemetry import write_document
from geartrain.units import parse_bytes


@click.group()
def bench() -> None:
    """Measure geartrain against its bound and against plain DDP."""


@bench.command("macro", cls=Verb)
@click.option(
    "--fleet",
    default=DEFAULT_FLEET,
    show_default=True,
    metavar="SPEC",
    help="The unequal fleet, emulated.",
)
@click.option(
    "--quick", is_flag=True, help="Fewer repeats and a batch of 64: within a minute."
)
@click.option(
    "--global-batch-size",
    type=click.IntRange(min=1),
    help="Samples of an optimizer step; 256, or 64 with --quick.",
)
@oversubscribe_option
@links_option
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    help="Where the raw result goes; benchmarks/results/ where that folder exists.",
)
@json_option
def macro(
    *,
    output: Path | None,
    as_json: bool,
    **options: Any,  # Any: the fields of MacroOptions
) -> None:
    """Train the same model with geartrain, with DDP, and on each device alone.

    All in turn in one run, then a slow-down, two equal devices, and one device. Takes
    about five minutes.
    """
    asked = MacroOptions(**options)
    path = output or _default_output("macro", asked, asked.links)
    raw = run_macro(asked, _show_progress)
    result = MacroResult(
        result=flatten(raw),
        versions=collect_versions(),
        command=command_line(),
        commit=current_commit(Path.cwd()),
        raw=raw,
    )
    print_table(TABLE_HEAD, table_rows(result.result))
    labels = result.result["labels"]
    click.echo(f"{raw.fleet.spec} ({labels}), {raw.wall_s:.0f} s in all")
    if asked != MacroOptions():
        click.echo("the targets are for the default fleet and batch, without --quick")
    _hand_out(result, path, as_json=as_json)


@bench.command("tail", cls=Verb)
@click.option(
    "--fleet",
    default=DEFAULT_FLEET,
    show_default=True,
    metavar="SPEC",
    help="The fleet, emulated; a sixth of the cores stays free.",
)
@click.option("--quick", is_flag=True, help="Smaller and fewer steps: within a minute.")
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    help="Where the raw result goes; benchmarks/results/ where that folder exists.",
)
@json_option
def tail(
    *,
    output: Path | None,
    as_json: bool,
    **options: Any,  # Any: the fields of TailOptions
) -> None:
    """Train with and without a tail of the step that whoever is free computes.

    Several tail fractions in turn in one run, on steady devices and on devices whose
    speed varies. Takes under four minutes.
    """
    asked = TailOptions(**options)
    path = output or _default_output("tail", asked)
    result = run_tail(asked, _show_progress)
    rows = tail_table_rows(result.result, result.settings)
    print_table(TAIL_TABLE_HEAD, rows, num_text_columns=2)
    labels = result.result["labels"]
    click.echo(f"{result.fleet.spec} ({labels}), {result.wall_s:.0f} s in all")
    _hand_out(result, path, as_json=as_json)


@bench.command("comm", cls=Verb)
@click.option("--quick", is_flag=True, help="Two racks, 4 MB, the best ring and ours.")
@click.option(
    "--only",
    metavar="CASES",
    help=f"Some cases, parted by commas, of {', '.join(CASES)}.",
)
@click.option(
    "--racks",
    metavar="RACKS",
    help="Another lab instead: 3+5 or 4x2 hosts, or 3 racks of eight hosts.",
)
@click.option("--uplink", metavar="RATE", help="Of the racks; 50Mbit unless given.")
@click.option("--nic", metavar="RATE", help="Of the hosts; 500Mbit unless given.")
@click.option(
    "--seed",
    type=click.IntRange(min=0),
    default=DEFAULT_SEED,
    show_default=True,
    help="Of the order in which ranks are spread over the hosts.",
)
@click.option("--size", metavar="SIZE", help="Of the tensors, such as 25MB.")
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    help="Where the raw result goes; nowhere unless given.",
)
@json_option
@click.pass_context
def comm(
    context: click.Context,
    /,
    *,
    only: str | None,
    size: str | None,
    output: Path | None,
    as_json: bool,
    **options: Any,  # Any: the other fields of CommOptions
) -> None:
    """Exchange gradients over emulated links, with geartrain and with Gloo.

    Builds labs of hosts and racks with shaped links (needs root), and measures in turn:
    Gloo's ring in the order of the ranks and in the best order, torch's stock hierarchy,
    and geartrain, which finds racks and rates by itself. Ends within 15 minutes.
    """
    asked = CommOptions(
        only=tuple(name.strip() for name in only.split(",")) if only else (),
        num_bytes=parse_bytes(size) if size else None,
        **options,
    )
    result = run_comm(asked, _show_progress)
    print_table(
        COMM_TABLE_HEAD, comm_table_rows(result.cases), num_text_columns=NUM_TEXT_COLUMNS
    )
    click.echo(f"{result.labels}, {result.wall_s:.0f} s in all; times are medians")
    if output is not None:
        write_document(output, result)
        click.echo(f"raw result: {output}")
    if as_json:
        print_json(result.as_json())
    if result.has_failures:
        context.exit(1)


@bench.command("elastic", cls=Verb)
@click.option("--quick", is_flag=True, help="A few faults of each kind: within 90 s.")
@click.option(
    "--only",
    metavar="CASES",
    help="Some, parted by commas; overhead and torchft are the last two.",
)
@click.option(
    "--seed", type=int, default=0, show_default=True, help="Of victims and moments."
)
@click.option(
    "--torchft-python",
    type=click.Path(path_type=Path),
    metavar="PYTHON",
    help="A Python that has torchft; the one that runs by default.",
)
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    help="Where the raw result goes; nowhere unless given.",
)
@json_option
@click.pass_context
def elastic(
    context: click.Context,
    /,
    *,
    only: str | None,
    output: Path | None,
    as_json: bool,
    **options: Any,  # Any: the other fields of ElasticOptions
) -> None:
    """Time what faults, joins and commits cost real runs on emulated fleets.

    Workers and the coordinator are killed and stopped dozens of times; each time counts
    from the signal to the next committed step. Then geartrain and plain DDP in turn, and
    torchft where it is installed. Takes up to 15 minutes.

    Ends with 1 if states diverged, steps were lost or a run did not go on.
    """
    names = tuple(name.strip() for name in only.split(",")) if only else ()
    result = run_elastic(ElasticOptions(only=names, **options), _show_progress)
    print_table(
        ELASTIC_TABLE_HEAD,
        elastic_table_rows(result),
        num_text_columns=ELASTIC_TEXT_COLUMNS,
    )
    click.echo(f"emulated, {result.wall_s:.0f} s in all, load {result.load_average:g}")
    if output is not None:
        write_document(output, result)
        click.echo(f"raw result: {output}")
    if as_json:
        print_json(result.as_json())
    if result.has_failures:
        context.exit(1)


@bench.command("checkpoint", cls=Verb)
@click.option("--quick", is_flag=True, help="A smaller state, fewer trials: within 90 s.")
@click.option("--only", metavar="CASES", help="Some, parted by commas.")
@click.option(
    "--seed", type=int, default=0, show_default=True, help="Of flips, kills and the data."
)
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    help="Where the raw result goes; nowhere unless given.",
)
@json_option
@click.pass_context
def checkpoint(
    context: click.Context,
    /,
    *,
    only: str | None,
    output: Path | None,
    as_json: bool,
    **options: Any,  # Any: the other fields of CheckpointOptions
) -> None:
    """Measure what checkpoints cost and survive, beside torch.distributed.checkpoint.

    The trainer's stall and its steps' slow-down, the gradient log's bytes, flipped bytes,
    killed saves, and loading with other members than those that saved. Takes up to ten
    minutes.

    Ends with 1 if a version was lost or damage was not found.
    """
    names = tuple(name.strip() for name in only.split(",")) if only else ()
    result = run_checkpoint(CheckpointOptions(only=names, **options), _show_progress)
    print_table(
        CHECKPOINT_TABLE_HEAD,
        checkpoint_table_rows(result),
        num_text_columns=CHECKPOINT_TEXT_COLUMNS,
    )
    label, load = result.label, result.load_average
    click.echo(f"{label}, {result.wall_s:.0f} s in all, load {load:g}")
    if result.quick:
        click.echo("the targets are for a state of 200 MB, without --quick")
    if output is not None:
        write_document(output, result)
        click.echo(f"raw result: {output}")
    if as_json:
        print_json(result.as_json())
    if result.has_failures:
        context.exit(1)


def _default_output(
    name: str, asked: MacroOptions | TailOptions, links: str | None = None
) -> Path | None:
    where = f"{asked.fleet}-links-{links}" if links else asked.fleet
    return default_output(name, where, time.time(), Path.cwd(), quick=asked.quick)


def _hand_out(
    result: MacroResult | TailResult, path: Path | None, *, as_json: bool
) -> None:
    if path is not None:
        write_document(path, result)
        click.echo(f"raw result: {path}")
    if as_json:
        origin = {"command": result.command, "commit": result.commit}
        versions = {f"version_{name}": text for name, text in result.versions.items()}
        print_json(result.result | origin | versions)


@bench.command("gpu", cls=Verb)
@json_option
def gpu(*, as_json: bool) -> None:
    """Check exactness, overhead and a mixed fleet on a machine with GPUs."""
    result = run_gpu(_show_progress)
    for name, value in result.items():
        click.echo(f"{name}: {value}")
    if as_json:
        print_json(result)


def _show_progress(text: str) -> None:
    click.echo(f"[geartrain] {text}", err=True)
