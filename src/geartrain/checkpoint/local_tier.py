"""Tier 2: versions on the local disk. A save that fails leaves the versions before it.

The directory::

    objects/ab/<chunk id>               chunks, named after their content
    manifests/<step>-<digest>.json      one a version, written after its chunks
    LATEST                              the name of a manifest, replaced in one step

Torch is not imported: whoever holds the bytes writes them, such as a node's agent.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from geartrain.checkpoint.chunk_store import FileStore
from geartrain.checkpoint.chunks import OBJECTS, ObjectStore
from geartrain.checkpoint.collect_garbage import (
    MIN_AGE_S,
    Collected,
    collect_garbage,
    needed_objects,
    remove_version,
)
from geartrain.checkpoint.manifest import StateManifest, TensorFacts
from geartrain.checkpoint.pieces import (
    HeldPiece,
    StateFacts,
    StateReader,
    StoredPart,
    assemble_manifest,
    store_pieces,
)
from geartrain.checkpoint.versions import (
    Version,
    find_latest,
    list_versions,
    publish_version,
    read_version,
)
from geartrain.errors import CheckpointError

_LOCK_DEADLINE_S = 60.0  # a sweep of a large store, with room to spare


class LocalTier:
    """Versions in a directory.

    Args:
        directory: Made when something is saved. Several writers may share it.
        others: Stores to turn to where something here is damaged or missing.
    """

    def __init__(
        self, directory: str | Path, *, others: Sequence[ObjectStore] = ()
    ) -> None:
        self._store = FileStore(directory)
        self._others = tuple(others)

    @property
    def store(self) -> FileStore:
        """The directory as a store of objects."""
        return self._store

    @property
    def stores(self) -> tuple[ObjectStore, ...]:
        """Where reads go, in order."""
        return (self._store, *self._others)

    def save(self, facts: StateFacts, pieces: Iterable[HeldPiece]) -> Version:
        """Write a whole version and make it the latest.

        Args:
            facts: What it is.
            pieces: They tile the tensors that the facts name.

        Raises:
            CheckpointError: If the disk refuses, or something is missing. The versions
                before are as they were, and what was written of this one is removed.
        """
        with self._writing() as sink:
            part = store_pieces(sink, facts.tensors, pieces)
            manifest = assemble_manifest(facts, (part,))
            return Version(name=publish_version(sink, manifest), manifest=manifest)

    def write_part(
        self, tensors: Mapping[str, TensorFacts], pieces: Iterable[HeldPiece]
    ) -> StoredPart:
        """Write what this member holds of a version; ``publish`` makes it one.

        Raises:
            CheckpointError: If the disk refuses; what was written is removed.
        """
        with self._writing() as sink:
            part = store_pieces(sink, tensors, pieces)
            sink.sync()
            return part

    def publish(self, manifest: StateManifest) -> Version:
        """Make a version of what all writers have stored, and make it the latest.

        Raises:
            CheckpointError: If the disk refuses; the version before stays the latest.
        """
        with self._store.locked(exclusive=False, deadline_s=_LOCK_DEADLINE_S):
            name = publish_version(self._store, manifest)
        return Version(name=name, manifest=manifest)

    def latest(self) -> Version | None:
        """Return the version that was saved last, here or in the other stores.

        Raises:
            CheckpointError: If there are versions and none can be read.
        """
        return find_latest(self.stores)

    def versions(self) -> tuple[str, ...]:
        """Return the names of the versions here, by step."""
        return list_versions(self._store)

    def read(self, name: str) -> Version:
        """Read a manifest.

        Raises:
            CheckpointError: If it is undamaged in no store.
        """
        return read_version(self.stores, name)

    def reader(self, version: Version) -> StateReader:
        """Read the tensors of a version."""
        return StateReader(self.stores, version.manifest)

    def remove(self, name: str) -> None:
        """Remove a version that is not the latest; its chunks go with the next collection.

        Raises:
            CheckpointError: If it is the latest, or the disk refuses.
        """
        remove_version(self._store, name)

    def collect_garbage(
        self, *, min_age_s: float = MIN_AGE_S, deadline_s: float = _LOCK_DEADLINE_S
    ) -> Collected:
        """Remove what no version needs and nobody is writing.

        Raises:
            CheckpointError: If writers hold the store until the deadline, a manifest can't
                be read, or the disk refuses.
        """
        with self._store.locked(exclusive=True, deadline_s=deadline_s):
            self._store.sweep_drafts()
            return collect_garbage(self._store, now_s=time.time(), min_age_s=min_age_s)

    @contextmanager
    def _writing(self) -> Iterator[_RecordingSink]:
        sink = _RecordingSink(self._store)
        try:
            with self._store.locked(exclusive=False, deadline_s=_LOCK_DEADLINE_S):
                yield sink
        except BaseException:
            self._take_back(sink.chunk_names)
            raise

    def _take_back(self, names: Sequence[str]) -> None:
        """Remove what a failed save wrote: it may fill the disk that was full."""
        with (
            suppress(CheckpointError),  # the save has failed already, and says why
            self._store.locked(exclusive=True, deadline_s=0),
        ):
            # Where others still write, or a manifest can't be read, age decides later.
            needed = needed_objects(self._store)
            for name in names:
                if name not in needed:
                    self._store.delete_untouched(name)


class _RecordingSink:
    """Writes to a store, and notes what was not there before."""

    def __init__(self, store: FileStore) -> None:
        self._store = store
        self.chunk_names: list[str] = []

    def put_if_absent(self, name: str, data: bytes | memoryview) -> bool:
        is_new = self._store.put_if_absent(name, data)
        if is_new and name.startswith(OBJECTS):
            self.chunk_names.append(name)
        return is_new

    def sync(self) -> None:
        self._store.sync()

    def publish_pointer(self, manifest_name: str) -> None:
        self._store.publish_pointer(manifest_name)
