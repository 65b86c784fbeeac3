"""The reduced gradients that were applied, step by step, coded without loss.

What is logged is the decoded message that all members applied, so that replaying it is
optimizer steps only and gives the same bits. Two things about such messages are used: the
bytes with sign and exponent repeat (byte planes, the compressible ones through
Zstandard), and what came through an 8-bit exchange takes 256 values a row (a scale, a
minimum and a byte a value, kept only where that gives the same bits back). Torch is not
imported: the agent codes, not the trainer.

A coded step is a length (4 bytes, little-endian), JSON of that length, and the blocks.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec
import numpy as np
import zstandard

from geartrain.checkpoint.manifest import ITEM_BYTES
from geartrain.checkpoint.ranges import StateRange
from geartrain.errors import CheckpointError

CODEC_NAME = "geartrain-log-1"
"""What a manifest's log segments call this format."""

ROW_ELEMENTS = 1024
"""Of an 8-bit exchange's rows, which begin where a bucket does."""

_LENGTH = struct.Struct("<I")
_LEVEL = 1  # higher ones gain nothing on these bytes: measured 0.36 to 0.40 a byte
_SAMPLE_BYTES = 1 << 16
_WORTH_IT = 0.95
_FIELDS_BYTES = 8
_MAX_CODE = 255
_SCALE_BITS = np.uint32(0xFFFFFF00)  # an 8-bit exchange rounds its scales to 16 bits

Array = np.ndarray[Any, np.dtype[Any]]  # Any: of bytes, words or floats
Json = Any  # what JSON can hold


class _Slice(Protocol):
    name: str
    start: int
    stop: int
    dtype: str
    offset: int
    num_bytes: int


class Slot(Protocol):
    """A step as the trainer has laid it out in memory."""

    @property
    def step(self) -> int:
        """After it was applied."""

    @property
    def previous_lineage(self) -> str:
        """Before it was."""

    @property
    def lineage(self) -> str:
        """After it was."""

    @property
    def update(self) -> dict[str, Json]:
        """How the gradient was applied; see ``replay``."""

    @property
    def parts(self) -> Any:  # Any: a sequence of _Slice, which tuples of structs are
        """What lies where in the slot."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientPart:
    """Part of one parameter's reduced gradient."""

    range: StateRange
    dtype: str
    """Torch's name."""
    data: bytes
    """Little-endian."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedStep:
    """One step, decoded."""

    step: int
    previous_lineage: str
    lineage: str
    update: dict[str, Json]
    parts: tuple[GradientPart, ...]


class _Block(msgspec.Struct, array_like=True, frozen=True):
    """Neighbouring parts of one dtype, coded together."""

    dtype: str
    coding: str
    sizes: tuple[int, ...]
    """Bytes of each plane as stored; equal to the plane's where it is not compressed."""
    parts: tuple[tuple[str, int, int], ...]


class _Header(msgspec.Struct, frozen=True):
    step: int
    previous_lineage: str
    lineage: str
    update: dict[str, Json]
    blocks: tuple[_Block, ...]


def encode_slot(slot: Slot, view: memoryview, *, compress: bool = True) -> bytes:
    """Code a step.

    Args:
        slot: What it is and what lies where.
        view: The bytes, format ``B``.
        compress: Take the time; else the bytes stay as they are.

    Raises:
        CheckpointError: If a part does not lie in the view, or has another size.
    """
    blocks, payload = [], []
    for parts in _neighbours(slot.parts):
        for part in parts:
            _check(part, len(view))
        first, last = parts[0], parts[-1]
        data = np.frombuffer(view, np.uint8)[first.offset : last.offset + last.num_bytes]
        coding, planes = ("raw", [data])
        if compress and data.size:
            coding, planes = _code(data, first.dtype)
        stored = [_squeeze(plane) if compress else plane.tobytes() for plane in planes]
        payload += stored
        blocks.append(
            _Block(
                first.dtype,
                coding,
                tuple(len(piece) for piece in stored),
                tuple((part.name, part.start, part.stop) for part in parts),
            )
        )
    header = _Header(
        step=slot.step,
        previous_lineage=slot.previous_lineage,
        lineage=slot.lineage,
        update=slot.update,
        blocks=tuple(blocks),
    )
    text = json.dumps(msgspec.to_builtins(header), separators=(",", ":")).encode()
    return b"".join((_LENGTH.pack(len(text)), text, *payload))


