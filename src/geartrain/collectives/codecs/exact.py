"""The codec that codes nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from geartrain.errors import ConfigError

if TYPE_CHECKING:
    from typing import Final

_BYTES_PER_ELEMENT: Final = 4


class ExactCodec:
    """float32 as it is; NaN and infinities stand for themselves."""

    name = "none"
    row_elements = 1

    def encoded_bytes(self, num_elements: int) -> int:
        """As many as the values have."""
        return _BYTES_PER_ELEMENT * num_elements

    def encode(self, values: torch.Tensor, code: torch.Tensor) -> None:
        """Copy the bytes of ``values`` (float32, (n,)) into ``code`` (uint8)."""
        self._check(values, code)
        code.copy_(values.view(torch.uint8))

    def decode(self, code: torch.Tensor, values: torch.Tensor) -> None:
        """Copy the bytes of ``code`` into ``values`` (float32, (n,))."""
        self._check(values, code)
        values.view(torch.uint8).copy_(code)

    def _check(self, values: torch.Tensor, code: torch.Tensor) -> None:
        size = self.encoded_bytes(values.numel())
        if values.dtype != torch.float32 or code.shape != (size,):
            msg = (
                f"codec none: {values.dtype} {tuple(values.shape)} and a code of "
                f"{tuple(code.shape)}, expected float32 (n,) and ({size},); "
                "make the code with encoded_bytes(values.numel())"
            )
            raise ConfigError(msg)
