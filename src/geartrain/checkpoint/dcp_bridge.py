"""To and from ``torch.distributed.checkpoint`` (DCP).

Export writes what ``dcp.load`` reads on any number of ranks. Import reads what
``dcp.save`` wrote, of which the metadata is a pickle and so is each item's description;
both are read as data (:mod:`geartrain.checkpoint.pickle_reader`), so a hostile directory
can at most be refused.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save

from geartrain.checkpoint.dcp_tensor import dtype_of, read_item
from geartrain.checkpoint.difference import StoredVersion
from geartrain.checkpoint.directory import replace_directory
from geartrain.checkpoint.export import ExportReport, check_free, refused
from geartrain.checkpoint.pickle_reader import Call, Value, read_pickle, refuse
from geartrain.checkpoint.pieces import StateReader
from geartrain.checkpoint.state_tensors import load_components
from geartrain.checkpoint.tree import Tree
from geartrain.errors import CheckpointError, GeartrainError

_METADATA = ".metadata"
_MODULE = "torch.distributed.checkpoint"
_MALFORMED = (
    AttributeError,
    IndexError,
    KeyError,
    OverflowError,
    RuntimeError,
    TypeError,
    ValueError,
)  # what a description raises that is not what torch writes
_MAX_CHUNKS = 10_000  # of one tensor; each pair is compared


def export_dcp(version: StoredVersion, path: str | Path) -> ExportReport:
    """Write a whole version as a DCP directory, loaded by ``dcp.load`` on any ranks.

    Args:
        version: What to export.
        path: A directory that does not exist yet, or is empty.

    Raises:
        CheckpointError: If the version is damaged, torch can't write it, or the disk
            refuses. Nothing is left then.
        ConfigError: If the path is in use.
    """
    target = Path(path)
    check_free(target)
    manifest = version.manifest
    state = load_components(StateReader(version.stores, manifest), manifest)
    try:
        with replace_directory(target) as draft, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that there are no ranks is as meant
            save(state, storage_writer=FileSystemWriter(draft), no_dist=True)
            files = tuple(sorted(one.name for one in draft.iterdir()))
    except OSError as error:
        raise refused(target, error) from error
    except GeartrainError:
        raise
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        # Torch's CheckpointException is no Exception.
        msg = f"torch can't write {target} as a distributed checkpoint: {error}"
        raise CheckpointError(msg) from error
    return ExportReport(
        path=str(target),
        files=files,
        num_tensors=len(manifest.tensors),
        num_bytes=manifest.num_bytes,
    )


def import_dcp(path: str | Path) -> dict[str, Tree]:
    """Read a DCP directory into host memory, whatever number of ranks wrote it.

    Returns:
        Components by name: the parts of a nested state, or ``model`` where the tensors
        lie at the top. Values at the top that are neither are the component ``values``.

    Raises:
        CheckpointError: If it is no such directory, is damaged, does not cover its
            tensors, or holds objects that are no plain data. Nothing in it is run.
    """
    return _split(_DcpReader(Path(path)).read())


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """Where an item lies."""

    file: str
    offset: int
    length: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Box:
    """Part of a tensor, in elements."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def slices(self) -> tuple[slice, ...]:
        return tuple(
            slice(start, start + size)
            for start, size in zip(self.offsets, self.sizes, strict=True)
        )

    def overlaps(self, other: _Box) -> bool:
        return all(
            start < other_start + other_size and other_start < start + size
            for start, size, other_start, other_size in zip(
                self.offsets, self.sizes, other.offsets, other.sizes, strict=True
            )
        )


class _DcpReader:
    def __init__(self, directory: Path) -> None:
        self._directory = directory
        source = directory / _METADATA
        try:
            data = source.read_bytes()
        except OSError as error:
            msg = (
                f"{directory} is no complete distributed checkpoint: {source} can't be "
                f"read ({error.strerror}); give the directory that dcp.save was given"
            )
            raise CheckpointError(msg) from error
        described = read_pickle(data, str(source))
        try:
            facts = _fields(described, "metadata.Metadata")
            self._items = _plain_dict(facts["state_dict_metadata"])
            self._paths = _plain_dict(facts.get("planner_data") or {})
            stored = _plain_dict(facts["storage_data"])
            self._places = {_index_key(key): _place(value) for key, value in stored.items()}
        except _MALFORMED as error:
            msg = f"{source} is not what torch 2.11 to 2.14 write ({error!r})"
            raise CheckpointError(msg) from error

    def read(self) -> dict[Any, Tree]:
        """Read all items, nested as they were saved."""
        root: dict[Any, Tree] = {}
        for name, described in self._items.items():
            try:
                value = self._read_item(name, described)
                path = self._paths.get(name, (name,))
                _insert(root, path, value)
            except _MALFORMED as error:
                msg = f"item {name!r} of {self._directory} is damaged or unknown ({error})"
                raise CheckpointError(msg) from error
        try:
            tidy: dict[Any, Tree] = _to_lists(root)
        except RecursionError as error:
            msg = f"the state in {self._directory} is nested too deeply; flatten it"
            raise CheckpointError(msg) from error
        return tidy

    def _read_item(self, name: str, described: Value) -> Tree:
        if described.path == f"{_MODULE}.metadata.BytesStorageMetadata":
            return self._load(self._places[name, None], name)
        facts = _fields(described, "metadata.TensorStorageMetadata")
        dtype = dtype_of(_fields(facts["properties"], "metadata.TensorProperties")[0])
        shape = _shape(facts["size"])
        boxes = [_box(chunk, shape) for chunk in facts["chunks"]]
        _check_boxes(boxes, shape)
        whole = torch.empty(shape, dtype=dtype)
        for box in boxes:
            part = self._load(self._places[name, box.offsets], name)
            if not isinstance(part, torch.Tensor) or part.dtype != dtype:
                refuse(f"it holds no tensor of {dtype}")
            if tuple(part.shape) != box.sizes:
                refuse(f"it has shape {tuple(part.shape)} instead of {box.sizes}")
            whole[box.slices] = part
        return whole

    def _load(self, place: _Place, name: str) -> Tree:
        path = self._directory / place.file
        try:
            with path.open("rb") as stream:
                stream.seek(place.offset)
                data = stream.read(place.length)
        except OSError as error:
            msg = f"{path} can't be read ({error.strerror}); take another copy"
            raise CheckpointError(msg) from error
        if len(data) != place.length:
            refuse(f"{path} is cut off")
        return read_item(data, f"{path} ({name})")


