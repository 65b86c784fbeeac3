"""``geartrain bench``."""

from __future__ import annotations

import importlib

import click

from geartrain.cli.verb import Verb, json_option


@click.group()
def bench() -> None:
    """Measure geartrain against its bound and against plain DDP."""


@bench.command("macro", cls=Verb)
@click.option(
    "--fleet",
    "fleet_spec",
    default="emulated:0.8,0.4,0.2,0.1",
    show_default=True,
    metavar="SPEC",
    help="The unequal fleet.",
)
@click.option("--quick", is_flag=True, help="Fewer repeats: within a minute.")
@json_option
def macro(fleet_spec: str, quick: bool, as_json: bool) -> None:
    """Train the same model with geartrain, with DDP, and on each device alone."""
    # By name: benchmarks import torch, which this room must not reach.
    importlib.import_module("geartrain.bench.macro").main_macro(
        fleet=fleet_spec, quick=quick, json=as_json
    )


@bench.command("gpu", cls=Verb)
@json_option
def gpu(as_json: bool) -> None:
    """Check exactness, overhead and a mixed fleet on a machine with GPUs."""
    importlib.import_module("geartrain.bench.gpu").main_gpu(json=as_json)
