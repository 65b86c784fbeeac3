"""A whole state in one call each way, for whoever holds all of it."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from geartrain.checkpoint.chunk_store import FileStore
from geartrain.checkpoint.chunks import ObjectStore
from geartrain.checkpoint.local_tier import LocalTier
from geartrain.checkpoint.manifest import Json
from geartrain.checkpoint.pieces import StateFacts, StateReader
from geartrain.checkpoint.state_tensors import held_pieces, load_components, take_apart
from geartrain.checkpoint.tree import Tree
from geartrain.checkpoint.versions import Version, find_latest
from geartrain.errors import CheckpointError


def save_state(
    tier: LocalTier,
    objects: Mapping[str, Any],  # Any: state dicts, and objects that have one
    *,
    step: int,
    lineage: str = "",
    extras: Mapping[str, Json] | None = None,
) -> Version:
    """Write the state of all objects as the latest version.

    Args:
        tier: Where to.
        objects: By name, such as ``{"model": model, "optimizer": optimizer}``. A version of
            ``model`` alone is of the kind ``weights``.
        step: Steps applied.
        lineage: Hash over them, where there is one.
        extras: JSON to keep beside them, such as the position in the data.

    Raises:
        CheckpointError: If something can't be kept, or the disk refuses. The versions
            before are as they were.
    """
    named = take_apart(objects)
    facts = StateFacts(
        step=step,
        lineage=lineage,
        created_at_s=time.time(),
        kind="weights" if set(objects) == {"model"} else "full",
        tensors=named.facts,
        structure=named.structure,
        extras=dict(extras or {}),
    )
    return tier.save(facts, held_pieces(named.tensors))


def load_state(
    place: str | Path | Sequence[ObjectStore],
    components: Iterable[str] | None = None,
    *,
    map_location: str | torch.device | None = None,
) -> dict[str, Tree]:
    """Read the version that was saved last, bit for bit.

    Args:
        place: A directory, or stores of which the first that is undamaged serves.
        components: Which objects' states; all where None.
        map_location: Where to put the tensors; the host where None.

    Returns:
        State dicts by name.

    Raises:
        CheckpointError: If there is no version, none is undamaged, or it lacks a component.
    """
    stores: Sequence[ObjectStore]
    stores = (FileStore(place),) if isinstance(place, str | Path) else tuple(place)
    latest = find_latest(stores)
    if latest is None:
        where = ", ".join(store.label for store in stores)
        msg = f"there is no version in {where}; give the directory that was saved to"
        raise CheckpointError(msg)
    return load_components(
        StateReader(stores, latest.manifest),
        latest.manifest,
        components,
        map_location=map_location,
    )
