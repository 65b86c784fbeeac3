"""Tier 3: objects in whatever fsspec reaches, such as S3, under the same names.

Chunks and manifests are put if absent and never changed. The pointer ``LATEST`` alone
is replaced, last, in one step, and by condition where the store has that: of two writers
the one with the younger version wins, however their requests interleave.

A ``file://`` URL or a plain path is a directory of tier 2's kind, which flushes to the
disk as fsspec does not.
"""

from __future__ import annotations

import contextlib
import logging
import uuid
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

from geartrain.checkpoint.chunk_store import FileStore
from geartrain.checkpoint.chunks import POINTER, ObjectStore, StoredObject
from geartrain.checkpoint.fsspec_access import (
    ability_of,
    connect,
    is_failed_condition,
    modified_at_s,
    without_secrets,
)
from geartrain.checkpoint.manifest import decode_manifest
from geartrain.errors import CheckpointError

logger = logging.getLogger(__name__)

T = TypeVar("T")

_MAX_POINTER_BYTES = 4096
_POINTER_TRIES = 5


def open_store(
    url: str,
    options: Mapping[str, Any] | None = None,  # Any: whatever fsspec's class takes
) -> ObjectStore:
    """Open a store by its path or URL; nothing is written yet.

    Args:
        url: A path, ``file:///...``, ``s3://bucket/prefix`` or another that fsspec knows.
        options: For fsspec's file system, such as ``endpoint_url``. Give secrets in the
            environment instead, where the store's own tools look for them.

    Raises:
        ConfigError: If the URL is of no known kind, or what it needs isn't installed.
    """
    protocol, separator, rest = url.partition("://")
    if not separator:
        return FileStore(url)
    if protocol in {"file", "local"}:
        return FileStore(rest)
    return DurableStore(url, options)


