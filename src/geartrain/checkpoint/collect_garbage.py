"""Remove the objects that no version needs: mark from all manifests, then sweep.

Writers put chunks first and the manifest last, so a chunk that belongs to nothing may
belong to a version in the making. Its age tells: it begins anew whenever a writer finds the
chunk there. A store that has a lock keeps writers out for the moment of the sweep as well.
"""

from __future__ import annotations

from dataclasses import dataclass

from geartrain.checkpoint.chunks import MANIFESTS, OBJECTS, ObjectStore, object_name
from geartrain.checkpoint.versions import list_versions, read_version
from geartrain.errors import CheckpointError

MIN_AGE_S = 3600.0
"""Much longer than one version takes to write; also bridges clocks that differ."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Collected:
    """What was removed, or would be."""

    names: tuple[str, ...]
    num_bytes: int


def collect_garbage(
    store: ObjectStore, *, now_s: float, min_age_s: float = MIN_AGE_S, dry_run: bool = False
) -> Collected:
    """Remove chunks that no manifest of the store names and that are old enough.

    Args:
        store: Where.
        now_s: Unix time.
        min_age_s: How long ago a chunk must have been written, or found, at least.
        dry_run: Only say what would be removed.

    Raises:
        CheckpointError: If the store fails, or a manifest can't be read: nothing is
            removed then, since nobody knows what that version needs.
    """
    # Listed before marking: a chunk put after this is not on the list.
    listed = tuple(store.list_objects(OBJECTS))
    needed = needed_objects(store)
    spare = tuple(
        found
        for found in listed
        if found.name not in needed and now_s - found.modified_at_s >= min_age_s
    )
    if not dry_run:
        for found in spare:
            store.delete(found.name)
    return Collected(
        names=tuple(found.name for found in spare),
        num_bytes=sum(found.num_bytes for found in spare),
    )


def needed_objects(store: ObjectStore) -> set[str]:
    """Return the names of all chunks that a version of the store consists of.

    Raises:
        CheckpointError: If a manifest can't be read.
    """
    needed: set[str] = set()
    for name in list_versions(store):
        try:
            manifest = read_version((store,), name).manifest
        except CheckpointError as error:
            if not store.has(name):
                continue  # removed meanwhile, with what it needed
            msg = (
                f"nothing is removed from {store.label}, since {name} can't be read "
                f"({error}); repair it from another store, or remove that file"
            )
            raise CheckpointError(msg) from error
        needed.update(map(object_name, manifest.chunks))
    return needed


def remove_version(store: ObjectStore, name: str) -> None:
    """Remove a manifest; chunks that only it names go with the next collection.

    Raises:
        CheckpointError: If it is the one that the pointer names, or the store fails.
    """
    if store.read_pointer() == name:
        msg = f"{name} is the latest version in {store.label}; it is kept"
        raise CheckpointError(msg)
    if not name.startswith(MANIFESTS):
        msg = f"{name!r} is no version; give a name that lies in {MANIFESTS}"
        raise CheckpointError(msg)
    store.delete(name)
    store.sync()  # or a power cut might bring it back after its chunks are gone
