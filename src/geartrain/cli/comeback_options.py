"""The options of ``geartrain run`` for workers that are lost: whether they come back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from geartrain.errors import ConfigError
from geartrain.launch.respawn import RespawnSettings

F = TypeVar("F", bound=Callable[..., Any])


def comeback_options(function: F) -> F:
    """Add the options."""
    usual = RespawnSettings()
    options = (
        click.option(
            "--respawn/--no-respawn",
            default=True,
            show_default=True,
            help="Start lost workers again; they join at a step boundary.",
        ),
        click.option(
            "--max-failures",
            type=int,
            default=None,
            metavar="N",
            help="After more failures of all devices together none is started again; no "
            "limit by default.",
        ),
        click.option(
            "--max-device-failures",
            type=int,
            default=usual.max_device_failures,
            show_default=True,
            metavar="N",
            help="After more failures of one device, without "
            f"{usual.quiet_s / 60:g} minutes of quiet between them, it is left out.",
        ),
        click.option(
            "--max-respawn-wait",
            "max_respawn_wait_s",
            type=float,
            default=usual.max_wait_s,
            show_default=True,
            metavar="S",
            help="A device waits a second before it starts again, twice as long after each "
            "further failure, and at most this.",
        ),
        click.option(
            "--warm-spares/--no-warm-spares",
            default=True,
            show_default=True,
            help="Keep a process ready from which they start at once.",
        ),
    )
    for option in reversed(options):
        function = option(function)
    return function


def take_respawn(options: dict[str, Any]) -> RespawnSettings | None:  # Any: click's
    """Take how often lost workers come back out of the options; None: never.

    Raises:
        ConfigError: If the options contradict each other, or a number is impossible.
    """
    respawn = options.pop("respawn")
    max_failures = options.pop("max_failures")
    max_device_failures = options.pop("max_device_failures")
    max_wait_s = options.pop("max_respawn_wait_s")
    if not respawn and max_failures is not None:
        msg = (
            f"--max-failures {max_failures} limits how often lost workers are started "
            "again, but --no-respawn never does; leave one of them out"
        )
        raise ConfigError(msg)
    settings = RespawnSettings(
        first_wait_s=min(RespawnSettings().first_wait_s, max_wait_s),
        max_wait_s=max_wait_s,
        max_failures=max_failures,
        max_device_failures=max_device_failures,
    )
    return settings if respawn else None
