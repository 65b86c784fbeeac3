"""Which tensors can be replaced by their sum, and how many bytes of them travel."""

from __future__ import annotations

import torch

from geartrain.errors import ConfigError

_SUMMED_AS = {
    torch.float64: 8,
    torch.float32: 4,
    # Sums of many ranks lose too much in 16 bits.
    torch.float16: 4,
    torch.bfloat16: 4,
}
"""Bytes of an element on the wire."""


def bytes_on_wire(tensor: torch.Tensor) -> int:
    """Bytes of the tensor as it is summed.

    Args:
        tensor: Any shape and strides; each element has a place of its own in memory.

    Raises:
        ConfigError: If its dtype can't be summed or a sum can't be stored in it.
    """
    bytes_each = _SUMMED_AS.get(tensor.dtype)
    if bytes_each is None:
        known = ", ".join(str(dtype).removeprefix("torch.") for dtype in _SUMMED_AS)
        msg = f"cannot sum {tensor.dtype} over members, only {known}; convert it first"
        raise ConfigError(msg)
    if tensor.layout != torch.strided or _repeats_elements(tensor):
        msg = (
            f"cannot store a sum in a tensor of shape {tuple(tensor.shape)} and layout "
            f"{tensor.layout} whose elements share memory or have none; pass a dense one: "
            "to_dense(), or clone() after expand()"
        )
        raise ConfigError(msg)
    return tensor.numel() * bytes_each


def _repeats_elements(tensor: torch.Tensor) -> bool:
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return tensor.numel() > 0 and any(size > 1 and step == 0 for size, step in steps)
