"""``geartrain nodes``."""

from __future__ import annotations

from pathlib import Path

import click

from geartrain.cli.run_changes import (
    ask_for_view,
    describe_devices,
    report_change,
    run_argument,
    wait_option,
)
from geartrain.cli.tables import print_table
from geartrain.cli.verb import Verb, json_option, print_json
from geartrain.launch.control_messages import DrainRequest
from geartrain.launch.control_socket import ask_run, find_run


@click.group()
def nodes() -> None:
    """See the devices of a running run, and let some leave."""


@nodes.command("drain", cls=Verb)
@run_argument
@click.argument("target", metavar="NODE|DEVICE")
@wait_option
@json_option
def drain(run: Path, target: str, wait_s: float | None, as_json: bool) -> None:
    """Have a device, or all devices of a node, leave a running RUN.

    They finish their step, and the others go on without them from the next one; no step
    fails. They stay away until geartrain scale asks for them.
    """
    run_dir = find_run(run)
    answer = ask_run(run_dir, DrainRequest(target=target))
    report_change(run_dir, answer, wait_s, as_json=as_json)


@nodes.command("list", cls=Verb)
@run_argument
@json_option
def list_nodes(run: Path, as_json: bool) -> None:
    """Show the devices of a running RUN: where they are and what they do."""
    view = ask_for_view(find_run(run))
    devices = describe_devices(view)
    if as_json:
        shown = {"run_id": view.run_id, "min_devices": view.min_devices}
        print_json(shown | {"devices": devices})
        return
    head = ("device", "node", "state", "rank", "pid", "failures", "reason")
    rows = [tuple("" if v is None else str(v) for v in d.values()) for d in devices]
    print_table(head, rows, num_text_columns=len(head))
