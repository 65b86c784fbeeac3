"""One tree as one block of bytes, in the layout of safetensors.

Written here and not by the safetensors library, which copies all tensors to host
memory before it writes the first: this streams one tensor at a time, takes the digest
on the way, and gives the same bytes to a file and to a broadcast. Any safetensors
reader finds the tensors by name; the rest of the tree lies in the metadata.

Source: https://github.com/huggingface/safetensors (the format).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from geartrain.checkpoint.tree import Tree, flatten, unflatten
from geartrain.errors import CheckpointError

_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_BY_NAME = {name: dtype for dtype, name in _DTYPES.items()}
_TREE_KEY = "geartrain_tree"
_OTHERS_KEY = "geartrain_dtypes"
_ALIGNMENT_BYTES = 8
_MAX_HEADER_BYTES = 100_000_000  # what readers of the format accept


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeLayout:
    """A tree, ready to be written."""

    header: bytes
    tensors: tuple[torch.Tensor, ...]
    """In the order of their bytes, wherever they lie."""
    num_bytes: int
    """Of the whole block."""


def plan_layout(
    tree: Tree, *, label: str = "state", repeat_aliases: bool = False
) -> TreeLayout:
    """Decide where each tensor's bytes go.

    Args:
        tree: What ``flatten`` takes.
        label: What to call the tree in an error.
        repeat_aliases: Write a tensor that has several places under each of their
            names, for readers that expect them all; it is read as one either way.

    Raises:
        CheckpointError: If the tree holds something that cannot be written.
    """
    flat = flatten(tree, label)
    named = dict(flat.tensors)
    if repeat_aliases:
        named |= {alias: flat.tensors[name] for alias, name in flat.aliases.items()}
    # Large items first: with a padded header, every tensor is then aligned.
    ordered = sorted(named.items(), key=lambda item: -_stored(item[1])[1])
    others = {
        name: [str(tensor.dtype).removeprefix("torch."), list(tensor.shape)]
        for name, tensor in ordered
        if tensor.dtype not in _DTYPES
    }
    metadata = {"format": "pt", _TREE_KEY: json.dumps(flat.structure, allow_nan=False)}
    if others:
        metadata[_OTHERS_KEY] = json.dumps(others)
    header: dict[str, Any] = {"__metadata__": metadata}  # Any: JSON
    offset = 0
    for name, tensor in ordered:
        num_bytes = tensor.numel() * tensor.element_size()
        dtype, _, shape = _stored(tensor)
        header[name] = {
            "dtype": dtype,
            "shape": shape,
            "data_offsets": [offset, offset + num_bytes],
        }
        offset += num_bytes
    encoded = _encode_header(header, label)
    return TreeLayout(
        header=encoded,
        tensors=tuple(tensor for _, tensor in ordered),
        num_bytes=len(encoded) + offset,
    )


def write_layout(layout: TreeLayout, write: Callable[[memoryview], object]) -> None:
    """Write the block piece by piece, with one tensor in host memory at a time."""
    write(memoryview(layout.header))
    for tensor in layout.tensors:
        if tensor.numel():
            write(_raw_bytes(tensor).numpy().data)


def tree_to_bytes(tree: Tree, *, label: str = "state") -> torch.Tensor:
    """Write a tree to a tensor of bytes on the host, shape (num_bytes,).

    Raises:
        CheckpointError: If the tree holds something that cannot be written.
    """
    layout = plan_layout(tree, label=label)
    block = torch.empty(layout.num_bytes, dtype=torch.uint8)
    target = block.numpy().data
    position = 0

    def append(piece: memoryview) -> None:
        nonlocal position
        target[position : position + piece.nbytes] = piece
        position += piece.nbytes

    write_layout(layout, append)
    return block


def tree_from_bytes(
    block: torch.Tensor,
    *,
    label: str = "state",
    map_location: str | torch.device | None = None,
) -> Tree:
    """Read a tree from the bytes that ``tree_to_bytes`` made.

    Args:
        block: Bytes on the host, dtype uint8, shape (num_bytes,). They are copied.
        label: What to call the tree in an error.
        map_location: Where to put the tensors; the host where None.

    Raises:
        CheckpointError: If the bytes are not a tree.
    """
    try:
        header_bytes = int.from_bytes(block[:8].numpy().tobytes(), "little")
        text = block[8 : 8 + header_bytes].numpy().tobytes()
        if len(text) != header_bytes:
            raise ValueError(f"the header of {header_bytes} bytes is cut off")  # noqa: EM102, TRY003
        header = json.loads(text)
        metadata = header.pop("__metadata__")
        structure = json.loads(metadata[_TREE_KEY])
        others = json.loads(metadata.get(_OTHERS_KEY, "{}"))
        reader = _TensorReader(block[8 + header_bytes :], header, others, map_location)
        return unflatten(structure, reader.get)
    except (KeyError, ValueError, TypeError, AttributeError, RuntimeError) as error:
        msg = f"{label} does not hold a state of geartrain ({error}); take another copy"
        raise CheckpointError(msg) from error


class _TensorReader:
    """Copies tensors out of a block, each once."""

    def __init__(
        self,
        data: torch.Tensor,
        header: dict[str, Any],  # Any: JSON, here and below
        others: dict[str, Any],
        map_location: str | torch.device | None,
    ) -> None:
        self._data = data
        self._header = header
        self._others = others
        self._map_location = map_location
        self._tensors: dict[str, torch.Tensor] = {}

    def get(self, name: str) -> torch.Tensor:
        if name not in self._tensors:
            self._tensors[name] = self._read(name)
        return self._tensors[name]

    def _read(self, name: str) -> torch.Tensor:
        entry = self._header[name]
        start, stop = entry["data_offsets"]
        if not 0 <= start <= stop <= len(self._data):
            raise ValueError(f"the bytes of {name} are cut off")  # noqa: EM102, TRY003
        dtype, shape = _BY_NAME[entry["dtype"]], entry["shape"]
        if name in self._others:
            dtype_name, shape = self._others[name]
            dtype = getattr(torch, dtype_name)
        # The copy also brings the bytes to an address that suits every dtype.
        raw = self._data[start:stop].clone()
        tensor = raw.view(dtype).reshape(shape)
        return tensor if self._map_location is None else tensor.to(self._map_location)


def _stored(tensor: torch.Tensor) -> tuple[str, int, list[int]]:
    """Return dtype name, bytes an item and shape under which a tensor is stored."""
    name = _DTYPES.get(tensor.dtype)
    if name is None:  # kept as its bytes; the metadata says what they are
        return "U8", 1, [tensor.numel() * tensor.element_size()]
    return name, tensor.element_size(), list(tensor.shape)


def _raw_bytes(tensor: torch.Tensor) -> torch.Tensor:
    plain = tensor.detach().resolve_conj().resolve_neg().to("cpu").contiguous()
    return plain.reshape(-1).view(torch.uint8)


def _encode_header(header: dict[str, Any], label: str) -> bytes:  # Any: JSON
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % _ALIGNMENT_BYTES)
    if len(text) > _MAX_HEADER_BYTES:
        msg = (
            f"{label} needs {len(text)} bytes for what is not in tensors, more than "
            f"{_MAX_HEADER_BYTES}; keep long lists of numbers as tensors"
        )
        raise CheckpointError(msg)
    return len(text).to_bytes(8, "little") + text
