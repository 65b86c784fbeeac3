"""Write a version in formats that others load, without geartrain.

``safetensors``: the weights as one file. ``hf``: a directory as Hugging Face lays models
out, in shards with an index where one file would be large. Tied weights are written under
each of their names, so that a plain ``load_state_dict`` finds them all.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import safetensors.torch
import torch

from geartrain.checkpoint.difference import StoredVersion
from geartrain.checkpoint.directory import replace_directory
from geartrain.checkpoint.pieces import StateReader
from geartrain.checkpoint.state_tensors import load_components
from geartrain.checkpoint.tree import Tree
from geartrain.errors import CheckpointError, ConfigError

MAX_SHARD_BYTES = 5 * 10**9
"""As ``save_pretrained`` of Hugging Face's libraries cuts."""

_WEIGHTS_NAME = "model.safetensors"
_INDEX_NAME = "model.safetensors.index.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportReport:
    """What was written."""

    path: str
    files: tuple[str, ...]
    num_tensors: int
    num_bytes: int
    left_out: tuple[str, ...] = ()
    """Values of the component that are no tensors: the format has no place for them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Weights:
    tensors: dict[str, torch.Tensor]
    left_out: tuple[str, ...]

    @property
    def num_bytes(self) -> int:
        return sum(map(_size, self.tensors.values()))


def export_safetensors(
    version: StoredVersion, path: str | Path, *, component: str = "model"
) -> ExportReport:
    """Write one component as a safetensors file.

    Args:
        version: What to export.
        path: A file that does not exist yet.
        component: Which part of the state.

    Raises:
        CheckpointError: If the version lacks the component, is damaged, holds a dtype
            that the format lacks, or the disk refuses. Nothing is left then.
        ConfigError: If the path exists.
    """
    target = Path(path)
    check_free(target)
    weights = _read_weights(version, component)
    draft = target.with_name(f".{target.name}.exporting")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _write_file(draft, weights.tensors)
        draft.rename(target)
    except OSError as error:
        draft.unlink(missing_ok=True)
        raise refused(target, error) from error
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
    return _report(target, (target.name,), weights)


def export_hf(
    version: StoredVersion,
    path: str | Path,
    *,
    component: str = "model",
    config: Path | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> ExportReport:
    """Write one component as a directory in Hugging Face's layout.

    Args:
        version: What to export.
        path: A directory that does not exist yet, or is empty.
        component: Which part of the state; its names must be those of the Hugging Face
            model, as they are where such a model was trained.
        config: A ``config.json`` to put beside the weights; ``from_pretrained`` needs one.
        max_shard_bytes: Above it the weights become several files with an index.

    Raises:
        CheckpointError: As ``export_safetensors``.
        ConfigError: If the path is in use or the configuration can't be read.
    """
    target = Path(path)
    check_free(target)
    settings = None if config is None else _read_config(config)
    weights = _read_weights(version, component)
    shards = list(_cut_shards(weights.tensors, max_shard_bytes))
    names = _shard_names(len(shards))
    try:
        with replace_directory(target) as draft:
            for name, shard in zip(names, shards, strict=True):
                _write_file(draft / name, shard)
            if len(shards) > 1:
                index = _encode_index(names, shards, weights.num_bytes)
                _write_bytes(draft / _INDEX_NAME, index)
                names = (*names, _INDEX_NAME)
            if settings is not None:
                _write_bytes(draft / "config.json", settings)
                names = (*names, "config.json")
    except OSError as error:
        raise refused(target, error) from error
    return _report(target, names, weights)


def check_free(target: Path) -> None:
    """Refuse to write over something.

    Raises:
        ConfigError: If the path exists and is no empty directory.
    """
    if not target.exists() or (target.is_dir() and not any(target.iterdir())):
        return
    msg = f"{target} exists and is left alone; export to a new path, or remove it first"
    raise ConfigError(msg)


def refused(target: Path, error: OSError) -> CheckpointError:
    """Describe what a disk said while something was exported."""
    msg = f"cannot export to {target}: {error.strerror or error}; make room or use another"
    return CheckpointError(msg)


def _read_weights(version: StoredVersion, component: str) -> _Weights:
    reader = StateReader(version.stores, version.manifest)
    tree = load_components(reader, version.manifest, [component])[component]
    if not isinstance(tree, Mapping):
        msg = (
            f"{component!r} is a {type(tree).__name__}, not a dict of tensors; name another"
        )
        raise CheckpointError(msg)
    tensors: dict[str, torch.Tensor] = {}
    left_out = []
    for name, value in _leaves(tree, ""):
        if not isinstance(value, torch.Tensor):
            left_out.append(name)
        elif name in tensors:
            msg = f"{component!r} has two tensors named {name!r}; export it as dcp instead"
            raise CheckpointError(msg)
        else:
            tensors[name] = value
    return _Weights(tensors=tensors, left_out=tuple(left_out))


def _leaves(node: Tree, path: str) -> Iterator[tuple[str, Tree]]:
    items: Iterator[tuple[object, Tree]]
    if isinstance(node, Mapping):
        items = iter(node.items())
    elif isinstance(node, list | tuple):
        items = iter(enumerate(node))
    else:
        yield path, node
        return
    for key, value in items:
        yield from _leaves(value, f"{path}.{key}" if path else str(key))


def _write_file(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    seen: set[int] = set()
    separate = {}
    for name, tensor in tensors.items():
        # The format has no tied tensors, and its library refuses to write them.
        pointer = tensor.data_ptr()
        is_tied = tensor.numel() > 0 and pointer in seen
        separate[name] = tensor.clone() if is_tied else tensor.contiguous()
        seen.add(pointer)
    try:
        safetensors.torch.save_file(separate, path, metadata={"format": "pt"})
    except (ValueError, KeyError, RuntimeError, safetensors.SafetensorError) as error:
        msg = f"safetensors can't hold these weights ({error}); export them as dcp instead"
        raise CheckpointError(msg) from error
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _cut_shards(
    tensors: Mapping[str, torch.Tensor], max_shard_bytes: int
) -> Iterator[dict[str, torch.Tensor]]:
    shard: dict[str, torch.Tensor] = {}
    shard_bytes = 0
    for name, tensor in tensors.items():
        if shard and shard_bytes + _size(tensor) > max_shard_bytes:
            yield shard
            shard, shard_bytes = {}, 0
        shard[name] = tensor
        shard_bytes += _size(tensor)
    yield shard


def _shard_names(count: int) -> tuple[str, ...]:
    if count == 1:
        return (_WEIGHTS_NAME,)
    return tuple(
        f"model-{index:05d}-of-{count:05d}.safetensors" for index in range(1, count + 1)
    )


def _encode_index(
    names: tuple[str, ...], shards: list[dict[str, torch.Tensor]], num_bytes: int
) -> bytes:
    weight_map = {
        tensor: name for name, shard in zip(names, shards, strict=True) for tensor in shard
    }
    index = {"metadata": {"total_size": num_bytes}, "weight_map": weight_map}
    return json.dumps(index, indent=2, sort_keys=True).encode() + b"\n"


def _read_config(path: Path) -> bytes:
    try:
        data = path.read_bytes()
        is_settings = isinstance(json.loads(data), dict)
    except (OSError, ValueError) as error:
        msg = f"{path} can't be read as JSON ({error}); give a model's config.json"
        raise ConfigError(msg) from error
    if not is_settings:
        msg = f"{path} holds no JSON object; give a model's config.json"
        raise ConfigError(msg)
    return data


def _write_bytes(path: Path, data: bytes) -> None:
    with path.open("wb") as stream:
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())


def _report(target: Path, files: tuple[str, ...], weights: _Weights) -> ExportReport:
    return ExportReport(
        path=str(target),
        files=files,
        num_tensors=len(weights.tensors),
        num_bytes=weights.num_bytes,
        left_out=weights.left_out,
    )


def _size(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()
