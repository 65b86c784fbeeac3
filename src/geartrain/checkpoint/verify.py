"""Read a whole store, name what is damaged, and repair it from other stores."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace

from geartrain.checkpoint.chunks import (
    OBJECTS,
    POINTER,
    ChunkFacts,
    ObjectStore,
    find_damage,
    name_chunk,
    object_name,
    read_chunk,
)
from geartrain.checkpoint.manifest import decode_manifest
from geartrain.checkpoint.ranges import StateRange, merge_ranges
from geartrain.checkpoint.versions import (
    Version,
    find_latest,
    list_versions,
    read_version,
)
from geartrain.errors import CheckpointError

_NUM_THREADS = 4  # reading and hashing leave Python's lock free


@dataclass(frozen=True, slots=True, kw_only=True)
class Damage:
    """An object that is not what was saved."""

    name: str
    """In the store."""
    problem: str
    versions: tuple[str, ...] = ()
    """Manifests that need it; none where it is only in the way."""
    ranges: tuple[StateRange, ...] = ()
    """Elements whose bytes it holds."""
    is_repaired: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyReport:
    """What was read, and what was found."""

    num_versions: int
    num_chunks: int
    num_bytes: int
    damages: tuple[Damage, ...]

    @property
    def is_sound(self) -> bool:
        """Whether everything is now as it was saved."""
        return all(damage.is_repaired for damage in self.damages)


@dataclass(slots=True)
class _Needed:
    """A chunk that versions name."""

    facts: ChunkFacts
    versions: list[str] = field(default_factory=list)
    ranges: set[StateRange] = field(default_factory=set)


def verify_store(
    store: ObjectStore,
    *,
    repair_from: Sequence[ObjectStore] = (),
    on_progress: Callable[[int, int], None] | None = None,
) -> VerifyReport:
    """Check every byte of a store.

    Args:
        store: Which.
        repair_from: Stores to take undamaged copies from; nothing is changed without any.
        on_progress: Called with the number of chunks checked and that of all.

    Raises:
        CheckpointError: If the store can't be listed, or a repair can't be written.
    """
    versions, damages = _check_manifests(store, repair_from)
    needed = _collect_chunks(versions)
    spare = _list_spare(store, needed)
    total, num_bytes = len(needed) + len(spare), 0
    checked = _check_chunks(store, needed, spare)
    for count, (name, read_bytes, problem) in enumerate(checked, start=1):
        num_bytes += read_bytes
        if problem is not None:
            damage = _describe(name, problem, needed)
            damages.append(_repair_chunk(store, repair_from, damage, needed))
        if on_progress is not None:
            on_progress(count, total)
    damages += _check_pointer(store, may_repair=bool(repair_from))
    return VerifyReport(
        num_versions=len(versions),
        num_chunks=total,
        num_bytes=num_bytes,
        damages=tuple(damages),
    )


def _check_manifests(
    store: ObjectStore, repair_from: Sequence[ObjectStore]
) -> tuple[list[Version], list[Damage]]:
    versions: list[Version] = []
    damages: list[Damage] = []
    for name in list_versions(store):
        try:
            versions.append(read_version((store,), name))
            continue
        except CheckpointError as error:
            damage = Damage(name=name, problem=str(error), versions=(name,))
        for other in repair_from:
            with suppress(CheckpointError):
                data = other.get(name)
                manifest = decode_manifest(data, name)
                store.delete(name)
                store.put_if_absent(name, data)
                versions.append(Version(name=name, manifest=manifest))
                damage = replace(damage, is_repaired=True)
                break
        damages.append(damage)
    return versions, damages


def _collect_chunks(versions: Sequence[Version]) -> dict[str, _Needed]:
    needed: dict[str, _Needed] = {}
    for version in versions:
        manifest = version.manifest
        for chunk_id, facts in manifest.chunks.items():
            entry = needed.setdefault(object_name(chunk_id), _Needed(facts))
            entry.versions.append(version.name)
        for piece in manifest.pieces:
            for span in piece.spans:
                needed[object_name(span.chunk_id)].ranges.add(piece.range)
    return needed


def _list_spare(store: ObjectStore, needed: dict[str, _Needed]) -> list[str]:
    found = (stored.name for stored in store.list_objects(OBJECTS))
    return sorted(name for name in found if name not in needed)


def _check_chunks(
    store: ObjectStore, needed: dict[str, _Needed], spare: Sequence[str]
) -> Iterator[tuple[str, int, str | None]]:
    """Give each chunk's name, how many bytes were read, and what is wrong with it."""

    def check(name: str) -> tuple[str, int, str | None]:
        try:
            data = store.get(name)
        except CheckpointError as error:
            return name, 0, str(error)
        chunk_id = name.rpartition("/")[2]
        if name in needed:
            return name, len(data), find_damage(data, chunk_id, needed[name].facts)
        is_sound = name == object_name(chunk_id) and name_chunk(data) == chunk_id
        problem = None if is_sound else "its content does not match its name"
        return name, len(data), problem

    with ThreadPoolExecutor(_NUM_THREADS, "geartrain-verify") as pool:
        yield from pool.map(check, (*needed, *spare))


def _describe(name: str, problem: str, needed: dict[str, _Needed]) -> Damage:
    if name not in needed:
        return Damage(name=name, problem=f"{problem}; no version needs it")
    entry = needed[name]
    return Damage(
        name=name,
        problem=problem,
        versions=tuple(entry.versions),
        ranges=merge_ranges(entry.ranges),
    )


def _repair_chunk(
    store: ObjectStore,
    repair_from: Sequence[ObjectStore],
    damage: Damage,
    needed: dict[str, _Needed],
) -> Damage:
    if not repair_from:
        return damage
    if damage.name not in needed:
        store.delete(damage.name)
        return replace(damage, is_repaired=True)
    chunk_id = damage.name.rpartition("/")[2]
    try:
        data = read_chunk(repair_from, chunk_id, needed[damage.name].facts)
    except CheckpointError as error:
        return replace(damage, problem=f"{damage.problem}; {error}")
    store.delete(damage.name)
    store.put_if_absent(damage.name, data)
    return replace(damage, is_repaired=True)


def _check_pointer(store: ObjectStore, *, may_repair: bool) -> Iterator[Damage]:
    store.sync()  # what was repaired, before a pointer may name it
    names = list_versions(store)
    pointer = store.read_pointer()
    if pointer is None and not names:
        return
    try:
        if pointer is None:
            problem = "it is missing"
        else:
            read_version((store,), pointer)
            return
    except CheckpointError as error:
        problem = str(error)
    damage = Damage(name=POINTER, problem=problem, versions=names)
    latest = None
    if may_repair:
        with suppress(CheckpointError):
            latest = find_latest((store,))
    if latest is not None:
        store.publish_pointer(latest.name)
        damage = replace(damage, is_repaired=True)
    yield damage
