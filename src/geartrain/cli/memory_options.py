"""The options of ``geartrain run`` for states kept in the memory of its nodes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from geartrain.errors import ConfigError
from geartrain.parallel.save_spec import PeerMemorySettings
from geartrain.units import parse_bytes

F = TypeVar("F", bound=Callable[..., Any])


def memory_options(function: F) -> F:
    """Add the options."""
    usual = PeerMemorySettings()
    options = (
        click.option(
            "--peer-memory/--no-peer-memory",
            default=True,
            show_default=True,
            help="Keep the state in the memory of the nodes too: where all workers are "
            "lost at once, the run goes on from there.",
        ),
        click.option(
            "--peer-copies",
            type=int,
            default=None,
            metavar="N",
            help=f"Copies on other hosts; {usual.num_copies} by default, as far as there "
            "are other hosts.",
        ),
        click.option(
            "--peer-memory-limit",
            default=None,
            metavar="SIZE",
            help="Memory that a node may give to it, such as 4GiB; by default a quarter of "
            "the host's, shared by its nodes.",
        ),
    )
    for option in reversed(options):
        function = option(function)
    return function


def take_peer_memory(options: dict[str, Any]) -> PeerMemorySettings | None:  # Any: click's
    """Take what is kept in memory out of the options; None: nothing.

    Raises:
        ConfigError: If the options contradict each other, or a number is impossible.
    """
    is_wanted = options.pop("peer_memory")
    given = {
        "--peer-copies": options.pop("peer_copies"),
        "--peer-memory-limit": options.pop("peer_memory_limit"),
    }
    named = [name for name, value in given.items() if value is not None]
    if not is_wanted:
        if named:
            msg = (
                f"{' and '.join(named)} says how the state is kept in memory, but "
                "--no-peer-memory keeps none; leave one of them out"
            )
            raise ConfigError(msg)
        return None
    copies, limit = given["--peer-copies"], given["--peer-memory-limit"]
    usual = PeerMemorySettings()
    return PeerMemorySettings(
        num_copies=usual.num_copies if copies is None else copies,
        memory_limit_bytes=None if limit is None else parse_bytes(limit),
    )
