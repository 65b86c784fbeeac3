"""What the verbs of ``geartrain checkpoint`` share: places, versions, progress."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from pathlib import Path

from geartrain.checkpoint.chunk_store import FileStore
from geartrain.checkpoint.chunks import ObjectStore
from geartrain.checkpoint.durable_tier import open_store
from geartrain.checkpoint.versions import (
    Version,
    find_latest,
    list_versions,
    read_version,
)
from geartrain.cli.fleet import show_progress
from geartrain.errors import CheckpointError, ConfigError

_AT_STEP = re.compile(r"(?P<place>.+)@(?P<step>\d+)\Z")
_BETWEEN_LINES_S = 1.0
_MANY = 5


def open_place(place: str) -> ObjectStore:
    """Open a store that must hold versions.

    Raises:
        ConfigError: If there is none.
        CheckpointError: If it can't be read.
    """
    store = open_store(place)
    if isinstance(store, FileStore):
        _check_directory(Path(store.label))
    if not list_versions(store):
        msg = f"{store.label} holds no versions; give the place that a run saves to"
        raise ConfigError(msg)
    return store


def open_version(place: str) -> tuple[ObjectStore, Version]:
    """Open ``PLACE`` or ``PLACE@STEP``: the latest version, or that of a step.

    Raises:
        ConfigError: If there is no such place or step.
        CheckpointError: If it can't be read.
    """
    match = _AT_STEP.match(place)
    if match is None:
        store = open_place(place)
        latest = find_latest((store,))
        assert latest is not None  # open_place has seen one
        return store, latest
    store = open_place(match["place"])
    return store, _find_step(store, int(match["step"]))


def _find_step(store: ObjectStore, step: int) -> Version:
    names = list_versions(store)
    found, problems = [], []
    steps = []
    for name in names:
        try:
            version = read_version((store,), name)
        except CheckpointError as error:
            problems.append(str(error))
            continue
        steps.append(version.manifest.step)
        if version.manifest.step == step:
            found.append(version)
    if found:  # several where a run went back and came to that step again
        return max(found, key=lambda version: version.manifest.created_at_s)
    known = ", ".join(map(str, sorted(set(steps))[-_MANY:])) or "none"
    msg = f"{store.label} has no version of step {step}; the last ones are {known}"
    if problems:
        msg += f" ({'; '.join(problems)})"
    raise ConfigError(msg)


def _check_directory(directory: Path) -> None:
    if not directory.is_dir():
        msg = f"there is no directory {directory}; give the place that a run saves to"
        raise ConfigError(msg)
    if (directory / "manifest.json").is_file() or (directory / ".metadata").is_file():
        msg = (
            f"{directory} holds one state and no versions; take it in with geartrain "
            f"checkpoint import {directory} STORE, or load its files as they are"
        )
        raise ConfigError(msg)


@dataclass(slots=True)
class Progress:
    """Prints how far a verb is, but not every step."""

    what: str
    shown_at_s: float | None = None

    def __call__(self, done: int, total: int) -> None:
        """Take note of progress."""
        now_s = time.monotonic()
        if self.shown_at_s is None:
            self.shown_at_s = now_s  # nothing is shown of what is quick
        if now_s - self.shown_at_s >= _BETWEEN_LINES_S:
            self.shown_at_s = now_s
            show_progress(f"{self.what}: {done} of {total}")
