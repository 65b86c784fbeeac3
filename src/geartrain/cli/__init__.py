"""The command line: one file a verb, imported when it is used. Torch-free."""

from __future__ import annotations

import click

from geartrain import __version__
from geartrain.cli.bench import bench
from geartrain.cli.emulate import emulate
from geartrain.cli.plan import plan
from geartrain.cli.probe import probe
from geartrain.cli.report import report
from geartrain.cli.run import run


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="geartrain")
def main() -> None:
    """Train one PyTorch model on devices that are not alike."""


for verb in (probe, plan, run, report, emulate, bench):
    main.add_command(verb)
