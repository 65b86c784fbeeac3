"""A whole state as a directory: one safetensors file a component, and a manifest.

``model.safetensors`` is an ordinary weights file::

    weights = safetensors.torch.load_file("snapshot/model.safetensors")
    model.load_state_dict(weights)
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch

from geartrain.checkpoint.directory import current_directory, replace_directory
from geartrain.checkpoint.tree import Tree
from geartrain.checkpoint.tree_file import (
    TreeLayout,
    plan_layout,
    tree_from_bytes,
    write_layout,
)
from geartrain.errors import CheckpointError
from geartrain.units import format_bytes

SCHEMA_VERSION = 1
MANIFEST_NAME = "manifest.json"

_FORMAT = "geartrain-snapshot"
_SUFFIX = ".safetensors"
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]*\Z")
_CHUNK_BYTES = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotFile:
    """One file of a snapshot."""

    path: str
    """Relative to the snapshot."""
    num_bytes: int
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotManifest:
    """What a snapshot holds."""

    files: tuple[SnapshotFile, ...]
    created_at_s: float
    metadata: dict[str, Any]  # Any: JSON of the caller's
    schema_version: int = SCHEMA_VERSION


@dataclass(frozen=True, slots=True, kw_only=True)
class _ManifestFile:
    format: str
    schema_version: int
    sha256: str
    """Of the manifest below, encoded without white space."""
    manifest: msgspec.Raw


def save_snapshot(
    path: str | Path,
    components: Mapping[str, Tree],
    *,
    metadata: Mapping[str, Any] | None = None,  # Any: JSON of the caller's
) -> SnapshotManifest:
    """Write a state; what was at the path before stays until this one is complete.

    Args:
        path: The directory to make, or an older snapshot to replace.
        components: State dicts by name, such as ``{"model": ..., "optimizer": ...}``.
        metadata: JSON to keep beside them, such as the step.

    Raises:
        CheckpointError: If something in a component cannot be kept, the path holds
            other files, or the disk refuses. Nothing is changed then.
    """
    target = Path(os.path.realpath(path))  # a link stays a link
    layouts = _plan_files(components)
    notes = _check_metadata(metadata or {})
    try:
        _check_replaceable(target)
        with replace_directory(target) as draft:
            files = tuple(_write_file(draft, name, plan) for name, plan in layouts.items())
            manifest = SnapshotManifest(
                files=files, created_at_s=time.time(), metadata=notes
            )
            _write_durably(draft / MANIFEST_NAME, _encode_manifest(manifest))
    except OSError as error:
        raise _describe_write_error(target, layouts, error) from error
    return manifest


def load_snapshot(
    path: str | Path, *, map_location: str | torch.device | None = None
) -> dict[str, Tree]:
    """Read a state back, bit for bit, after checking every byte of it.

    Args:
        path: The directory.
        map_location: Where to put the tensors; the host where None.

    Returns:
        The components by name. Tensors that were one when saved are one again.

    Raises:
        CheckpointError: If it is not a snapshot, or not what was saved.
    """
    manifest = verify_snapshot(path)
    directory = _locate(path)
    return {
        file.path.removesuffix(_SUFFIX): _read_file(
            directory / file.path, file, map_location
        )
        for file in manifest.files
    }


def verify_snapshot(path: str | Path) -> SnapshotManifest:
    """Check every byte of a snapshot against its manifest.

    Raises:
        CheckpointError: If it is not a snapshot, or not what was saved.
    """
    directory = _locate(path)
    manifest = read_manifest(path)
    for file in manifest.files:
        try:
            num_bytes, digest = _digest(directory / file.path)
        except OSError as error:
            msg = (
                f"{directory / file.path} cannot be read ({error.strerror}); "
                "load another snapshot"
            )
            raise CheckpointError(msg) from error
        if (num_bytes, digest) != (file.num_bytes, file.sha256):
            msg = (
                f"{directory / file.path} was changed or damaged since it was saved: it "
                f"has {num_bytes} bytes with digest {digest[:12]}, expected "
                f"{file.num_bytes} bytes with {file.sha256[:12]}; load another snapshot"
            )
            raise CheckpointError(msg)
    return manifest


def read_manifest(path: str | Path) -> SnapshotManifest:
    """Read what a snapshot holds, without reading its tensors.

    Raises:
        CheckpointError: If it is not a snapshot, or its manifest is damaged.
    """
    source = _locate(path) / MANIFEST_NAME
    try:
        data = source.read_bytes()
    except OSError as error:
        msg = (
            f"{path} is not a snapshot: {source} cannot be read ({error.strerror}); "
            "give the directory that save() was given"
        )
        raise CheckpointError(msg) from error
    try:
        document = msgspec.json.decode(data, type=_ManifestFile)
        if document.format == _FORMAT and document.schema_version != SCHEMA_VERSION:
            msg = (
                f"{source} has schema_version={document.schema_version}, expected "
                f"{SCHEMA_VERSION}; load it with the geartrain that saved it"
            )
            raise CheckpointError(msg)
        manifest = msgspec.json.decode(document.manifest, type=SnapshotManifest)
        # The text itself, not what was decoded: that has no place for unknown keys.
        text = msgspec.json.format(bytes(document.manifest), indent=-1)
        digest = hashlib.sha256(text).hexdigest()
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        msg = f"{source} is damaged or no manifest ({error}); load another snapshot"
        raise CheckpointError(msg) from error
    if document.format != _FORMAT or document.sha256 != digest:
        msg = f"{source} is damaged or no manifest; load another snapshot"
        raise CheckpointError(msg)
    return manifest


def _locate(path: str | Path) -> Path:
    return current_directory(Path(os.path.realpath(path)))


def _plan_files(components: Mapping[str, Tree]) -> dict[str, TreeLayout]:
    for name in components:
        if not _NAME.match(name):
            msg = (
                f"component name {name!r} must consist of letters, digits, _ and -; "
                "it becomes a file name"
            )
            raise CheckpointError(msg)
    return {
        name: plan_layout(tree, label=name, repeat_aliases=True)
        for name, tree in components.items()
    }


def _check_metadata(metadata: Mapping[str, Any]) -> dict[str, Any]:  # Any: JSON
    try:
        plain: dict[str, Any] = json.loads(json.dumps(dict(metadata), allow_nan=False))
    except (TypeError, ValueError) as error:
        msg = f"snapshot metadata is not JSON ({error}); put it into a component"
        raise CheckpointError(msg) from error
    if plain != metadata:
        msg = (
            f"snapshot metadata {dict(metadata)!r} would read back as {plain!r}; use "
            "string keys and lists, or put it into a component"
        )
        raise CheckpointError(msg)
    return plain


def _check_replaceable(target: Path) -> None:
    if not target.exists() or (target / MANIFEST_NAME).is_file():
        return
    if not target.is_dir() or any(target.iterdir()):
        msg = (
            f"{target} holds something other than a snapshot and is left alone; save to "
            "a new path, or remove it first"
        )
        raise CheckpointError(msg)


def _write_file(draft: Path, name: str, layout: TreeLayout) -> SnapshotFile:
    digest = hashlib.sha256()
    path = draft / f"{name}{_SUFFIX}"
    with path.open("wb", buffering=0) as stream:

        def write(piece: memoryview) -> None:
            digest.update(piece)
            written = 0
            while written < piece.nbytes:  # raw writes may be short
                written += stream.write(piece[written:])

        write_layout(layout, write)
        os.fsync(stream.fileno())
    return SnapshotFile(
        path=path.name, num_bytes=layout.num_bytes, sha256=digest.hexdigest()
    )


def _write_durably(path: Path, data: bytes) -> None:
    with path.open("wb") as stream:
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())


def _encode_manifest(manifest: SnapshotManifest) -> bytes:
    encoded = msgspec.json.encode(manifest)
    document = _ManifestFile(
        format=_FORMAT,
        schema_version=SCHEMA_VERSION,
        sha256=hashlib.sha256(encoded).hexdigest(),
        manifest=msgspec.Raw(encoded),
    )
    return msgspec.json.format(msgspec.json.encode(document), indent=2) + b"\n"


def _digest(path: Path) -> tuple[int, str]:
    digest, num_bytes = hashlib.sha256(), 0
    with path.open("rb") as stream:
        while chunk := stream.read(_CHUNK_BYTES):
            digest.update(chunk)
            num_bytes += len(chunk)
    return num_bytes, digest.hexdigest()


def _read_file(
    path: Path, file: SnapshotFile, map_location: str | torch.device | None
) -> Tree:
    # Mapped, so that only the tensor being copied takes host memory beside the result.
    block = torch.from_file(str(path), size=file.num_bytes, dtype=torch.uint8)
    return tree_from_bytes(block, label=str(path), map_location=map_location)


def _describe_write_error(
    target: Path, layouts: Mapping[str, TreeLayout], error: OSError
) -> CheckpointError:
    needed = format_bytes(sum(layout.num_bytes for layout in layouts.values()))
    parent = target.parent
    free = format_bytes(shutil.disk_usage(parent).free) if parent.is_dir() else "unknown"
    reason = f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    msg = (
        f"cannot save a snapshot to {target}: {reason} (needs {needed}, free "
        f"{free}); make room or save elsewhere; a snapshot saved there before is intact"
    )
    return CheckpointError(msg)
