"""The options of ``geartrain run`` for saves, and for going on from one."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from geartrain.checkpoint.cadence import Cadence, SaveInterval, TierCadence
from geartrain.errors import CheckpointError, ConfigError
from geartrain.telemetry import RunManifest, read_document

if TYPE_CHECKING:
    from geartrain.launch import LaunchSettings
    from geartrain.parallel.save_spec import ResumeSpec

F = TypeVar("F", bound=Callable[..., Any])

_EVERY = re.compile(r"\s*(?P<number>\d+(\.\d*)?|\.\d+)\s*(?P<unit>[a-z]+)\s*\Z")
_SECONDS = {"s": 1.0, "min": 60.0, "h": 3600.0}
_NEVER = "never"
_RUN_NAME = "run.json"


def save_options(function: F) -> F:
    """Add the options."""
    options = (
        click.option(
            "--resume",
            "resume_from",
            metavar="RUN",
            help="Go on from the newest state of a run directory, a folder that "
            "Session.save wrote, or a store such as s3://bucket/run.",
        ),
        click.option(
            "--save-every",
            default="5min",
            show_default=True,
            help="How often the whole state is saved in the run directory: a time (30s, "
            "5min, 1h), a number of steps (500steps), or never.",
        ),
        click.option(
            "--durable",
            "durable_url",
            metavar="URL",
            help="Save to this store too, which outlives this host: a directory or what "
            "fsspec knows, such as s3://bucket/run.",
        ),
        click.option(
            "--durable-every",
            default="30min",
            show_default=True,
            help="How often the whole state is saved there.",
        ),
        click.option(
            "--weights-every",
            default=_NEVER,
            show_default=True,
            help="How often the weights alone are saved in between, in both places.",
        ),
        click.option(
            "--keep",
            "keep_last",
            type=int,
            default=3,
            show_default=True,
            help="Versions kept in the run directory.",
        ),
    )
    for option in reversed(options):
        function = option(function)
    return function


def parse_interval(text: str) -> SaveInterval | None:
    """Read how often; None for ``never``.

    Raises:
        ConfigError: If it is neither a time nor a number of steps.

    >>> parse_interval("5min"), parse_interval("500 steps").every_steps
    (SaveInterval(every_s=300.0, every_steps=None), 500)
    """
    if text.strip() == _NEVER:
        return None
    found = _EVERY.match(text)
    unit = found["unit"] if found else ""
    if found and unit in _SECONDS:
        return SaveInterval(every_s=float(found["number"]) * _SECONDS[unit])
    if found and unit in {"step", "steps"} and float(found["number"]).is_integer():
        return SaveInterval(every_steps=int(float(found["number"])))
    msg = f"{text!r} says not how often; write 30s, 5min, 1h, 500steps, or never"
    raise ConfigError(msg)


def take_cadence(options: dict[str, Any]) -> Cadence | None:
    """Take what is saved when out of the options; None where nothing is saved.

    Raises:
        ConfigError: If one of them can't be read.
    """
    weights = parse_interval(options.pop("weights_every"))
    local = parse_interval(options.pop("save_every"))
    durable = parse_interval(options.pop("durable_every"))
    if local is None and durable is None and weights is None:
        return None
    return Cadence(
        local=TierCadence(full=local, weights=weights),
        durable=TierCadence(full=durable, weights=weights),
    )


def find_resume(resume_from: str | None, durable_url: str | None) -> ResumeSpec | None:
    """Find what to go on from; None where nothing was asked for.

    Raises:
        CheckpointError: If there is nothing to go on from.
    """
    from geartrain.parallel.resume import find_resumable  # noqa: PLC0415 - slow

    if resume_from is None:
        return None
    others = () if durable_url is None or durable_url == resume_from else (durable_url,)
    return find_resumable(resume_from, others).spec


def name_drift(resume_from: str, settings: LaunchSettings) -> tuple[str, ...]:
    """Name what differs from the run that is gone on with.

    Args:
        resume_from: What the user gave.
        settings: Of the run that begins.
    """
    from geartrain.launch.run_directory import (  # noqa: PLC0415 - beside the launcher
        config_of,
        describe_run,
    )
    from geartrain.parallel.resume import find_resumable, tell_drift  # noqa: PLC0415

    before: dict[str, Any] = {}
    if (Path(resume_from) / _RUN_NAME).is_file():
        before = config_of(read_document(Path(resume_from) / _RUN_NAME, RunManifest))
    else:
        try:
            before = dict(find_resumable(resume_from).config)
        except CheckpointError:
            return ()  # its other store has what it needs; it says so when it is read
    return tell_drift(before, config_of(describe_run(settings)))
