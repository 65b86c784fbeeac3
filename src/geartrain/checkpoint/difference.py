"""How two versions differ: tensors by value and byte, settings by name."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from geartrain.checkpoint.chunks import ObjectStore
from geartrain.checkpoint.drift import Drift, find_drift
from geartrain.checkpoint.manifest import Json, Piece, StateManifest, TensorFacts
from geartrain.checkpoint.pieces import StateReader
from geartrain.checkpoint.ranges import StateRange
from geartrain.checkpoint.reshard import load_shard

_BLOCK_ELEMENTS = 2**22
"""Compared at once, so that a large tensor needs little memory."""
_LINEAGE_NAME = "training.lineage"


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredVersion:
    """A version, and the stores that its bytes are read from."""

    stores: tuple[ObjectStore, ...]
    manifest: StateManifest


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorDifference:
    """How one tensor differs."""

    name: str
    what: str
    """``values``, or what keeps them from being compared: ``dtype float32 -> ...``."""
    max_abs_difference: float | None = None
    """Largest ``|a - b|``; NaN where one of them is not a number and the other is."""
    changed_bytes: int = 0
    num_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StateDifference:
    """How two versions differ."""

    tensors: tuple[TensorDifference, ...]
    """Those that differ at all."""
    num_equal: int
    config: tuple[Drift, ...]
    """Settings of the run."""
    values: tuple[Drift, ...]
    """Numbers beside the tensors, such as a learning rate, and the position in the data."""
    lineages: tuple[str, str] = ("", "")
    """Names of the histories that led to them; empty where they have none."""

    @property
    def has_same_history(self) -> bool:
        """Whether the same steps led to both, as far as that is known."""
        return self.lineages[0] == self.lineages[1] != ""

    @property
    def is_equal(self) -> bool:
        """Whether both train on alike."""
        return not (self.tensors or self.values)


def compare_versions(
    left: StoredVersion,
    right: StoredVersion,
    *,
    on_progress: Callable[[int, int], None] | None = None,
) -> StateDifference:
    """Compare two versions; what they share by content is not read.

    Args:
        left: The one before.
        right: The one after.
        on_progress: Called with the number of tensors compared and that of all.

    Raises:
        CheckpointError: If bytes that must be read are undamaged in no store.
    """
    ours, theirs = left.manifest, right.manifest
    names = [*ours.tensors, *(name for name in theirs.tensors if name not in ours.tensors)]
    found = []
    comparer = _Comparer(left, right)
    for count, name in enumerate(names, start=1):
        difference = comparer.compare(name)
        if difference is not None:
            found.append(difference)
        if on_progress is not None:
            on_progress(count, len(names))
    drifts = (
        *find_drift(_plain_values(ours.structure), _plain_values(theirs.structure)),
        *find_drift({"extras": ours.extras}, {"extras": theirs.extras}),
    )
    return StateDifference(
        tensors=tuple(found),
        num_equal=len(names) - len(found),
        config=find_drift(ours.config, theirs.config),
        # Of the history there is more to say than that it differs.
        values=tuple(drift for drift in drifts if drift.name != _LINEAGE_NAME),
        lineages=(ours.lineage, theirs.lineage),
    )


def _plain_values(node: Json) -> Json:
    """Return a structure's values as nested dicts and lists; tensors are compared apart."""
    if not isinstance(node, dict):
        return list(map(_plain_values, node)) if isinstance(node, list) else node
    kind = node.get("$")
    if kind is None:
        return {key: _plain_values(value) for key, value in node.items()}
    if kind in {"tuple", "size"}:
        return _plain_values(node["items"])
    if "items" in node:
        return {_key(key): _plain_values(value) for key, value in node["items"]}
    return "tensor" if kind in {"tensor", "array"} else node.get("hex", node.get("name"))


def _key(key: Json) -> str:
    return str(_plain_values(key))


class _Comparer:
    def __init__(self, left: StoredVersion, right: StoredVersion) -> None:
        self._sides = (left, right)
        self._readers = [StateReader(side.stores, side.manifest) for side in self._sides]
        self._spans = [_spans_by_name(side.manifest.pieces) for side in self._sides]

    def compare(self, name: str) -> TensorDifference | None:
        """Return how a tensor differs, None where it doesn't."""
        ours, theirs = (side.manifest.tensors.get(name) for side in self._sides)
        if ours is None or theirs is None:
            what = "only in the second" if ours is None else "only in the first"
            return TensorDifference(name=name, what=what)
        if ours != theirs:
            return TensorDifference(name=name, what=_describe(ours, theirs))
        if self._spans[0].get(name) == self._spans[1].get(name):
            return None  # the same bytes of the same chunks
        return self._compare_values(name, ours)

    def _compare_values(self, name: str, facts: TensorFacts) -> TensorDifference | None:
        largest, changed_bytes = 0.0, 0
        for start in range(0, facts.num_elements, _BLOCK_ELEMENTS):
            stop = min(start + _BLOCK_ELEMENTS, facts.num_elements)
            part = StateRange(name=name, start=start, stop=stop)
            one, other = (
                load_shard(reader, side.manifest, [part])[part]
                for reader, side in zip(self._readers, self._sides, strict=True)
            )
            changed_bytes += int((one.view(torch.uint8) != other.view(torch.uint8)).sum())
            largest = _larger(largest, _max_abs_difference(one, other))
        if not changed_bytes:
            return None
        return TensorDifference(
            name=name,
            what="values",
            max_abs_difference=largest,
            changed_bytes=changed_bytes,
            num_bytes=facts.num_bytes,
        )


def _max_abs_difference(one: torch.Tensor, other: torch.Tensor) -> float:
    kind = torch.complex128 if one.is_complex() else torch.float64
    left, right = one.to(kind), other.to(kind)
    # Infinities of one sign, and NaN in both, are no difference in value.
    same = (left == right) | (left.isnan() & right.isnan())
    return float((left - right).abs().masked_fill(same, 0.0).max())


def _larger(one: float, other: float) -> float:
    return max(one, other) if not (math.isnan(one) or math.isnan(other)) else math.nan


def _describe(ours: TensorFacts, theirs: TensorFacts) -> str:
    if ours.dtype != theirs.dtype:
        return f"dtype {ours.dtype} -> {theirs.dtype}"
    return f"shape {list(ours.shape)} -> {list(theirs.shape)}"


def _spans_by_name(pieces: Sequence[Piece]) -> dict[str, list[object]]:
    found: dict[str, list[object]] = {}
    for piece in sorted(pieces, key=lambda one: one.range):
        found.setdefault(piece.name, []).append((piece.start, piece.stop, piece.spans))
    return found
