"""What one version of a state consists of: tensors, their pieces, and all the rest.

A manifest is JSON that carries its own digest and is written after everything that it
names. It knows tensors by name and pieces by element range, and neither rank nor device.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec
from blake3 import blake3

from geartrain.checkpoint.chunks import MANIFESTS, ChunkFacts, ChunkSpan
from geartrain.checkpoint.ranges import StateRange, check_tiling
from geartrain.errors import CheckpointError

SCHEMA_VERSION = 1

Json = Any  # what JSON can hold; checked when a manifest is made

ITEM_BYTES = {
    **dict.fromkeys(("bool", "uint8", "int8"), 1),
    **dict.fromkeys(("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2"), 1),
    **dict.fromkeys(("float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2"), 1),
    **dict.fromkeys(("float16", "bfloat16", "int16", "uint16"), 2),
    **dict.fromkeys(("float32", "int32", "uint32", "complex32"), 4),
    **dict.fromkeys(("float64", "int64", "uint64", "complex64"), 8),
    "complex128": 16,
}
"""Size of an element by torch's name of its dtype. Bytes are little-endian."""

_HEADER = (
    '{{"format":"geartrain-state","schema_version":{version},"blake3":"{digest}",'
    '"manifest":'
)
_HEADER_PATTERN = re.compile(
    rb'\{"format":"geartrain-state","schema_version":(\d+),"blake3":"([0-9a-f]{64})",'
    rb'"manifest":'
)
_TAIL = b"}\n"
_NAME = re.compile(rf"{MANIFESTS}(\d{{12}})-([0-9a-f]{{16}})\.json\Z")


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorFacts:
    """A tensor as a whole, whoever holds parts of it."""

    dtype: str
    """Torch's name, such as ``bfloat16``."""
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.dtype not in ITEM_BYTES or any(size < 0 for size in self.shape):
            msg = (
                f"a tensor of dtype {self.dtype!r} and shape {self.shape} can't be kept; "
                f"expected sizes >= 0 and one of {', '.join(ITEM_BYTES)}"
            )
            raise CheckpointError(msg)

    @property
    def item_bytes(self) -> int:
        """Size of an element."""
        return ITEM_BYTES[self.dtype]

    @property
    def num_elements(self) -> int:
        """How many elements it has; 1 where the shape is empty."""
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """Size of all elements."""
        return self.num_elements * self.item_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A range of a tensor, and the bytes of chunks that hold it, one after the other."""

    name: str
    start: int
    stop: int
    spans: tuple[ChunkSpan, ...]

    @property
    def range(self) -> StateRange:
        """The elements that it holds."""
        return StateRange(name=self.name, start=self.start, stop=self.stop)


@dataclass(frozen=True, slots=True, kw_only=True)
class LogSegment:
    """Reduced gradients of steps applied after the state of a manifest.

    Replaying those up to a step gives the state after that step.
    """

    first_step: int
    last_step: int
    lineage: str
    """After the last step."""
    codec: str
    """How the bytes are coded, by the name that the gradient log gives it."""
    spans: tuple[ChunkSpan, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StateManifest:
    """One version of a state."""

    step: int
    """Steps applied."""
    lineage: str
    """Hash over all steps applied; states of one step with different ones differ."""
    created_at_s: float
    kind: Literal["full", "weights"]
    tensors: dict[str, TensorFacts]
    """By name: component, ``/``, place in it, such as ``model/embed.weight``."""
    pieces: tuple[Piece, ...]
    """They tile the tensors."""
    chunks: dict[str, ChunkFacts]
    """Every chunk that a piece or a log segment names, by id."""
    structure: dict[str, Json] = field(default_factory=dict)
    """What each component holds beside its tensors, as ``checkpoint.tree`` writes it."""
    extras: dict[str, Json] = field(default_factory=dict)
    """Position in the data and whatever else the run keeps as JSON."""
    log_segments: tuple[LogSegment, ...] = ()
    plan_fingerprint: str = ""
    config: dict[str, Json] = field(default_factory=dict)
    """The run's settings, to tell drift by name."""
    schema_version: int = SCHEMA_VERSION

    def __post_init__(self) -> None:
        if self.step < 0 or not math.isfinite(self.created_at_s):
            msg = (
                f"step={self.step} and created_at_s={self.created_at_s} belong to no "
                "state; expected step >= 0 and a finite time"
            )
            raise CheckpointError(msg)
        for part in ("structure", "extras", "config"):
            try:
                _check_json(getattr(self, part), part)
            except RecursionError as error:
                msg = f"{part} is nested too deeply for a manifest; flatten it"
                raise CheckpointError(msg) from error
        check_tiling(
            (piece.range for piece in self.pieces),
            {name: facts.num_elements for name, facts in self.tensors.items()},
        )
        _check_spans(self)

    @property
    def num_bytes(self) -> int:
        """Size of all tensors."""
        return sum(facts.num_bytes for facts in self.tensors.values())


