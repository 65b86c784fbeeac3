"""Make a version of a state that was saved elsewhere: a DCP directory, a snapshot."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from blake3 import blake3

from geartrain.checkpoint.chunk_store import FileStore
from geartrain.checkpoint.chunks import ObjectStore
from geartrain.checkpoint.dcp_bridge import import_dcp
from geartrain.checkpoint.local_tier import LocalTier
from geartrain.checkpoint.pieces import StateFacts, assemble_manifest, store_pieces
from geartrain.checkpoint.snapshot import load_snapshot, read_manifest
from geartrain.checkpoint.state_tensors import held_pieces, take_apart
from geartrain.checkpoint.tree import Tree
from geartrain.checkpoint.versions import Version, publish_version
from geartrain.errors import CheckpointError, ConfigError


def read_foreign(path: str | Path) -> tuple[dict[str, Tree], int | None]:
    """Read a state that is no version: a DCP directory or a snapshot of ``save()``.

    Returns:
        Components by name, and the step where the state says it.

    Raises:
        CheckpointError: If it is damaged.
        ConfigError: If it is neither.
    """
    directory = Path(path)
    if (directory / ".metadata").is_file():
        return import_dcp(directory), None
    if (directory / "manifest.json").is_file():
        step = read_manifest(directory).metadata.get("step")
        return load_snapshot(directory), step if isinstance(step, int) else None
    msg = (
        f"{directory} is neither a distributed checkpoint of torch, which has a .metadata, "
        "nor a snapshot, which has a manifest.json; give such a directory"
    )
    raise ConfigError(msg)


def take_in(
    store: ObjectStore,
    components: Mapping[str, Any],  # Any: trees, or objects that have a state
    *,
    step: int,
) -> Version:
    """Write a state as the latest version of a store.

    Args:
        store: Where to.
        components: State dicts by name.
        step: Steps applied.

    Raises:
        CheckpointError: If something can't be kept, or the store fails.
    """
    named = take_apart(components)
    facts = named.facts
    pieces = held_pieces(named.tensors)
    tier = LocalTier(store.label) if isinstance(store, FileStore) else None
    if tier is not None:
        part = tier.write_part(facts, pieces)
    else:
        part = store_pieces(store, facts, pieces)
    # It has no history here; what it holds tells it from any other state of that step.
    digest = blake3("\0".join(sorted(part.chunks)).encode()).hexdigest()
    described = StateFacts(
        step=step,
        lineage=f"imported-{digest[:32]}",
        created_at_s=time.time(),
        tensors=facts,
        structure=named.structure,
    )
    manifest = assemble_manifest(described, [part])
    if tier is not None:
        return tier.publish(manifest)
    name = publish_version(store, manifest)
    if store.read_pointer() != name:
        msg = f"{store.label} holds a version from the future; check the clock, or prune it"
        raise CheckpointError(msg)
    return Version(name=name, manifest=manifest)
