"""What a codec offers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch


class Codec(Protocol):
    """Codes float32 values in fewer bytes.

    The code carries a finite flag: where any value was NaN or infinite, every decoded
    value is NaN, so that a loss scaler on any rank sees it.
    """

    @property
    def name(self) -> str:
        """As the user and the plan name it."""

    @property
    def row_elements(self) -> int:
        """Cut tensors at multiples of this, so that no row is split."""

    def encoded_bytes(self, num_elements: int) -> int:
        """Size of the code of that many values, flag included; the same on all hosts."""

    def encode(self, values: torch.Tensor, code: torch.Tensor) -> None:
        """Write the code of ``values`` (float32, (n,)) into ``code`` (uint8)."""

    def decode(self, code: torch.Tensor, values: torch.Tensor) -> None:
        """Write what ``code`` stands for into ``values`` (float32, (n,))."""
