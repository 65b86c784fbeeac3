"""The command line: one file a verb. Torch-free."""

from __future__ import annotations

import click

from geartrain.cli import (
    bench,
    chaos,
    checkpoint,
    emulate,
    nodes,
    plan,
    probe,
    report,
    run,
    scale,
)


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="geartrain", prog_name="geartrain")
def main() -> None:
    """Train one PyTorch model on devices that are not alike."""


main.add_command(probe.probe)
main.add_command(plan.plan)
main.add_command(run.run)
main.add_command(report.report)
main.add_command(emulate.emulate)
main.add_command(bench.bench)
main.add_command(chaos.chaos)
main.add_command(checkpoint.checkpoint)
main.add_command(scale.scale)
main.add_command(nodes.nodes)
