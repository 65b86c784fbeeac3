"""8 and 4 bits a value, with a scale and a minimum for each row of values."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING

import torch

from geartrain.collectives.codecs.chunk_code import BLOCK_ELEMENTS, ChunkCodec
from geartrain.collectives.codecs.row_kernels import (
    BYTE_FIELDS_BYTES,
    NIBBLE_FIELDS_BYTES,
    pack_bytes,
    pack_nibbles,
    unpack_bytes,
    unpack_nibbles,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

_TAIL_MULTIPLE = 8
"""A last, shorter row is padded to this, so that its fields lie on whole words."""


class _RowCodec(ChunkCodec):
    """Full rows one after the other, then one shorter row for what is left."""

    @abstractmethod
    def _row_bytes(self, row_elements: int) -> int:
        """Size of the code of one row, its scale and minimum included."""

    @abstractmethod
    def _pack(self, rows: torch.Tensor, exponent: int) -> torch.Tensor:
        """Code float32 rows, shape (num_rows, row_elements), scaled by 2**exponent.

        Returns:
            uint8, shape (num_rows, bytes of a row).
        """

    @abstractmethod
    def _unpack(self, code: torch.Tensor, out: torch.Tensor, exponent: int) -> None:
        """Decode such rows into ``out``, shape (num_elements,), and undo the scale."""

    def _body_bytes(self, num_elements: int) -> int:
        full_rows, rest = divmod(num_elements, self.row_elements)
        tail_bytes = self._row_bytes(_padded(rest)) if rest else 0
        return full_rows * self._row_bytes(self.row_elements) + tail_bytes

    def _write(self, values: torch.Tensor, body: torch.Tensor, exponent: int) -> None:
        for start, stop, columns in self._blocks(values.numel()):
            rows = self._scratch.get("rows", -(-(stop - start) // columns) * columns, _F32)
            torch.mul(values[start:stop], 2.0**exponent, out=rows[: stop - start])
            # The tail's padding repeats a value, so that the row's range stays the same.
            rows[stop - start :] = rows[0]
            code = self._pack(rows.view(-1, columns), exponent).view(-1)
            first = self._body_bytes(start)
            body[first : first + code.numel()] = code

    def _read(self, body: torch.Tensor, values: torch.Tensor, exponent: int) -> None:
        for start, stop, columns in self._blocks(values.numel()):
            num_rows = -(-(stop - start) // columns)
            first = self._body_bytes(start)
            code = body[first : first + num_rows * self._row_bytes(columns)]
            self._unpack(code.view(num_rows, -1), values[start:stop], exponent)

    def _blocks(self, num_elements: int) -> Iterator[tuple[int, int, int]]:
        """Start, stop and row length of what is coded at a time."""
        full = num_elements - num_elements % self.row_elements
        for start in range(0, full, BLOCK_ELEMENTS):
            yield start, min(full, start + BLOCK_ELEMENTS), self.row_elements
        if full < num_elements:
            yield full, num_elements, _padded(num_elements - full)


class Int8Codec(_RowCodec):
    """8 bits a value, 8 bytes a row of 1,024: 0.252 of the bytes."""

    name = "int8"
    format_id = 3
    row_elements = 1024
    peak_exponent = 60
    """The kernel adds 1e-8 to a row's range: rows must be far above that."""

    def _row_bytes(self, row_elements: int) -> int:
        return row_elements + BYTE_FIELDS_BYTES

    def _pack(self, rows: torch.Tensor, exponent: int) -> torch.Tensor:
        code = pack_bytes(rows)
        fields = code.view(torch.float32)[:, -2:]
        fields.mul_(2.0**-exponent)  # in the fields: decoding needs no pass of its own
        # 16 bits of precision in the scale make code * scale exact in float32.
        scale = code.view(torch.int32)[:, -2]
        scale.add_(1 << 7).bitwise_and_(-1 << 8)
        return code

    def _unpack(self, code: torch.Tensor, out: torch.Tensor, exponent: int) -> None:
        del exponent  # the fields have it
        out.copy_(unpack_bytes(code).view(-1)[: out.numel()])


class Int4Codec(_RowCodec):
    """4 bits a value, 4 bytes a row of 256: 0.129 of the bytes."""

    name = "int4"
    format_id = 4
    row_elements = 256
    peak_exponent = 15
    """Scale and minimum are fp16 in this format."""

    def _row_bytes(self, row_elements: int) -> int:
        return row_elements // 2 + NIBBLE_FIELDS_BYTES

    def _pack(self, rows: torch.Tensor, exponent: int) -> torch.Tensor:
        del exponent  # fp16 fields could not hold it
        return pack_nibbles(rows)

    def _unpack(self, code: torch.Tensor, out: torch.Tensor, exponent: int) -> None:
        torch.mul(unpack_nibbles(code).view(-1)[: out.numel()], 2.0**-exponent, out=out)


_F32 = torch.float32


def _padded(num_elements: int) -> int:
    return -(-num_elements // _TAIL_MULTIPLE) * _TAIL_MULTIPLE
