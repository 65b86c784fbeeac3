"""One byte a value: 4 exponent and 3 mantissa bits (e4m3), a scale for each row."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from geartrain.collectives.codecs.chunk_code import BLOCK_ELEMENTS, ChunkCodec

if TYPE_CHECKING:
    from collections.abc import Iterator

_ROW_PEAK_EXPONENT = 8
"""e4m3 ends at 448; a row's largest magnitude is scaled to below 2**8."""
_EXPONENT_BITS_APART = 8
"""The exponent bias of fp16 (15) less that of e4m3 (7)."""
_FP16_WITHOUT_TOP_EXPONENT_BIT = ~0x4000
_MAX_ROW_EXPONENT = 126


class Fp8Codec(ChunkCodec):
    """e4m3 with a power of two as scale of each 1,024 values: 0.251 of the bytes.

    Small values of a row keep their relative precision, which 8-bit integers lose; the
    large ones have 3 bits where integers have 7.
    """

    name = "fp8"
    format_id = 5
    row_elements = 1024

    def _body_bytes(self, num_elements: int) -> int:
        return num_elements + _num_rows(num_elements)

    def _write(self, values: torch.Tensor, body: torch.Tensor, exponent: int) -> None:
        del exponent  # each row has its own
        rows_at = values.numel()
        for start, stop, columns in _blocks(values.numel()):
            rows = values[start:stop].view(-1, columns)
            # Apart: aminmax along a dimension is 20x slower.
            peaks = torch.maximum(rows.amin(dim=1).neg_(), rows.amax(dim=1))
            exponents = _ROW_PEAK_EXPONENT - torch.frexp(peaks).exponent
            exponents.clamp_(-_MAX_ROW_EXPONENT, _MAX_ROW_EXPONENT)
            scaled = self._scratch.get("scaled", stop - start, torch.float32)
            torch.mul(rows, _powers_of_two(exponents), out=scaled.view(rows.shape))
            coded = self._scratch.get("coded", stop - start, torch.float8_e4m3fn)
            coded.copy_(scaled)
            body[start:stop] = coded.view(torch.uint8)
            first = rows_at + start // self.row_elements
            body[first : first + len(rows)] = exponents.to(torch.int8).view(torch.uint8)

    def _read(self, body: torch.Tensor, values: torch.Tensor, exponent: int) -> None:
        del exponent  # each row has its own
        rows_at = values.numel()
        for start, stop, columns in _blocks(values.numel()):
            rows = values[start:stop].view(-1, columns)
            first = rows_at + start // self.row_elements
            exponents = body[first : first + len(rows)].view(torch.int8)
            # e4m3's bits, moved up by 7, are those of an fp16 of 2**-8 the value; torch's
            # own cast is 9x slower.
            bits = self._scratch.get("bits", stop - start, torch.int16)
            bits.copy_(body[start:stop].view(torch.int8))
            bits.bitwise_left_shift_(7).bitwise_and_(_FP16_WITHOUT_TOP_EXPONENT_BIT)
            values[start:stop].copy_(bits.view(torch.float16))
            rows.mul_(_powers_of_two(_EXPONENT_BITS_APART - exponents.to(torch.int32)))


def _blocks(num_elements: int) -> Iterator[tuple[int, int, int]]:
    """Start, stop and row length of what is coded at a time; rows are not padded."""
    full = num_elements - num_elements % Fp8Codec.row_elements
    for start in range(0, full, BLOCK_ELEMENTS):
        yield start, min(full, start + BLOCK_ELEMENTS), Fp8Codec.row_elements
    if full < num_elements:
        yield full, num_elements, num_elements - full


def _num_rows(num_elements: int) -> int:
    return -(-num_elements // Fp8Codec.row_elements)


def _powers_of_two(exponents: torch.Tensor) -> torch.Tensor:
    """2**exponents as float32, shape (num_rows, 1), exactly."""
    return torch.ldexp(torch.ones(len(exponents)), exponents).unsqueeze(1)
