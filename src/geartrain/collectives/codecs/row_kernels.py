"""8- and 4-bit rows: torch's embedding kernels, or the same format composed.

A row of 8-bit code is its values' codes, then scale and minimum as float32; a row of
4-bit code is the values' codes, two a byte with the even one low, then scale and
minimum as float16. A value is ``code * scale + minimum``.

The kernels belong to embedding tables and could move out of torch one day; the
composed functions then take over, with the same bytes per row and the same meaning.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

BYTE_FIELDS_BYTES = 8
NIBBLE_FIELDS_BYTES = 4

_BYTE_LEVELS = 255.0
_NIBBLE_LEVELS = 15.0
_SMALLEST_RANGE = 1e-8
"""As in the kernel (fbgemm ``kEpsilon``); rows are scaled far above it beforehand."""


def pack_bytes(rows: torch.Tensor) -> torch.Tensor:
    """8-bit codes of rows.

    Args:
        rows: float32, shape (num_rows, row_elements).

    Returns:
        uint8, shape (num_rows, row_elements + 8).
    """
    return _kernel("embedding_bag_byte_prepack", pack_bytes_composed)(rows)


def unpack_bytes(code: torch.Tensor) -> torch.Tensor:
    """The reverse of ``pack_bytes``."""
    return _kernel("embedding_bag_byte_unpack", unpack_bytes_composed)(code)


def pack_nibbles(rows: torch.Tensor) -> torch.Tensor:
    """4-bit codes of rows.

    Args:
        rows: float32, shape (num_rows, row_elements), an even number of elements whose
            magnitudes are below 2**15.

    Returns:
        uint8, shape (num_rows, row_elements / 2 + 4).
    """
    return _kernel("embedding_bag_4bit_prepack", pack_nibbles_composed)(rows)


def unpack_nibbles(code: torch.Tensor) -> torch.Tensor:
    """The reverse of ``pack_nibbles``."""
    return _kernel("embedding_bag_4bit_unpack", unpack_nibbles_composed)(code)


def pack_bytes_composed(rows: torch.Tensor) -> torch.Tensor:
    """``pack_bytes`` of ordinary torch functions."""
    low, high = rows.aminmax(dim=1, keepdim=True)
    spread = high - low
    codes = rows.sub(low).mul_(_BYTE_LEVELS / (spread + _SMALLEST_RANGE)).round_()
    fields = torch.cat([spread / _BYTE_LEVELS, low], dim=1)
    return torch.cat([codes.clamp_(0, _BYTE_LEVELS).to(torch.uint8), _bytes(fields)], dim=1)


def unpack_bytes_composed(code: torch.Tensor) -> torch.Tensor:
    """``unpack_bytes`` of ordinary torch functions."""
    fields = code[:, -BYTE_FIELDS_BYTES:].contiguous().view(torch.float32)
    return code[:, :-BYTE_FIELDS_BYTES].float().mul_(fields[:, :1]).add_(fields[:, 1:])


def pack_nibbles_composed(rows: torch.Tensor) -> torch.Tensor:
    """``pack_nibbles`` of ordinary torch functions."""
    low, high = rows.aminmax(dim=1, keepdim=True)
    low = low.to(torch.float16).float()
    scale = ((high - low) / _NIBBLE_LEVELS).to(torch.float16).float()
    scale = torch.where(scale == 0, 1.0, scale)
    codes = rows.sub(low).div_(scale).round_().clamp_(0, _NIBBLE_LEVELS).to(torch.uint8)
    pairs = codes[:, 0::2] | (codes[:, 1::2] << 4)
    fields = torch.cat([scale, low], dim=1).to(torch.float16)
    return torch.cat([pairs, _bytes(fields)], dim=1)


def unpack_nibbles_composed(code: torch.Tensor) -> torch.Tensor:
    """``unpack_nibbles`` of ordinary torch functions."""
    pairs = code[:, :-NIBBLE_FIELDS_BYTES]
    fields = code[:, -NIBBLE_FIELDS_BYTES:].contiguous().view(torch.float16).float()
    values = torch.stack([pairs & 15, pairs >> 4], dim=2).flatten(1).float()
    return values.mul_(fields[:, :1]).add_(fields[:, 1:])


def _bytes(fields: torch.Tensor) -> torch.Tensor:
    return fields.contiguous().view(torch.uint8)


def _kernel(
    name: str, composed: Callable[[torch.Tensor], torch.Tensor]
) -> Callable[[torch.Tensor], torch.Tensor]:
    # Any: torch.ops makes its members up at run time.
    kernel: Any = getattr(torch.ops.quantized, name, composed)
    return kernel  # type: ignore[no-any-return]
