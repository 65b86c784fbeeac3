"""Cut a collated batch into micro-batches, whatever its structure."""

from __future__ import annotations

from geartrain.data.batch_tree import Batch, Leaf, is_column, iterate_leaves, map_leaves
from geartrain.errors import ConfigError


def batch_size_of(batch: Batch) -> int:
    """Count the samples of a batch: the leading size that all its leaves share.

    Tensors, arrays and lists of plain values count; numbers, strings, None and
    0-dimensional tensors belong to the batch as a whole.

    Raises:
        ConfigError: If leading sizes differ, or nothing in the batch has one.

    >>> import torch
    >>> batch_size_of({"x": torch.zeros(3, 2), "name": ["a", "b", "c"], "scale": 0.5})
    3
    """
    sizes = {
        path: size for path, leaf in iterate_leaves(batch) if (size := _size(leaf)) >= 0
    }
    if not sizes:
        msg = (
            f"a batch of type {type(batch).__name__} holds no tensor with a sample "
            "dimension; return tensors whose first dimension counts samples from collate_fn"
        )
        raise ConfigError(msg)
    if len(set(sizes.values())) > 1:
        listed = ", ".join(f"{path}: {size}" for path, size in sizes.items())
        msg = (
            f"leading sizes of a batch differ ({listed}); every tensor and list needs the "
            "number of samples as its first dimension; change collate_fn"
        )
        raise ConfigError(msg)
    return next(iter(sizes.values()))


def slice_batch(batch: Batch, start: int, stop: int) -> Batch:
    """Take samples start..stop-1 of a batch; tensors are views, not copies.

    >>> import torch
    >>> slice_batch((torch.arange(4), ["a", "b", "c", "d"]), 1, 3)
    (tensor([1, 2]), ['b', 'c'])
    """
    return map_leaves(batch, lambda leaf: leaf[start:stop] if _size(leaf) >= 0 else leaf)


def check_batch_size(batch: Batch, expected: int) -> None:
    """Check that a collated batch has one row a sample.

    Raises:
        ConfigError: If it has not; it could then not be cut into micro-batches.
    """
    size = batch_size_of(batch)
    if size != expected:
        msg = (
            f"collate_fn made a batch of leading size {size} from {expected} samples; "
            "every tensor needs the number of samples as its first dimension, so that "
            "the batch can be cut into micro-batches"
        )
        raise ConfigError(msg)


def _size(leaf: Leaf) -> int:
    """Return the number of samples of a leaf; -1 where it belongs to the whole batch."""
    if is_column(leaf):
        return len(leaf)
    shape = getattr(leaf, "shape", None)  # tensors and arrays
    return int(shape[0]) if shape is not None and len(shape) else -1
