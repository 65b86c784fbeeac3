"""Receive buffers, used again from chunk to chunk and from step to step."""

from __future__ import annotations

import threading
from collections import OrderedDict

import torch

_KEPT_BYTES = 256 * 2**20
"""Fits the chunks in flight of a 1 GiB bucket; beyond it the oldest are freed."""


class BufferPool:
    """Host tensors by size, for several threads.

    A buffer that a message of a failed exchange may still land in is never given back,
    so nobody gets it a second time.
    """

    def __init__(self, kept_bytes: int = _KEPT_BYTES) -> None:
        self._lock = threading.Lock()
        self._kept_bytes = kept_bytes
        self._free: OrderedDict[tuple[torch.dtype, int], list[torch.Tensor]] = OrderedDict()
        self._free_bytes = 0

    @property
    def free_bytes(self) -> int:
        """Memory kept for later."""
        return self._free_bytes

    def take(self, num_elements: int, dtype: torch.dtype) -> torch.Tensor:
        """A buffer of shape (num_elements,) with anything in it."""
        with self._lock:
            free = self._free.get((dtype, num_elements))
            if free:
                self._free.move_to_end((dtype, num_elements))
                buffer = free.pop()
                self._free_bytes -= buffer.nbytes
                return buffer
        return torch.empty(num_elements, dtype=dtype)

    def give(self, buffer: torch.Tensor) -> None:
        """Give a buffer back that nothing reads or writes any more."""
        with self._lock:
            key = (buffer.dtype, buffer.numel())
            self._free.setdefault(key, []).append(buffer)
            self._free.move_to_end(key)
            self._free_bytes += buffer.nbytes
            while self._free_bytes > self._kept_bytes:
                oldest = next(iter(self._free))
                dropped = self._free[oldest]
                if not dropped:
                    del self._free[oldest]
                    continue
                self._free_bytes -= dropped.pop().nbytes

    def clear(self) -> None:
        """Free what is kept."""
        with self._lock:
            self._free.clear()
            self._free_bytes = 0
