"""What all verbs share: errors for people, ``--json`` for programs."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, TypeVar

import click
import msgspec

from geartrain.errors import ConfigError, GeartrainError

Function = TypeVar("Function", bound=Callable[..., Any])  # Any: click's own signature

CONFIG_EXIT_CODE = 2
"""As click itself ends on a wrong option."""

INTERRUPTED_EXIT_CODE = 130
"""As a shell reports a program that Ctrl-C ended."""


class Verb(click.Command):
    """A command whose deliberate errors are one line on stderr, no traceback."""

    def invoke(self, ctx: click.Context) -> Any:  # Any: click's own signature
        """Run the command; a GeartrainError ends it with its exit code."""
        logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s")
        try:
            return super().invoke(ctx)
        except GeartrainError as error:
            click.echo(f"error: {error}", err=True)
            if ctx.params.get("as_json"):
                print_json({"error": str(error), "kind": type(error).__name__})
            ctx.exit(CONFIG_EXIT_CODE if isinstance(error, ConfigError) else 1)
        except (KeyboardInterrupt, click.Abort):
            click.echo("interrupted", err=True)
            ctx.exit(INTERRUPTED_EXIT_CODE)


def print_json(document: object) -> None:
    """Print one JSON object as one line, the last one of stdout."""
    click.echo(msgspec.json.encode(document).decode())


def json_option(function: Function) -> Function:
    """Add ``--json``."""
    return click.option(
        "--json", "as_json", is_flag=True, help="Print one JSON object as the last line."
    )(function)


def fleet_option(function: Function) -> Function:
    """Add ``--fleet``."""
    return click.option(
        "--fleet",
        "fleet_spec",
        metavar="SPEC",
        help="emulated:1.0,0.5, a fleet.json, or a list such as cuda:0,cuda:1,cpu; "
        "all local devices by default.",
    )(function)


def oversubscribe_option(function: Function) -> Function:
    """Add ``--oversubscribe``."""
    return click.option(
        "--oversubscribe",
        is_flag=True,
        help="Allow emulated devices more cores than there are; results say so.",
    )(function)


def links_option(function: Function) -> Function:
    """Add ``--links``."""
    return click.option(
        "--links",
        metavar="SPEC",
        help="Each emulated device is a host of its own, with shaped links: 50Mbit, "
        "50Mbit,12Mbit (one a device), or racks 2x4:500Mbit:50Mbit. Needs root.",
    )(function)
