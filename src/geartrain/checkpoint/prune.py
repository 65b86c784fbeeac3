"""Remove the versions that a policy does not keep, and the chunks that only they need."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from geartrain.checkpoint.chunk_store import FileStore
from geartrain.checkpoint.chunks import OBJECTS, ObjectStore, StoredObject, object_name
from geartrain.checkpoint.collect_garbage import (
    MIN_AGE_S,
    Collected,
    collect_garbage,
    remove_version,
)
from geartrain.checkpoint.local_tier import LocalTier
from geartrain.checkpoint.retention import (
    KeptCandidate,
    Retention,
    RetentionPolicy,
    choose_kept,
    unneeded_objects,
)
from geartrain.checkpoint.versions import Version, list_versions, read_version


@dataclass(frozen=True, slots=True, kw_only=True)
class PruneReport:
    """What was removed, or would be."""

    retention: Retention
    num_objects: int
    num_bytes: int
    num_young: int
    """Chunks that nobody needs but that may belong to a version in the making; they go
    with a later prune."""
    was_dry_run: bool


def prune_store(
    store: ObjectStore,
    policy: RetentionPolicy,
    *,
    dry_run: bool = False,
    min_age_s: float = MIN_AGE_S,
) -> PruneReport:
    """Remove what a policy does not keep.

    The version that the pointer names always stays, and so does all that a kept one needs.
    A collector cannot see a writer in another process that has just found an old chunk of
    a store without locks, such as S3: prune those while nobody saves to them.

    Args:
        store: Where.
        policy: What stays.
        dry_run: Only say what would be removed.
        min_age_s: How old a chunk that nobody needs must be at least.

    Raises:
        CheckpointError: If a manifest can't be read, so that nobody knows what it needs,
            or the store fails. Nothing that a readable version needs is lost.
    """
    versions = [read_version((store,), name) for name in list_versions(store)]
    objects = tuple(store.list_objects(OBJECTS))
    retention = choose_kept(_candidates(store, versions, objects), policy)
    spare = _spare(versions, objects, retention)
    now_s = time.time()
    old = [one for one in spare if now_s - one.modified_at_s >= min_age_s]
    collected = Collected(
        names=tuple(one.name for one in old), num_bytes=sum(one.num_bytes for one in old)
    )
    if not dry_run:
        # The oldest first: a prune that is cut off leaves the newest.
        for name in reversed(retention.dropped):
            remove_version(store, name)
        store.sync()
        collected = _collect(store, min_age_s)
    return PruneReport(
        retention=retention,
        num_objects=len(collected.names),
        num_bytes=collected.num_bytes,
        num_young=len(spare) - len(old),
        was_dry_run=dry_run,
    )


def _candidates(
    store: ObjectStore, versions: Sequence[Version], objects: Sequence[StoredObject]
) -> list[KeptCandidate]:
    sizes = {one.name: one.num_bytes for one in objects}
    pointer = store.read_pointer()
    return [
        KeptCandidate(
            name=version.name,
            step=version.manifest.step,
            kind=version.manifest.kind,
            created_at_s=version.manifest.created_at_s,
            is_whole=all(
                sizes.get(object_name(chunk_id)) == facts.num_bytes
                for chunk_id, facts in version.manifest.chunks.items()
            ),
            is_pinned=version.name == pointer,
        )
        for version in versions
    ]


def _spare(
    versions: Sequence[Version], objects: Sequence[StoredObject], retention: Retention
) -> list[StoredObject]:
    needs = {
        version.name: [object_name(one) for one in version.manifest.chunks]
        for version in versions
    }
    spare = set(unneeded_objects((one.name for one in objects), needs, retention.kept))
    return [one for one in objects if one.name in spare]


def _collect(store: ObjectStore, min_age_s: float) -> Collected:
    if isinstance(store, FileStore):  # which has a lock that keeps writers out
        return LocalTier(store.label).collect_garbage(min_age_s=min_age_s)
    return collect_garbage(store, now_s=time.time(), min_age_s=min_age_s)
