"""Bring a version from one tier to the next: its chunks, its manifest, the pointer."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from geartrain.checkpoint.chunks import OBJECTS, ObjectStore, object_name, read_chunk
from geartrain.checkpoint.versions import Version, publish_version, read_version
from geartrain.errors import CheckpointError

_NUM_THREADS = 4
"""Chunks under way at once, so 16 MiB at most; one alone would wait for each answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyReport:
    """What a copy did."""

    name: str
    """Of the version, alike in both stores."""
    num_chunks: int
    num_copied: int
    """The others were there already."""
    copied_bytes: int


def copy_version(
    name: str,
    sources: Sequence[ObjectStore],
    target: ObjectStore,
    *,
    check: Callable[[], None] = lambda: None,
) -> CopyReport:
    """Copy a version; chunks that the target has are not read.

    The state may lie in no memory any more: the next tier is filled from this one, one
    chunk at a time. Safe to repeat after any error; what was copied stays.

    Args:
        name: Of the version: ``manifests/...``.
        sources: Where to read, each read checked; the preferred one first.
        target: Where to.
        check: Called before each chunk; raises to end the copy.

    Returns:
        How much was copied.

    Raises:
        CheckpointError: If a chunk is undamaged in no source, or the target fails. The
            target's pointer is as it was then.
    """
    version = read_version(sources, name)
    sizes = {found.name: found.num_bytes for found in target.list_objects(OBJECTS)}
    copied_bytes, num_copied = _copy_chunks(version, sources, target, sizes, check)
    # A collector of garbage may have taken an old chunk that was there: look again.
    present = {found.name for found in target.list_objects(OBJECTS)}
    lost = [one for one in version.manifest.chunks if object_name(one) not in present]
    if lost:
        more_bytes, more = _copy_chunks(version, sources, target, {}, check, only=lost)
        copied_bytes, num_copied = copied_bytes + more_bytes, num_copied + more
    check()
    written = publish_version(target, version.manifest)
    if written != name:
        msg = f"{name} was read as {written}; verify {sources[0].label}"
        raise CheckpointError(msg)
    return CopyReport(
        name=name,
        num_chunks=len(version.manifest.chunks),
        num_copied=num_copied,
        copied_bytes=copied_bytes,
    )


def _copy_chunks(  # noqa: PLR0913 - one loop, of which all is needed
    version: Version,
    sources: Sequence[ObjectStore],
    target: ObjectStore,
    sizes: dict[str, int],
    check: Callable[[], None],
    *,
    only: Sequence[str] | None = None,
) -> tuple[int, int]:
    """Return how many bytes were put, and in how many chunks."""
    chunks = version.manifest.chunks

    def copy(chunk_id: str) -> int:
        check()
        data = read_chunk(sources, chunk_id, chunks[chunk_id])
        target.put_if_absent(object_name(chunk_id), data)
        return len(data)

    missing = [
        chunk_id
        for chunk_id in (chunks if only is None else only)
        if sizes.get(object_name(chunk_id)) != chunks[chunk_id].num_bytes
    ]
    running: deque[Future[int]] = deque()
    copied_bytes = 0
    with ThreadPoolExecutor(_NUM_THREADS, "geartrain-copy") as pool:
        try:
            for chunk_id in missing:
                if len(running) >= 2 * _NUM_THREADS:
                    copied_bytes += running.popleft().result()
                running.append(pool.submit(copy, chunk_id))
            copied_bytes += sum(future.result() for future in running)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    return copied_bytes, len(missing)