def decode_step(data: bytes) -> LoggedStep:
    """Read a coded step.

    Raises:
        CheckpointError: If it is none.
    """
    try:
        (length,) = _LENGTH.unpack_from(data)
        text = data[_LENGTH.size : _LENGTH.size + length]
        header = msgspec.convert(json.loads(text), _Header)
        view = memoryview(data)[_LENGTH.size + length :]
        parts: list[GradientPart] = []
        for block in header.blocks:
            size = sum(block.sizes)
            parts += _decode_block(block, view[:size])
            view = view[size:]
        if view:
            raise ValueError(f"{len(view)} bytes too many")  # noqa: EM102, TRY003
    except (ValueError, KeyError, struct.error, zstandard.ZstdError) as error:
        msg = f"a step of the gradient log can't be read ({error}); ask another agent"
        raise CheckpointError(msg) from error
    return LoggedStep(
        step=header.step,
        previous_lineage=header.previous_lineage,
        lineage=header.lineage,
        update=header.update,
        parts=tuple(parts),
    )


def _neighbours(parts: Any) -> Iterator[list[_Slice]]:  # Any: see Slot
    """Group parts that lie side by side: a plane of many small ones codes better."""
    group: list[_Slice] = []
    for part in parts:
        if group and (
            part.dtype != group[-1].dtype
            or part.offset != group[-1].offset + group[-1].num_bytes
        ):
            yield group
            group = []
        group.append(part)
    if group:
        yield group


def _check(part: _Slice, limit_bytes: int) -> None:
    item_bytes = ITEM_BYTES.get(part.dtype)
    is_sound = (
        item_bytes is not None
        and 0 <= part.start <= part.stop
        and part.num_bytes == (part.stop - part.start) * item_bytes
        and 0 <= part.offset <= limit_bytes - part.num_bytes
    )
    if not is_sound:
        msg = (
            f"{part.name}[{part.start}:{part.stop}] of dtype {part.dtype} and "
            f"{part.num_bytes} bytes at {part.offset} does not fit a slot of {limit_bytes} "
            "bytes; reserve larger slots, or log less"
        )
        raise CheckpointError(msg)


def _code(data: Array, dtype: str) -> tuple[str, list[Array]]:
    if dtype == "float32":
        coded = _code_rows(data.view(np.float32))
        if coded is not None:
            return "rows8", coded
    item_bytes = ITEM_BYTES[dtype]
    return "planes", [
        np.ascontiguousarray(data[plane::item_bytes]) for plane in range(item_bytes)
    ]


def _code_rows(values: Array) -> list[Array] | None:
    """Scales and minima, then a byte a value; None where that loses a bit."""
    if values.size < ROW_ELEMENTS:
        return None
    # The first row answers for most messages that are not of this kind.
    if _split_rows(values[:ROW_ELEMENTS]) is None:
        return None
    return _split_rows(values)