class DurableStore:
    """A place that fsspec reaches, as a store of objects.

    Args:
        url: Such as ``s3://bucket/prefix``.
        options: For fsspec's file system.

    Raises:
        ConfigError: If the URL is of no known kind, or what it needs isn't installed.
    """

    def __init__(
        self,
        url: str,
        options: Mapping[str, Any] | None = None,  # Any: see open_store
    ) -> None:
        self._label = without_secrets(url)
        self._protocol = url.partition("://")[0]
        self._ability = ability_of(self._protocol)
        self._files, self._root = connect(url, dict(options or {}), self._label)

    @property
    def label(self) -> str:
        """The URL, without user, password and query."""
        return self._label

    def put_if_absent(self, name: str, data: bytes | memoryview) -> bool:
        """Write an object whole or not at all; False where it was there already.

        One that was there with another size is what a store without whole puts may leave
        of a cut-off one: it is no object of that name and is replaced.

        Raises:
            CheckpointError: If the store fails.
        """
        path = self._locate(name)
        size = self._size(name)
        if size == len(data):
            return False
        if size is not None:
            logger.warning("%s/%s is damaged and is written anew", self.label, name)
            self.delete(name)

        def create() -> bool:
            try:
                self._put(path, bytes(data))
            except FileExistsError:  # another writer was faster, with the same bytes
                return False
            return True

        return self._ask("write", name, create)

    def get(self, name: str) -> bytes:
        """Read an object.

        Raises:
            CheckpointError: If there is none, or the store fails.
        """
        path = self._locate(name)
        return bytes(self._ask("read", name, lambda: self._files.cat_file(path)))

    def has(self, name: str) -> bool:
        """Say whether there is an object of that name.

        Raises:
            CheckpointError: If the store does not say.
        """
        return self._size(name) is not None

    def list_objects(self, prefix: str) -> Iterator[StoredObject]:
        """List the objects below a folder, such as ``objects/``.

        Raises:
            CheckpointError: If the store fails; never is part taken for all.
        """
        top = self._locate(prefix.rstrip("/"))
        entries = self._ask("list", prefix, lambda: list(self._walk(top)))
        for entry in entries:
            name = _tidy(entry["name"]).removeprefix(_tidy(self._root)).lstrip("/")
            yield StoredObject(
                name=name,
                num_bytes=int(entry["size"]),
                modified_at_s=modified_at_s(entry),
            )

    def delete(self, name: str) -> None:
        """Remove an object, if it is there.

        Raises:
            CheckpointError: If the store fails.
        """
        path = self._locate(name)

        def remove() -> None:
            with contextlib.suppress(FileNotFoundError):
                self._files.rm_file(path)

        self._ask("remove", name, remove)

    def sync(self) -> None:
        """Do nothing: a put that has returned is durable in such stores."""

    def publish_pointer(self, manifest_name: str) -> None:
        """Replace ``LATEST`` in one step, unless it names a younger version by now.

        The manifest is read back first: what can't be read is not pointed at.

        Raises:
            CheckpointError: If the store fails; the pointer is as it was then.
        """
        created_at_s = decode_manifest(self.get(manifest_name), manifest_name).created_at_s
        text = f"{manifest_name}\n".encode()
        for _ in range(_POINTER_TRIES):
            tag, current = self._read_tagged_pointer()
            if current == manifest_name:
                return
            if current is not None and self._is_younger(current, created_at_s):
                logger.warning(
                    "%s/%s names %s, which is younger than %s, and stays",
                    *(self.label, POINTER, current, manifest_name),
                )
                return
            if self._replace_pointer(text, tag, is_absent=current is None):
                return
        msg = (
            f"{self.label}/{POINTER} was changed by others {_POINTER_TRIES} times; "
            "give each run a place of its own"
        )
        raise CheckpointError(msg)

    def read_pointer(self) -> str | None:
        """Return what ``LATEST`` holds, None without one.

        Raises:
            CheckpointError: If the store fails.
        """
        return self._read_tagged_pointer()[1]

    def _locate(self, name: str) -> str:
        # Names come out of manifests, which others may have written.
        if not name or name.startswith("/") or ".." in name.split("/"):
            msg = f"{name!r} is no name of an object in {self.label}; give a relative one"
            raise CheckpointError(msg)
        return f"{self._root.rstrip('/')}/{name}"

    def _size(self, name: str) -> int | None:
        # Not fsspec's exists(), which takes a store that fails for an empty one.
        path = self._locate(name)

        def look() -> int | None:
            try:
                return int(self._fresh_info(path)["size"])
            except FileNotFoundError:
                return None

        return self._ask("look up", name, look)

    def _fresh_info(self, path: str) -> dict[str, Any]:  # Any: fsspec's own
        self._files.invalidate_cache(path)
        found: dict[str, Any] = self._files.info(path)
        return found

    def _put(self, path: str, data: bytes) -> None:
        if self._ability.has_create:
            self._files.pipe_file(path, data, mode="create")
            return
        if self._ability.puts_whole:
            self._files.pipe_file(path, data)
            return
        # Put beside its place and moved there, which such stores do in one step or by a
        # copy; readers check sizes, sums and names in any case.
        self._files.makedirs(self._files._parent(path), exist_ok=True)  # noqa: SLF001 - fsspec's own way to a parent
        draft = f"{path}.{uuid.uuid4().hex}.draft"
        try:
            self._files.pipe_file(draft, data)
            self._files.mv(draft, path)
        except BaseException:
            with contextlib.suppress(Exception):  # what matters is the first error
                self._files.rm_file(draft)
            raise

    def _walk(self, top: str) -> Iterator[dict[str, Any]]:  # Any: fsspec's own
        """List files below a place. Unlike fsspec's walk it never passes over an error."""
        self._files.invalidate_cache()
        if self._ability.is_flat:
            try:
                found = self._files.find(top, detail=True)
            except FileNotFoundError:
                return
            yield from (one for one in found.values() if one["type"] == "file")
            return
        try:
            entries = self._files.ls(top, detail=True)
        except FileNotFoundError:
            return
        for entry in entries:
            if entry["type"] == "directory":
                yield from self._walk(entry["name"])
            elif not entry["name"].endswith(".draft"):
                yield entry

    def _read_tagged_pointer(self) -> tuple[str | None, str | None]:
        """Return the store's tag of the pointer's content, and the content."""
        path = self._locate(POINTER)

        def read() -> tuple[str | None, str | None]:
            try:
                # The tag first: if it changes in between, the condition fails.
                tag = self._fresh_info(path).get("ETag")
                data = self._files.cat_file(path, end=_MAX_POINTER_BYTES)
            except FileNotFoundError:
                return None, None
            return tag, data.decode(errors="replace").removesuffix("\n")

        return self._ask("read", POINTER, read)

    def _is_younger(self, manifest_name: str, than_at_s: float) -> bool:
        """Whether a named version is younger; one that is missing or damaged is not."""
        try:
            if not manifest_name or not self.has(manifest_name):
                return False
            data = self.get(manifest_name)
            return decode_manifest(data, manifest_name).created_at_s > than_at_s
        except CheckpointError:
            return False

    def _replace_pointer(self, text: bytes, tag: str | None, *, is_absent: bool) -> bool:
        """Replace it if it is as it was read; False where others were faster."""
        path = self._locate(POINTER)

        def replace() -> bool:
            try:
                if is_absent and self._ability.has_create:
                    self._files.pipe_file(path, text, mode="create")
                elif tag is not None and self._ability.has_match:
                    self._files.pipe_file(path, text, IfMatch=tag)
                elif self._ability.puts_whole:
                    self._files.pipe_file(path, text)
                else:
                    self._put(path, text)
            except FileExistsError:
                return False
            except OSError as error:
                if is_failed_condition(error):
                    return False
                raise
            return True

        return self._ask("write", POINTER, replace)

    def _ask(self, doing: str, name: str, call: Callable[[], T]) -> T:
        try:
            return call()
        except CheckpointError:
            raise
        except Exception as error:
            # Each store has exceptions of its own, which have no class in common.
            reason = str(error) or type(error).__name__
            if isinstance(error, FileNotFoundError):
                reason = "it is not there"
            msg = (
                f"cannot {doing} {name} in {self.label}: {reason}; see that the store is "
                "there, not full, and lets you in; versions saved before are as they were"
            )
            raise CheckpointError(msg) from error


def _tidy(path: str) -> str:
    return path.strip("/")