def encode_manifest(manifest: StateManifest) -> tuple[str, bytes]:
    """Write a manifest as JSON.

    Returns:
        Its name in a store, which holds its step and digest, and its bytes.

    Raises:
        CheckpointError: If it is nested too deeply.
    """
    body = _encode_body(manifest)
    digest = blake3(body).hexdigest()
    header = _HEADER.format(version=manifest.schema_version, digest=digest)
    return _name(manifest.step, digest), header.encode() + body + _TAIL


def decode_manifest(data: bytes, name: str = "") -> StateManifest:
    """Read a manifest, and check every byte of it.

    Args:
        data: What ``encode_manifest`` wrote.
        name: Its name in the store, which must be its own; not checked where empty.

    Raises:
        CheckpointError: If it is not the manifest of that name, or of another version.
    """
    source = name or "the manifest"
    header = _HEADER_PATTERN.match(data)
    if header is None or not data.endswith(_TAIL):
        msg = f"{source} is damaged or no manifest of geartrain; load another version"
        raise CheckpointError(msg)
    version, digest = int(header[1]), header[2].decode()
    body = data[header.end() : -len(_TAIL)]
    if blake3(body).hexdigest() != digest:
        msg = f"{source} is damaged: its digest differs; load another version"
        raise CheckpointError(msg)
    if version != SCHEMA_VERSION:
        msg = (
            f"{source} has schema_version={version}, expected {SCHEMA_VERSION}; read it "
            "with the geartrain that wrote it"
        )
        raise CheckpointError(msg)
    manifest = _decode_body(body, source)
    if data[: header.end()].decode() != _HEADER.format(version=version, digest=digest) or (
        name and name != _name(manifest.step, digest)
    ):
        msg = f"{source} is not the manifest of that name; load another version"
        raise CheckpointError(msg)
    return manifest


def step_of_name(name: str) -> int | None:
    """Return the step that a manifest's name holds, None for another name.

    >>> step_of_name("manifests/000000001000-0123456789abcdef.json")
    1000
    """
    match = _NAME.match(name)
    return int(match[1]) if match else None


def _name(step: int, digest: str) -> str:
    return f"{MANIFESTS}{step:012d}-{digest[:16]}.json"


def _encode_body(manifest: StateManifest) -> bytes:
    # json and not msgspec: random states hold integers of 128 bits, and text of any kind.
    try:
        text = json.dumps(
            msgspec.to_builtins(manifest), allow_nan=False, separators=(",", ":")
        )
    except RecursionError as error:
        msg = "the state is nested too deeply for a manifest; flatten it"
        raise CheckpointError(msg) from error
    return text.encode()


def _decode_body(body: bytes, source: str) -> StateManifest:
    try:
        manifest = msgspec.convert(json.loads(body), StateManifest)
        is_canonical = _encode_body(manifest) == body
    except (ValueError, RecursionError, CheckpointError) as error:
        msg = f"{source} is not a valid manifest: {error}; load another version"
        raise CheckpointError(msg) from error
    if not is_canonical:  # a name that this version doesn't know, or one given twice
        msg = (
            f"{source} holds something that this geartrain does not know; read it with the "
            "one that wrote it"
        )
        raise CheckpointError(msg)
    return manifest


def _check_json(value: Json, place: str) -> None:
    """Refuse what JSON would drop or change, so that a manifest reads back equal."""
    if value is None or type(value) in (bool, int, str):
        return
    if type(value) is float and math.isfinite(value):
        return
    items: Iterable[tuple[object, Json]]
    if type(value) is list:
        items = enumerate(value)
    elif type(value) is dict and all(type(key) is str for key in value):
        items = value.items()
    else:
        msg = (
            f"{place} is {value!r}, which is not JSON that reads back equal; use string "
            "keys, lists and finite numbers, or put it into a component of the state"
        )
        raise CheckpointError(msg)
    for key, item in items:
        _check_json(item, f"{place}[{key!r}]")


def _check_spans(manifest: StateManifest) -> None:
    named: set[str] = set()
    for piece in manifest.pieces:
        expected = (piece.stop - piece.start) * manifest.tensors[piece.name].item_bytes
        found = sum(span.num_bytes for span in piece.spans)
        if found != expected:
            msg = f"{piece.range} has {found} bytes in chunks, expected {expected}"
            raise CheckpointError(msg)
        _check_bounds(piece.spans, manifest.chunks)
        named.update(span.chunk_id for span in piece.spans)
    for segment in manifest.log_segments:
        _check_bounds(segment.spans, manifest.chunks)
        named.update(span.chunk_id for span in segment.spans)
    if len(named) != len(manifest.chunks):
        spare = sorted(manifest.chunks.keys() - named)
        msg = f"chunk {spare[0]} belongs to nothing in the manifest; leave it out"
        raise CheckpointError(msg)


def _check_bounds(spans: Iterable[ChunkSpan], chunks: Mapping[str, ChunkFacts]) -> None:
    for span in spans:
        facts = chunks.get(span.chunk_id)
        if facts is None or span.stop_byte > facts.num_bytes:
            size = "unknown" if facts is None else f"{facts.num_bytes} bytes long"
            msg = (
                f"chunk {span.chunk_id[:12]} is {size}, but bytes up to {span.stop_byte} "
                "of it are named; write the manifest from what was stored"
            )
            raise CheckpointError(msg)
