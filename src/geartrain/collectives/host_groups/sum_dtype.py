"""In what dtype sums are taken."""

from __future__ import annotations

import torch

from geartrain.errors import ConfigError

_SUM_DTYPES = {
    torch.float64: torch.float64,
    torch.float32: torch.float32,
    # Sums of many members lose too much in 16 bits: rounded once, at the end.
    torch.bfloat16: torch.float32,
    torch.float16: torch.float32,
}


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which tensors of this dtype are added.

    Raises:
        ConfigError: If such tensors are no gradients.

    >>> sum_dtype(torch.bfloat16)
    torch.float32
    """
    found = _SUM_DTYPES.get(dtype)
    if found is None:
        names = ", ".join(str(known) for known in _SUM_DTYPES)
        msg = f"cannot sum {dtype} over processes; expected {names}. Convert it first"
        raise ConfigError(msg)
    return found


def put_weighted(target: torch.Tensor, part: torch.Tensor, weight: float) -> torch.Tensor:
    """Write weight * part into target, which may have a wider dtype; returns target.

    The product is taken in the target's dtype. A weight of 0 does not read the part, so
    that a NaN there is harmless.
    """
    if weight == 0:
        return target.zero_()
    if weight == 1:
        return target.copy_(part)
    if target.dtype == part.dtype and target.device == part.device:
        return torch.mul(part, weight, out=target)
    return target.copy_(part).mul_(weight)


def scale_(part: torch.Tensor, weight: float) -> torch.Tensor:
    """Multiply in place; 0 writes zeros without reading."""
    if weight == 0:
        return part.zero_()
    return part if weight == 1 else part.mul_(weight)
