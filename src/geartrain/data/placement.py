"""Bring a collated batch to a device."""

from __future__ import annotations

import torch

from geartrain.data.batch_tree import Batch, Leaf, map_leaves


def pin_batch(batch: Batch) -> Batch:
    """Copy a batch's tensors into page-locked memory, from where copies overlap."""
    return map_leaves(batch, _pin)


def move_batch(batch: Batch, device: torch.device) -> Batch:
    """Move a batch's tensors to a device; tensors already there are not copied."""
    # Only from pinned memory to CUDA is an asynchronous copy ordered by the stream;
    # elsewhere the host could read a half-written tensor.
    overlap = device.type == "cuda"

    def move(leaf: Leaf) -> Leaf:
        if isinstance(leaf, torch.Tensor):
            return leaf.to(device, non_blocking=overlap)
        return leaf

    return map_leaves(batch, move)


def _pin(leaf: Leaf) -> Leaf:
    if isinstance(leaf, torch.Tensor) and leaf.device.type == "cpu":
        return leaf.pin_memory()
    return leaf
