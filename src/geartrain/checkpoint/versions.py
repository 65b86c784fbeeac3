"""Which versions a store holds, and which of them is the latest."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from geartrain.checkpoint.chunks import MANIFESTS, ObjectSink, ObjectStore
from geartrain.checkpoint.manifest import (
    StateManifest,
    decode_manifest,
    encode_manifest,
    step_of_name,
)
from geartrain.errors import CheckpointError

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Version:
    """A manifest that has been read and checked."""

    name: str
    """In its store: ``manifests/<step>-<digest>.json``."""
    manifest: StateManifest


def publish_version(store: ObjectSink, manifest: StateManifest) -> str:
    """Make a version the latest, after everything that it names was put.

    Returns:
        The manifest's name.

    Raises:
        CheckpointError: If the store fails. The version that was the latest still is, or
            this one is whole.
    """
    name, data = encode_manifest(manifest)
    store.sync()
    store.put_if_absent(name, data)
    store.sync()
    store.publish_pointer(name)
    return name


def list_versions(store: ObjectStore) -> tuple[str, ...]:
    """Return the names of all manifests, by step; their content is not checked.

    Raises:
        CheckpointError: If the store fails.
    """
    names = (found.name for found in store.list_objects(MANIFESTS))
    return tuple(sorted(name for name in names if step_of_name(name) is not None))


def read_version(stores: Sequence[ObjectStore], name: str) -> Version:
    """Read a manifest from the first store that has it undamaged.

    Raises:
        CheckpointError: If none has, saying what is wrong in each.
    """
    problems = []
    for store in stores:
        try:
            return Version(name=name, manifest=decode_manifest(store.get(name), name))
        except CheckpointError as error:
            problems.append(f"{store.label}: {error}")
    msg = f"{name!r} can't be read: {'; '.join(problems) or 'no store was given'}"
    raise CheckpointError(msg)


def find_latest(stores: Sequence[ObjectStore]) -> Version | None:
    """Return the version that was saved last, None where there is none.

    A store says so by its pointer. Where that is missing, damaged, or names something that
    can't be read, it is the newest version that can. Of several stores, the one whose
    version was made last decides.

    Raises:
        CheckpointError: If there are versions and none can be read, or no store answers.
    """
    found: list[Version] = []
    problems: list[str] = []
    for store in stores:
        try:
            latest = _find_latest_of(store, stores)
        except CheckpointError as error:
            problems.append(str(error))
        else:
            if latest is not None:
                found.append(latest)
    if not found and problems:
        msg = f"no version can be read: {'; '.join(problems)}"
        raise CheckpointError(msg)
    return max(found, key=_recency, default=None)


def _find_latest_of(store: ObjectStore, stores: Sequence[ObjectStore]) -> Version | None:
    pointer = store.read_pointer()
    if pointer is not None:
        try:
            return read_version((store, *stores), pointer)
        except CheckpointError as error:
            problem = str(error)
    else:
        problem = "it is missing"
    names = list_versions(store)
    if not names:
        if pointer is None:
            return None
        msg = f"{store.label} has no version, but its pointer names {pointer!r}"
        raise CheckpointError(msg)
    logger.warning(
        "The pointer in %s can't be followed (%s); taking the newest version that can be "
        "read.",
        store.label,
        problem,
    )
    return _find_newest(store, names)


def _find_newest(store: ObjectStore, names: Sequence[str]) -> Version:
    readable, problems = [], []
    for name in names:
        try:
            readable.append(read_version((store,), name))
        except CheckpointError as error:
            problems.append(str(error))
    if not readable:
        msg = f"no version in {store.label} can be read: {'; '.join(problems)}"
        raise CheckpointError(msg)
    return max(readable, key=_recency)


def _recency(version: Version) -> tuple[float, int]:
    # Time first: a run that went back to step 3000 saves after one that had reached 5000.
    return version.manifest.created_at_s, version.manifest.step
