"""Take a state dict apart into JSON and named tensors, and put it together again.

Optimizers and schedulers nest dicts with string or integer keys, lists, tuples,
tensors and numbers. Pickle would keep anything, and run anything when it is read, so
the types kept are listed here and any other is refused by its place in the tree.

In the JSON, numbers, strings, booleans, null and lists stand for themselves; an
object ``{"$": kind, ...}`` for everything else.
"""

from __future__ import annotations

import math
import struct
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from geartrain.errors import CheckpointError

# Trees and their JSON hold values of many types; each is checked when it is visited.
Tree = Any
Json = Any

_FACTORIES: dict[str, Callable[[], Any] | None] = {  # Any: whatever the factory makes
    "none": None,
    "dict": dict,
    "list": list,
    "int": int,
    "float": float,
}
_TENSOR_TYPES = (torch.Tensor, torch.nn.Parameter)
_RESERVED_NAME = "__metadata__"  # safetensors keeps its metadata under this name


@dataclass(frozen=True, slots=True, kw_only=True)
class FlatTree:
    """A tree in two parts."""

    structure: Json
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    """Each tensor once, named after its place: ``state.0.exp_avg``."""
    aliases: dict[str, str] = field(default_factory=dict)
    """Further places of a tensor, such as tied weights, and the name it has above."""


def flatten(tree: Tree, label: str = "state") -> FlatTree:
    """Take a tree apart. Tensors are not copied.

    Args:
        tree: dict (also OrderedDict, defaultdict, Counter), list, tuple, torch.Size,
            tensor, NumPy array or scalar, int, float, str, bool, None, torch.dtype.
        label: What to call the tree in an error.

    Raises:
        CheckpointError: If something in the tree is of another type.
    """
    flat = FlatTree(structure=None)
    flattener = _Flattener(flat, label)
    try:
        structure = flattener.visit(tree, ())
    except RecursionError as error:
        msg = f"{label} is nested too deeply, or contains itself; flatten it"
        raise CheckpointError(msg) from error
    return FlatTree(structure=structure, tensors=flat.tensors, aliases=flat.aliases)


def unflatten(structure: Json, get_tensor: Callable[[str], torch.Tensor]) -> Tree:
    """Put a tree together.

    Args:
        structure: The JSON part.
        get_tensor: Returns the tensor of a name, for one name always the same object.

    Raises:
        CheckpointError: If the structure holds a kind that this version doesn't know.
    """
    if isinstance(structure, list):
        return [unflatten(item, get_tensor) for item in structure]
    if not isinstance(structure, dict):
        return structure
    kind = structure.get("$")
    reader = _READERS.get(kind) if isinstance(kind, str) else None
    if reader is None:
        msg = f"the state holds a node of the unknown kind {kind!r}; update geartrain"
        raise CheckpointError(msg)
    return reader(structure, get_tensor)