def _fields(value: Value, kind: str) -> Any:  # Any: a dict, or a tuple of values
    if not isinstance(value, Call) or value.path != f"{_MODULE}.{kind}":
        refuse(f"expected {kind}, found {getattr(value, 'path', type(value).__name__)}")
    return value.state if value.state is not None else {}


def _plain_dict(value: Value) -> dict[Any, Value]:
    if isinstance(value, Call) and value.path == "collections.OrderedDict":
        return dict(value.items)
    if not isinstance(value, dict):
        refuse(f"expected a dict, found {type(value).__name__}")
    return value


def _index_key(value: Value) -> tuple[str, tuple[int, ...] | None]:
    facts = _fields(value, "metadata.MetadataIndex")
    offset = facts.get("offset")
    return facts["fqn"], None if offset is None else _shape(offset)


def _place(value: Value) -> _Place:
    facts = _fields(value, "filesystem._StorageInfo")
    file, offset, length = (facts[key] for key in ("relative_path", "offset", "length"))
    # The name comes out of a file that others may have written.
    if not isinstance(file, str) or Path(file).name != file or file in {"", ".", ".."}:
        refuse(f"{file!r} leads out of the directory")
    if not _is_size(offset) or not _is_size(length):
        refuse(f"offset {offset!r} and length {length!r} are none")
    if facts.get("transform_descriptors"):
        refuse("it was compressed or encrypted by an extension; save it without")
    return _Place(file=file, offset=offset, length=length)


def _shape(value: Value) -> tuple[int, ...]:
    if isinstance(value, Call) and value.path == "torch.Size":
        value = value.arguments[0]
    if not isinstance(value, tuple | list) or not all(map(_is_size, value)):
        refuse(f"{value!r} is no shape")
    return tuple(value)


def _is_size(value: Value) -> bool:
    return type(value) is int and value >= 0


def _box(value: Value, shape: tuple[int, ...]) -> _Box:
    facts = _fields(value, "metadata.ChunkStorageMetadata")
    box = _Box(offsets=_shape(facts["offsets"]), sizes=_shape(facts["sizes"]))
    if not len(box.offsets) == len(box.sizes) == len(shape) or any(
        start + size > whole
        for start, size, whole in zip(box.offsets, box.sizes, shape, strict=True)
    ):
        refuse(f"a part at {box.offsets} of {box.sizes} goes beyond the shape {shape}")
    return box


def _check_boxes(boxes: list[_Box], shape: tuple[int, ...]) -> None:
    """Check that parts tile a tensor: as many elements as it has, and none twice."""
    if len(boxes) > _MAX_CHUNKS:
        refuse(f"a tensor has {len(boxes)} parts, more than {_MAX_CHUNKS}")
    filled = [box for box in boxes if math.prod(box.sizes)]
    found = sum(math.prod(box.sizes) for box in filled)
    if found != math.prod(shape):
        refuse(f"its parts have {found} elements instead of {math.prod(shape)}")
    if any(one.overlaps(other) for one, other in combinations(filled, 2)):
        refuse("two of its parts overlap")


class _ListItems(dict[int, Tree]):
    """A list while its items come in, in any order."""


def _insert(root: dict[Any, Tree], path: Value, value: Tree) -> None:
    if not isinstance(path, tuple) or not path:
        refuse(f"{path!r} is no place in a state")
    node: dict[Any, Tree] = root
    for key, after in pairwise(path):
        # DCP tells a list from a dict by its integer keys, and so does its own loader.
        fresh: dict[Any, Tree] = _ListItems() if type(after) is int else {}
        node = node.setdefault(key, fresh)
        if not isinstance(node, dict):
            refuse(f"{path!r} lies within a value")
    node[path[-1]] = value


def _to_lists(node: Tree) -> Tree:
    if not isinstance(node, dict):
        return node
    items = {key: _to_lists(value) for key, value in node.items()}
    if isinstance(node, _ListItems) and sorted(items) == list(range(len(items))):
        return [items[index] for index in range(len(items))]
    return items


def _split(state: dict[Any, Tree]) -> dict[str, Tree]:
    if any(isinstance(value, torch.Tensor) for value in state.values()):
        return {"model": state}
    nested = {key: value for key, value in state.items() if isinstance(value, dict)}
    parts = {str(key): _renumber(value) for key, value in nested.items()}
    values = {key: value for key, value in state.items() if not isinstance(value, dict)}
    return parts | ({"values": values} if values else {})


def _renumber(part: dict[Any, Tree]) -> dict[Any, Tree]:
    """Give an optimizer's parameters their numbers back, which DCP writes as text."""
    state = part.get("state")
    if "param_groups" not in part or not isinstance(state, dict):
        return part
    numbered = {
        int(key) if isinstance(key, str) and key.isdecimal() else key: value
        for key, value in state.items()
    }
    return part | {"state": numbered}
