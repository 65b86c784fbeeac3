"""What the verbs share that change a running run: its name, the wait, the report."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from geartrain.cli.verb import print_json
from geartrain.errors import DeviceError
from geartrain.launch.control_messages import Answer, ListRequest, RunView
from geartrain.launch.control_socket import ask_run

Function = TypeVar("Function", bound=Callable[..., Any])  # Any: click's own signature

_POLL_S = 0.1


def run_argument(function: Function) -> Function:
    """Add ``RUN``."""
    return click.argument("run", metavar="RUN", type=click.Path(path_type=Path))(function)


def wait_option(function: Function) -> Function:
    """Add ``--wait``."""
    return click.option(
        "--wait",
        "wait_s",
        type=click.FloatRange(min=0),
        metavar="SECONDS",
        help="Wait until it is done, at most so long; by default it is only asked for.",
    )(function)


def ask_for_view(run_dir: Path) -> RunView:
    """Ask a run how it is.

    Raises:
        ConfigError: If it is over.
        CommunicationError: If it doesn't answer.
    """
    view = ask_run(run_dir, ListRequest()).run
    assert view is not None, "the answer to this request has it"
    return view


def describe_devices(view: RunView) -> list[dict[str, Any]]:  # Any: text, numbers, None
    """A dictionary a device, in rank order."""
    return [
        {
            "device_id": device.device_id,
            "node_id": device.profile.node_id,
            "state": device.state,
            "rank": device.rank,
            "process_id": device.process_id,
            "num_failures": device.num_failures,
            "reason": device.reason,
        }
        for device in view.devices
    ]


def report_change(
    run_dir: Path, answer: Answer, wait_s: float | None, *, as_json: bool
) -> None:
    """Say what the run has answered; wait until it is done where that was asked for.

    Raises:
        DeviceError: If it is not done in time, or a device failed instead.
    """
    if not as_json:
        click.echo(answer.message)
    if wait_s is not None:
        _wait(run_dir, answer, wait_s)
    if as_json:
        shown = {"run_dir": str(run_dir), "message": answer.message}
        changes = {"added": answer.added, "removed": answer.removed}
        print_json(shown | changes | {"is_done": wait_s is not None})
    elif wait_s is not None:
        click.echo("done")


def _wait(run_dir: Path, answer: Answer, wait_s: float) -> None:
    deadline_s = time.monotonic() + wait_s
    while missing := _missing(ask_for_view(run_dir), answer):
        if time.monotonic() >= deadline_s:
            listed = ", ".join(f"{name} ({state})" for name, state in missing.items())
            msg = (
                f"not done after {wait_s:g} s: {listed}; the run goes on with it, see "
                f"geartrain nodes list {run_dir}"
            )
            raise DeviceError(msg)
        threading.Event().wait(_POLL_S)


def _missing(view: RunView, answer: Answer) -> dict[str, str]:
    """Devices that are not yet as asked for, with what they do instead."""
    states = {device.device_id: device.state for device in view.devices}
    wanted = dict.fromkeys(answer.added, "training") | dict.fromkeys(answer.removed, "out")
    return {
        name: states.get(name, "unknown")
        for name, state in wanted.items()
        if states.get(name) != state
    }