class _Flattener:
    def __init__(self, flat: FlatTree, label: str) -> None:
        self._flat = flat
        self._label = label
        self._names: set[str] = {_RESERVED_NAME}
        self._seen: dict[tuple[Any, ...], str] = {}  # Any: the parts of a tensor's identity

    def visit(self, node: Tree, path: tuple[Any, ...]) -> Json:  # Any: keys of all types
        if node is None or type(node) in (bool, int, str):
            return node
        if type(node) is float:
            return _write_float(node)
        if type(node) is list:
            return [self.visit(item, (*path, i)) for i, item in enumerate(node)]
        if type(node) in (tuple, torch.Size):
            kind = "tuple" if type(node) is tuple else "size"
            return {"$": kind, "items": self.visit(list(node), path)}
        if type(node) in (dict, OrderedDict, defaultdict, Counter):
            return self._visit_mapping(node, path)
        return self._visit_leaf(node, path)

    def _visit_leaf(self, node: Tree, path: tuple[Any, ...]) -> Json:
        if isinstance(node, torch.Tensor):
            return self._visit_tensor(node, path)
        if isinstance(node, np.generic | np.ndarray):
            return self._visit_numpy(node, path)
        if isinstance(node, torch.dtype):
            return {"$": "dtype", "name": str(node).removeprefix("torch.")}
        raise self._refusal(node, path)

    def _visit_mapping(self, node: Mapping[Any, Any], path: tuple[Any, ...]) -> Json:
        written: dict[str, Json] = {"$": type(node).__name__.lower()}
        if isinstance(node, defaultdict):
            known = {factory: name for name, factory in _FACTORIES.items()}
            if node.default_factory not in known:
                raise self._refusal(node.default_factory, (*path, "default_factory"))
            written["factory"] = known[node.default_factory]
        # torch keeps the versions of a module's layout in this attribute.
        metadata = getattr(node, "_metadata", None)
        if metadata is not None:
            written["metadata"] = self.visit(metadata, (*path, "_metadata"))
        written["items"] = [
            [self._visit_key(key, path), self.visit(value, (*path, key))]
            for key, value in node.items()
        ]
        return written

    def _visit_key(self, key: Any, path: tuple[Any, ...]) -> Json:  # Any: keys of all types
        parts = key if type(key) is tuple else (key,)
        if any(type(part) not in (str, int, float, bool, type(None)) for part in parts):
            raise self._refusal(key, (*path, key))
        return self.visit(key, path)

    def _visit_tensor(self, node: torch.Tensor, path: tuple[Any, ...]) -> Json:
        if (
            type(node) not in _TENSOR_TYPES
            or node.layout != torch.strided
            or node.is_quantized
            or node.device.type == "meta"
        ):
            raise self._refusal(node, path)
        identity = _identity(node)
        name = self._name(path)
        original = self._seen.get(identity) if node.numel() else None
        if original is not None:
            self._flat.aliases[name] = original
        else:
            self._seen[identity] = name
            self._flat.tensors[name] = node.detach()
        return {"$": "tensor", "name": original or name}

    def _visit_numpy(
        self, node: Any, path: tuple[Any, ...]
    ) -> Json:  # Any: array or scalar
        dtype = node.dtype
        subclass = isinstance(node, np.ndarray) and type(node) is not np.ndarray
        if dtype.hasobject or dtype.kind == "V" or subclass:
            raise self._refusal(node, path)
        if isinstance(node, np.generic):
            return {"$": "scalar", "dtype": dtype.str, "hex": node.tobytes().hex()}
        name = self._name(path)
        data = np.array(node, order="C", copy=True).reshape(-1).view(np.uint8)
        self._flat.tensors[name] = torch.from_numpy(data)
        return {"$": "array", "dtype": dtype.str, "shape": list(node.shape), "name": name}

    def _name(self, path: tuple[Any, ...]) -> str:
        # Names are for people and other readers; they must be UTF-8 and unique.
        plain = ".".join(map(str, path)).encode(errors="replace").decode() or "value"
        name, count = plain, 1
        while name in self._names:
            count += 1
            name = f"{plain}#{count}"
        self._names.add(name)
        return name

    def _refusal(self, node: object, path: tuple[Any, ...]) -> CheckpointError:
        place = self._label + "".join(f"[{key!r}]" for key in path)
        kind = f"{type(node).__module__}.{type(node).__qualname__}"
        if isinstance(node, torch.Tensor):
            kind += f" ({node.layout}, {node.dtype}, on {node.device})"
        msg = (
            f"{place} is a {kind}, which a snapshot cannot hold; turn it into a dense "
            "tensor, a number, a string, a list or a dict, or leave it out of the state"
        )
        return CheckpointError(msg)


def _identity(tensor: torch.Tensor) -> tuple[Any, ...]:  # Any: the parts differ in type
    return (
        tensor.device,
        tensor.data_ptr(),
        tensor.dtype,
        tensor.shape,
        tensor.stride(),
        tensor.is_conj(),
        tensor.is_neg(),
    )


def _write_float(value: float) -> Json:
    # JSON has neither NaN nor infinities; a NaN's payload survives only as bits.
    return (
        value
        if math.isfinite(value)
        else {"$": "float", "hex": struct.pack(">d", value).hex()}
    )


def _read_mapping(node: Json, get: Callable[[str], torch.Tensor]) -> Tree:
    kinds: dict[str, Callable[[], Any]] = {  # Any: dicts of any content
        "dict": dict,
        "ordereddict": OrderedDict,
        "counter": Counter,
        "defaultdict": lambda: defaultdict(_FACTORIES[node["factory"]]),
    }
    mapping = kinds[node["$"]]()
    for key, value in node["items"]:
        mapping[unflatten(key, get)] = unflatten(value, get)
    if "metadata" in node:
        mapping._metadata = unflatten(node["metadata"], get)  # noqa: SLF001 - torch's own
    return mapping


def _read_array(node: Json, get: Callable[[str], torch.Tensor]) -> Tree:
    data = get(node["name"]).cpu().numpy().copy()
    return data.view(np.dtype(node["dtype"])).reshape(node["shape"])


_READERS: dict[str, Callable[[Json, Callable[[str], torch.Tensor]], Tree]] = {
    "dict": _read_mapping,
    "ordereddict": _read_mapping,
    "defaultdict": _read_mapping,
    "counter": _read_mapping,
    "tuple": lambda node, get: tuple(unflatten(node["items"], get)),
    "size": lambda node, get: torch.Size(unflatten(node["items"], get)),
    "float": lambda node, _: struct.unpack(">d", bytes.fromhex(node["hex"]))[0],
    "dtype": lambda node, _: getattr(torch, node["name"]),
    "tensor": lambda node, get: get(node["name"]),
    "array": _read_array,
    "scalar": lambda node, _: np.frombuffer(
        bytes.fromhex(node["hex"]), dtype=np.dtype(node["dtype"])
    )[0],
}
