"""What all codes share: a header with the finite flag, one power-of-two scale, blocks.

Layout of a code, in bytes (little-endian)::

    0     1 if all values were finite, 0 if not (then nothing else counts)
    1     the format
    2..3  exponent e: the format holds values * 2**e
    4..7  number of values (modulo 2**32)
    8..   the format's own body; the whole is padded to a multiple of 8

A power of two scales without rounding, so that gradients of 1e-9 and of 1e9 are coded
alike. Formats decode with products that float32 holds exactly and at most one rounding
addition: the same code then gives the same bits on every processor, with or without
fused multiply-add, and ranks on unlike hosts cannot drift apart.
"""

from __future__ import annotations

import math
import struct
import threading
from abc import ABC, abstractmethod
from typing import ClassVar

import torch

from geartrain.errors import CommunicationError, ConfigError

HEADER_BYTES = 8
BLOCK_ELEMENTS = 1 << 18
"""Coded at a time, so that intermediate values stay in the processor's cache."""

_HEADER = struct.Struct("<BBhI")
_PADDED_TO_BYTES = 8
_MAX_EXPONENT = 126
"""Larger powers of two, or their inverses, are no normal float32."""
_ALL_32_BITS = 0xFFFFFFFF
_LIMIT = 2.0**127
"""Values from here on count as infinite: rounded up they would overflow."""


class Scratch(threading.local):
    """Buffers that grow and are used again; each thread has its own."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, torch.dtype], torch.Tensor] = {}

    def get(self, name: str, num_elements: int, dtype: torch.dtype) -> torch.Tensor:
        """A buffer of that name, size and type; its content is undefined."""
        buffer = self._buffers.get((name, dtype))
        if buffer is None or buffer.numel() < num_elements:
            buffer = torch.empty(num_elements, dtype=dtype)
            self._buffers[name, dtype] = buffer
        return buffer[:num_elements]


class ChunkCodec(ABC):
    """A codec of float32 host tensors; one object serves several threads."""

    name: str
    format_id: ClassVar[int]
    row_elements: int = 1
    peak_exponent: ClassVar[int | None] = None
    """The largest magnitude is scaled to below 2**peak_exponent; None: not scaled."""

    def __init__(self) -> None:
        self._scratch = Scratch()

    def encoded_bytes(self, num_elements: int) -> int:
        """Size of the code of that many values; the same on all hosts."""
        size = HEADER_BYTES + self._body_bytes(num_elements)
        return -(-size // _PADDED_TO_BYTES) * _PADDED_TO_BYTES

    def encode(self, values: torch.Tensor, code: torch.Tensor) -> None:
        """Write the code of ``values`` (float32, (n,)) into ``code`` (uint8).

        Raises:
            ConfigError: If a tensor's type, shape or size is another.
        """
        self._check(values, code)
        num_elements = values.numel()
        coded_elements = num_elements & _ALL_32_BITS
        peak = _peak(values)
        if not peak < _LIMIT:  # also where it is NaN
            code.zero_()
            _write_header(code, (0, self.format_id, 0, coded_elements))
            return
        exponent = self._exponent(peak)
        _write_header(code, (1, self.format_id, exponent, coded_elements))
        body_stop = HEADER_BYTES + self._body_bytes(num_elements)
        if num_elements:
            self._write(values, code[HEADER_BYTES:body_stop], exponent)
        code[body_stop:].zero_()  # nothing of this process's memory leaves it

    def decode(self, code: torch.Tensor, values: torch.Tensor) -> None:
        """Write what ``code`` stands for into ``values`` (float32, (n,)).

        Raises:
            CommunicationError: If the code is of another format or size, or damaged.
            ConfigError: If a tensor's type, shape or size is another.
        """
        self._check(values, code)
        num_elements = values.numel()
        header = _HEADER.unpack(bytes(code[:HEADER_BYTES].tolist()))
        finite, format_id, exponent, coded_elements = header
        right = (format_id, coded_elements) == (
            self.format_id,
            num_elements & _ALL_32_BITS,
        )
        if not right or finite > 1 or abs(exponent) > _MAX_EXPONENT:
            msg = (
                f"a code's header is {header}, expected format {self.format_id} "
                f"({self.name}) of {num_elements} values; run the same version and plan "
                "on all members"
            )
            raise CommunicationError(msg)
        if not finite:
            values.fill_(math.nan)
        elif num_elements:
            body_stop = HEADER_BYTES + self._body_bytes(num_elements)
            self._read(code[HEADER_BYTES:body_stop], values, exponent)

    @abstractmethod
    def _body_bytes(self, num_elements: int) -> int:
        """Bytes after the header."""

    @abstractmethod
    def _write(self, values: torch.Tensor, body: torch.Tensor, exponent: int) -> None:
        """Code at least one finite value, each times 2**exponent; fill the body."""

    @abstractmethod
    def _read(self, body: torch.Tensor, values: torch.Tensor, exponent: int) -> None:
        """The reverse."""

    def _exponent(self, peak: float) -> int:
        if self.peak_exponent is None or peak == 0.0:
            return 0
        exponent = self.peak_exponent - math.frexp(peak)[1]
        return max(-_MAX_EXPONENT, min(_MAX_EXPONENT, exponent))

    def _check(self, values: torch.Tensor, code: torch.Tensor) -> None:
        num_bytes = self.encoded_bytes(values.numel())
        for tensor, dtype, size in (
            (values, torch.float32, values.numel()),
            (code, torch.uint8, num_bytes),
        ):
            is_plain = tensor.device.type == "cpu" and tensor.is_contiguous()
            if tensor.dtype != dtype or tensor.shape != (size,) or not is_plain:
                msg = (
                    f"codec {self.name}: got {tensor.dtype} {tuple(tensor.shape)} on "
                    f"{tensor.device}, expected contiguous {dtype} ({size},) on the host; "
                    "make the code with encoded_bytes(values.numel())"
                )
                raise ConfigError(msg)


def _peak(values: torch.Tensor) -> float:
    """The largest magnitude; NaN or infinite if any value is."""
    if values.numel() == 0:
        return 0.0
    low, high = torch.aminmax(values)  # passes NaN on, 10x faster than isfinite
    low_value, high_value = float(low), float(high)
    return math.nan if math.isnan(low_value) else max(-low_value, high_value)


def _write_header(code: torch.Tensor, fields: tuple[int, int, int, int]) -> None:
    header = bytearray(_HEADER.pack(*fields))
    code[:HEADER_BYTES] = torch.frombuffer(header, dtype=torch.uint8)
