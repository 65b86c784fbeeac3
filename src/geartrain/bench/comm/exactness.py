"""Tensors whose sum is known, and how far a result is from it."""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import torch

_FIRST_SEED = 7001


@dataclass(slots=True)
class KnownSum:
    """One rank's part of a sum, filled in anew before each all-reduce.

    Args:
        rank: This rank.
        world_size: Parts of the sum.
        num_elements: Of the tensor, float32.
        knows_sum: Whether to work the exact sum out, in float64; one rank is enough, as
            the checksums say whether the others hold the same.
    """

    rank: int
    world_size: int
    num_elements: int
    knows_sum: bool
    _own: torch.Tensor | None = None
    _sum: torch.Tensor | None = None

    def __post_init__(self) -> None:
        self._own = _part(self.rank, self.num_elements)
        if self.knows_sum:
            total = torch.zeros(self.num_elements, dtype=torch.float64)
            for rank in range(self.world_size):
                total += _part(rank, self.num_elements)
            self._sum = total

    def fill(self, tensor: torch.Tensor) -> None:
        """Put this rank's part into a tensor, shape (num_elements,)."""
        assert self._own is not None
        tensor.copy_(self._own)

    def relative_error(self, result: torch.Tensor) -> float | None:
        """Norm of what is wrong over the norm of the sum; None where it isn't known."""
        if self._sum is None:
            return None
        return float((result - self._sum).norm() / self._sum.norm())


def checksum(tensor: torch.Tensor) -> int:
    """CRC-32 of the bits: equal bits on all ranks have equal ones."""
    return zlib.crc32(tensor.numpy().data)


def _part(rank: int, num_elements: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(_FIRST_SEED + rank)
    return torch.randn(num_elements, generator=generator)
