"""Read one item of a distributed checkpoint of torch, without running its pickle.

An item is what ``torch.save`` writes: a zip archive of one small pickle, which
describes an object, and the raw bytes of its storages. The pickle is read by
:mod:`geartrain.checkpoint.pickle_reader`; the zip's checksums are checked.

Source: ``torch/serialization.py`` and ``torch/_utils.py`` of torch 2.11 to 2.13.
"""

from __future__ import annotations

import io
import math
import struct
import zipfile
from typing import Any

import torch

from geartrain.checkpoint.pickle_reader import Call, Name, Value, read_pickle, refuse
from geartrain.errors import CheckpointError

_STORAGES = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
    "ComplexFloatStorage": torch.complex64,
    "ComplexDoubleStorage": torch.complex128,
    "UntypedStorage": torch.uint8,
}
_MAX_NODES = 1_000_000
"""Values in one item; a few bytes can describe more of them than any memory holds."""


def read_item(data: bytes, source: str) -> Any:  # Any: a tensor, or plain data
    """Read a tensor, or nested lists and dicts of plain values and tensors.

    Raises:
        CheckpointError: If it is damaged, or holds objects of other types.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            return _ItemReader(archive, source).read()
    except (
        zipfile.BadZipFile,
        struct.error,
        AttributeError,
        OverflowError,
        KeyError,
        ValueError,
        TypeError,
        IndexError,
        RuntimeError,
        RecursionError,
        NotImplementedError,
        EOFError,
    ) as error:
        msg = f"{source} is damaged or was not written by torch.save ({error})"
        raise CheckpointError(msg) from error


def dtype_of(value: Value) -> torch.dtype:
    """Read a dtype, which a pickle names as ``torch.float32``.

    Raises:
        ValueError: If it is another name, or none.
    """
    name = value.path.removeprefix("torch.") if isinstance(value, Name) else ""
    found = getattr(torch, name, None) if name.isidentifier() else None
    if not isinstance(found, torch.dtype):
        refuse(f"{getattr(value, 'path', value)!r} is no dtype")
    return found


class _ItemReader:
    def __init__(self, archive: zipfile.ZipFile, source: str) -> None:
        self._archive = archive
        self._source = source
        self._num_nodes = 0
        names = [one for one in archive.namelist() if one.endswith("/data.pkl")]
        if len(names) != 1:
            refuse("it holds no data.pkl")
        self._prefix = names[0].removesuffix("data.pkl")
        order = f"{self._prefix}byteorder"
        if order in archive.namelist() and self._member(order) != b"little":
            refuse("its numbers are big-endian")

    def read(self) -> Any:  # Any: what the item holds
        described = read_pickle(self._member(f"{self._prefix}data.pkl"), self._source)
        return self._build(described)

    def _member(self, name: str) -> bytes:
        info = self._archive.getinfo(name)
        if info.compress_type != zipfile.ZIP_STORED:
            refuse(f"{name} is compressed, which torch.save never does")
        return self._archive.read(name)

    def _build(self, value: Value) -> Any:  # Any: what the item holds
        self._num_nodes += 1
        if self._num_nodes > _MAX_NODES:
            refuse(f"it holds more than {_MAX_NODES} values")
        if value is None or isinstance(value, bool | int | float | str):
            return value
        if isinstance(value, list):
            return [self._build(item) for item in value]
        if isinstance(value, tuple):
            return tuple(self._build(item) for item in value)
        if isinstance(value, dict):
            return {self._key(key): self._build(item) for key, item in value.items()}
        if isinstance(value, Name):
            return dtype_of(value)
        if not isinstance(value, Call):
            refuse(f"it holds a {type(value).__name__}")
        return self._build_call(value)

    def _key(self, key: Value) -> Any:  # Any: a plain value
        if key is None or isinstance(key, bool | int | float | str):
            return key
        if not isinstance(key, tuple):
            refuse(f"a key is a {type(key).__name__}")
        return tuple(self._key(part) for part in key)

    def _build_call(self, call: Call) -> Any:  # Any: what the call makes
        if call.path == "torch._utils._rebuild_tensor_v2":
            return self._tensor(call.arguments, None)
        if call.path == "torch._utils._rebuild_tensor_v3":
            return self._tensor(call.arguments, dtype_of(call.arguments[6]))
        if call.path == "torch._utils._rebuild_parameter":
            return self._build(call.arguments[0])
        if call.path == "torch.Size":
            return torch.Size(self._build(call.arguments[0]))
        if call.path != "collections.OrderedDict" or call.arguments:
            refuse(
                f"it holds a {call.path}, which is no plain data; save that part of the "
                "state as tensors, numbers, strings, lists or dicts"
            )
        return {self._key(key): self._build(item) for key, item in call.items}

    def _tensor(
        self, arguments: tuple[Value, ...], dtype: torch.dtype | None
    ) -> torch.Tensor:
        storage, offset, size, stride = arguments[:4]
        kind, storage_name, key, _, num_items = storage.arguments[0]
        if storage.path != "persistent" or kind != "storage":
            refuse("a tensor has no storage")
        stored = _STORAGES[storage_name.path.rpartition(".")[2]]
        shape, strides = _extents(size), _extents(stride)
        found = dtype or stored
        if not str(key).isalnum() or not isinstance(offset, int) or offset < 0:
            refuse("a storage has a bad name or offset")
        raw = self._member(f"{self._prefix}data/{key}")
        if len(raw) != num_items * stored.itemsize:
            refuse(f"storage {key} has {len(raw)} bytes")
        if math.prod(shape) == 0:
            return torch.empty(shape, dtype=found)
        if math.prod(shape) * found.itemsize > len(raw):
            refuse(f"a tensor of shape {shape} has {len(raw)} bytes")
        flat = torch.frombuffer(bytearray(raw), dtype=torch.uint8).view(found)
        return torch.as_strided(flat, shape, strides, offset).contiguous()


def _extents(value: Value) -> tuple[int, ...]:
    if not isinstance(value, tuple) or any(
        not isinstance(one, int) or isinstance(one, bool) or one < 0 for one in value
    ):
        refuse(f"{value!r} is no shape")
    return value
