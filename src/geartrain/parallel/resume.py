"""Where a run can go on from, and taking that up. Finding out needs no torch."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from geartrain.checkpoint.chunk_store import FileStore
from geartrain.checkpoint.drift import find_drift
from geartrain.checkpoint.durable_tier import open_store
from geartrain.checkpoint.versions import Version, find_latest, list_versions, read_version
from geartrain.errors import CheckpointError, ConfigError
from geartrain.parallel.save_spec import CHECKPOINTS_NAME, SNAPSHOT_NAME, ResumeSpec

if TYPE_CHECKING:
    from geartrain.checkpoint.chunks import ObjectStore
    from geartrain.parallel.saved_state import LoadedState, TrainState

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumable:
    """What a run can go on from."""

    spec: ResumeSpec
    created_at_s: float
    config: Mapping[str, Any]  # Any: JSON
    """What the run that saved it was started with; empty where that isn't known."""


def find_resumable(place: str, others: Sequence[str] = ()) -> Resumable:
    """Find the newest whole state of a run.

    Args:
        place: A run directory, a folder that ``Session.save`` wrote, or a store of
            versions: a directory or a URL such as ``s3://bucket/run``.
        others: Stores to turn to where something in a version is damaged.

    Raises:
        CheckpointError: If there is none, naming where it was looked for.
        ConfigError: If there is no such folder.
    """
    if "://" in place:
        return _of_store(open_store(place), place, others)
    folder = Path(place)
    if not folder.is_dir():
        msg = f"there is no folder {place}; give a run directory, such as one of runs/"
        raise ConfigError(msg)
    found = [
        one
        for one in (
            _snapshot_in(folder),
            _snapshot_in(folder / SNAPSHOT_NAME),
            _versions_in(folder / CHECKPOINTS_NAME, others),
            _versions_in(folder, others),
        )
        if one is not None
    ]
    if not found:
        msg = (
            f"{place} holds no state to go on from: neither {SNAPSHOT_NAME}/, which a run "
            f"writes when it is asked to stop, nor a version in {CHECKPOINTS_NAME}/; start "
            "anew without --resume"
        )
        raise CheckpointError(msg)
    return max(found, key=lambda one: (one.created_at_s, one.spec.step))


def take_up(spec: ResumeSpec, state: TrainState) -> LoadedState:
    """Read the state that a run goes on from.

    Raises:
        CheckpointError: If it is damaged in all stores, or of another model.
    """
    from geartrain.checkpoint.pieces import StateReader  # noqa: PLC0415 - beside torch
    from geartrain.checkpoint.state_tensors import load_components  # noqa: PLC0415
    from geartrain.parallel.saved_state import adopt_state, load_state  # noqa: PLC0415

    if spec.snapshot is not None:
        return load_state(Path(spec.snapshot), state)
    stores = [open_store(place) for place in spec.stores]
    version = read_version(stores, spec.version)
    reader = StateReader(stores, version.manifest)
    parts = load_components(reader, version.manifest)
    return adopt_state(parts, state, f"step {spec.step} in {spec.stores[0]}")


def tell_drift(before: Mapping[str, Any], after: Mapping[str, Any]) -> tuple[str, ...]:
    """Name what differs from the run that is gone on with; empty where nothing does."""
    return tuple(str(drift) for drift in find_drift(before, after)) if before else ()


def _snapshot_in(folder: Path) -> Resumable | None:
    from geartrain.checkpoint.directory import current_directory  # noqa: PLC0415
    from geartrain.checkpoint.snapshot import (  # noqa: PLC0415 - imports torch
        MANIFEST_NAME,
        read_manifest,
    )

    if not (current_directory(folder) / MANIFEST_NAME).is_file():
        return None
    manifest = read_manifest(folder)
    return Resumable(
        spec=ResumeSpec(
            snapshot=str(folder.resolve()), step=int(manifest.metadata.get("step", 0))
        ),
        created_at_s=manifest.created_at_s,
        config={},
    )


def _versions_in(folder: Path, others: Sequence[str]) -> Resumable | None:
    store = FileStore(folder)
    if not folder.is_dir() or not list_versions(store):
        return None
    return _of_store(store, str(folder.resolve()), others)


def _of_store(store: ObjectStore, place: str, others: Sequence[str]) -> Resumable:
    latest = _latest_full([store, *(open_store(other) for other in others)])
    if latest is None:
        msg = f"{place} holds no version that a training can go on from"
        raise CheckpointError(msg)
    manifest = latest.manifest
    return Resumable(
        spec=ResumeSpec(stores=(place, *others), version=latest.name, step=manifest.step),
        created_at_s=manifest.created_at_s,
        config=manifest.config,
    )


def _latest_full(stores: Sequence[ObjectStore]) -> Version | None:
    """The newest version with all of a training's state, not weights alone."""
    latest = find_latest(stores)
    if latest is None or latest.manifest.kind == "full":
        return latest
    names = sorted({name for store in stores for name in list_versions(store)})
    full = []
    for name in names:
        try:
            version = read_version(stores, name)
        except CheckpointError as error:
            logger.warning("%s is passed over: %s", name, error)
            continue
        if version.manifest.kind == "full":
            full.append(version)
    return max(full, key=lambda one: one.manifest.created_at_s, default=None)
