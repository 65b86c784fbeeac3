"""Two bytes a value: fp16 (11 bits of precision) and bf16 (8 bits)."""

from __future__ import annotations

from typing import ClassVar

import torch

from geartrain.collectives.codecs.chunk_code import BLOCK_ELEMENTS, ChunkCodec

_BYTES_PER_ELEMENT = 2


class _HalfCodec(ChunkCodec):
    """Values rounded to a 16-bit type."""

    dtype: ClassVar[torch.dtype]

    def _body_bytes(self, num_elements: int) -> int:
        return _BYTES_PER_ELEMENT * num_elements

    def _write(self, values: torch.Tensor, body: torch.Tensor, exponent: int) -> None:
        for start in range(0, values.numel(), BLOCK_ELEMENTS):
            block = values[start : start + BLOCK_ELEMENTS]
            half = self._scratch.get("half", block.numel(), self.dtype)
            if exponent:
                scaled = self._scratch.get("scaled", block.numel(), torch.float32)
                block = torch.mul(block, 2.0**exponent, out=scaled)
            half.copy_(block)
            first = _BYTES_PER_ELEMENT * start
            body[first : first + _BYTES_PER_ELEMENT * half.numel()] = half.view(torch.uint8)

    def _read(self, body: torch.Tensor, values: torch.Tensor, exponent: int) -> None:
        for start in range(0, values.numel(), BLOCK_ELEMENTS):
            block = values[start : start + BLOCK_ELEMENTS]
            half = self._scratch.get("half", block.numel(), self.dtype)
            first = _BYTES_PER_ELEMENT * start
            coded = body[first : first + _BYTES_PER_ELEMENT * half.numel()]
            half.view(torch.uint8).copy_(coded)  # the code may start at an odd address
            block.copy_(half)
            if exponent:
                block.mul_(2.0**-exponent)


class Fp16Codec(_HalfCodec):
    """fp16 with one scale a chunk, so that its narrow range never matters."""

    name = "fp16"
    format_id = 1
    dtype = torch.float16
    peak_exponent = 15
    """fp16 ends at 65,504, just below 2**16."""


class Bf16Codec(_HalfCodec):
    """bf16; it has float32's range."""

    name = "bf16"
    format_id = 2
    dtype = torch.bfloat16