def _split_rows(values: Array) -> list[Array] | None:
    padding = -values.size % ROW_ELEMENTS
    rows = np.pad(values, (0, padding), mode="edge").reshape(-1, ROW_ELEMENTS)
    minima = rows.min(axis=1, keepdims=True)
    with np.errstate(all="ignore"):  # NaN and infinities fail the comparison below
        spans = rows.max(axis=1, keepdims=True) - minima
        scales = _round_scales(spans / np.float32(_MAX_CODE))
        codes = np.rint((rows - minima) / np.where(scales > 0, scales, np.float32(1)))
        codes = np.clip(codes, 0, _MAX_CODE).astype(np.uint8)
    back = _join_rows(scales, minima, codes)
    if not np.array_equal(back.view(np.uint32), rows.view(np.uint32)):
        return None
    fields = np.concatenate((scales, minima), axis=1).astype(np.float32)
    return [
        fields.reshape(-1).view(np.uint8),
        codes.reshape(-1)[: values.size],
    ]


def _round_scales(scales: Array) -> Array:
    words = scales.astype(np.float32).view(np.uint32)
    return ((words + np.uint32(1 << 7)) & _SCALE_BITS).view(np.float32)


def _join_rows(scales: Array, minima: Array, codes: Array) -> Array:
    # A 16-bit scale times 8 bits is exact, so only the sum rounds: as torch's decoder.
    with np.errstate(all="ignore"):
        joined: Array = codes.astype(np.float32) * scales + minima
    return joined


def _squeeze(plane: Array) -> bytes:
    """Compress a plane if that pays; whoever reads it tells by the size."""
    data = plane.tobytes()
    compressor = zstandard.ZstdCompressor(level=_LEVEL)
    middle = max(0, (len(data) - _SAMPLE_BYTES) // 2)
    sample = data[middle : middle + _SAMPLE_BYTES]
    if len(compressor.compress(sample)) > _WORTH_IT * len(sample):
        return data
    coded = compressor.compress(data)
    return coded if len(coded) < len(data) else data


def _decode_block(block: _Block, view: memoryview) -> list[GradientPart]:
    item_bytes = ITEM_BYTES[block.dtype]
    num_elements = sum(stop - start for _, start, stop in block.parts)
    planes = []
    for size, expected in zip(
        block.sizes, _plane_sizes(block, num_elements, item_bytes), strict=True
    ):
        planes.append(_unsqueeze(view[:size], expected))
        view = view[size:]
    data = _join_planes(block, planes, num_elements).tobytes()
    parts, offset = [], 0
    for name, start, stop in block.parts:
        end = offset + (stop - start) * item_bytes
        parts.append(
            GradientPart(
                range=StateRange(name=name, start=start, stop=stop),
                dtype=block.dtype,
                data=data[offset:end],
            )
        )
        offset = end
    return parts


def _plane_sizes(block: _Block, num_elements: int, item_bytes: int) -> list[int]:
    num_rows = -(-num_elements // ROW_ELEMENTS)
    sizes = {
        "raw": [num_elements * item_bytes],
        "planes": [num_elements] * item_bytes,
        "rows8": [num_rows * _FIELDS_BYTES, num_elements],
    }
    return sizes[block.coding]


def _unsqueeze(data: memoryview, num_bytes: int) -> Array:
    if len(data) == num_bytes:
        return np.frombuffer(data, np.uint8)
    plain = zstandard.ZstdDecompressor().decompress(data, max_output_size=num_bytes)
    if len(plain) != num_bytes:
        raise ValueError(f"a plane has {len(plain)} bytes, not {num_bytes}")  # noqa: EM102, TRY003
    return np.frombuffer(plain, np.uint8)


def _join_planes(block: _Block, planes: list[Array], num_elements: int) -> Array:
    if block.coding == "raw":
        return planes[0]
    if block.coding == "planes":
        joined = np.empty(num_elements * len(planes), np.uint8)
        for index, plane in enumerate(planes):
            joined[index :: len(planes)] = plane
        return joined
    fields = planes[0].view(np.float32).reshape(-1, 2)
    codes = np.pad(planes[1], (0, -num_elements % ROW_ELEMENTS), mode="edge")
    rows = _join_rows(fields[:, :1], fields[:, 1:], codes.reshape(-1, ROW_ELEMENTS))
    return rows.reshape(-1)[:num_elements].view(np.uint8)
