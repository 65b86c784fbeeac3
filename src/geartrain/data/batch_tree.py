"""Walk a collated batch: nested tuples, lists, mappings and dataclasses.

A list or tuple without any tensor inside is a column of values, one a sample (that
is what collating strings gives); every other list or tuple is structure.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

import numpy as np
import torch

# A batch and its leaves may be of any type: they are the user's.
Leaf = Any
Batch = Any


def map_leaves(batch: Batch, change: Callable[[Leaf], Leaf]) -> Batch:
    """Rebuild a batch with each leaf changed, in containers of the same types."""
    if is_column(batch):
        return change(batch)
    if isinstance(batch, Mapping):
        return _rebuild_mapping(batch, {k: map_leaves(v, change) for k, v in batch.items()})
    if isinstance(batch, list | tuple):
        return _rebuild_sequence(batch, [map_leaves(item, change) for item in batch])
    if _is_dataclass(batch):
        return _rebuild_dataclass(
            batch, {name: map_leaves(value, change) for name, value in _fields(batch)}
        )
    return change(batch)


def iterate_leaves(batch: Batch, path: str = "batch") -> Iterator[tuple[str, Leaf]]:
    """Yield each leaf with its path, such as ``batch['input_ids']``."""
    if is_column(batch):
        yield path, batch
    elif isinstance(batch, Mapping):
        for key, value in batch.items():
            yield from iterate_leaves(value, f"{path}[{key!r}]")
    elif isinstance(batch, list | tuple):
        for index, value in enumerate(batch):
            yield from iterate_leaves(value, f"{path}[{index}]")
    elif _is_dataclass(batch):
        for name, value in _fields(batch):
            yield from iterate_leaves(value, f"{path}.{name}")
    else:
        yield path, batch


def is_column(node: Batch) -> bool:
    """Say whether this is a list of plain values, one a sample."""
    return isinstance(node, list | tuple) and not _holds_tensor(node)


def _holds_tensor(node: Batch) -> bool:
    if isinstance(node, torch.Tensor | np.ndarray):
        return True
    if isinstance(node, Mapping):
        return any(_holds_tensor(value) for value in node.values())
    if isinstance(node, list | tuple):
        return any(_holds_tensor(value) for value in node)
    if _is_dataclass(node):
        return any(_holds_tensor(value) for _, value in _fields(node))
    return False


def _rebuild_mapping(batch: Mapping[Any, Any], items: dict[Any, Any]) -> Batch:
    if type(batch) is dict:
        return items
    if isinstance(batch, MutableMapping):
        # A copy keeps what a subclass has beside its items (BatchEncoding does).
        clone = copy.copy(batch)
        clone.update(items)
        return clone
    return type(batch)(items)  # type: ignore[call-arg]  # what mappings accept by custom


def _rebuild_sequence(batch: Batch, items: list[Any]) -> Batch:
    if hasattr(batch, "_fields"):  # a named tuple takes its items one by one
        return type(batch)(*items)
    return type(batch)(items)


def _is_dataclass(node: Batch) -> bool:
    return dataclasses.is_dataclass(node) and not isinstance(node, type)


def _fields(node: Batch) -> Iterator[tuple[str, Any]]:
    for field in dataclasses.fields(node):
        yield field.name, getattr(node, field.name)


def _rebuild_dataclass(batch: Batch, values: dict[str, Any]) -> Batch:
    # Neither the constructor nor replace(): fields may be init=False or checked.
    clone = copy.copy(batch)
    for name, value in values.items():
        object.__setattr__(clone, name, value)
    return clone
