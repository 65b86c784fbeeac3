"""Host memory that is used again and again, page-locked where a device copies to it."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

_ROUND_ELEMENTS = 4096


class HostBuffers:
    """Flat host tensors of a few sizes, which come back with every step.

    Page-locking costs milliseconds a buffer, so buffers are kept. Those of an aborted
    exchange are not given back, since a copy may still be under way.

    Args:
        allocate: Makes a tensor of so many elements of a dtype.
    """

    def __init__(self, allocate: Callable[[int, torch.dtype], torch.Tensor]) -> None:
        self._allocate = allocate
        self._free: dict[tuple[int, torch.dtype], list[torch.Tensor]] = {}
        self._lock = threading.Lock()

    def take(self, num_elements: int, dtype: torch.dtype) -> torch.Tensor:
        """A tensor of shape (num_elements,), contents undefined."""
        capacity = -(-num_elements // _ROUND_ELEMENTS) * _ROUND_ELEMENTS
        with self._lock:
            free = self._free.get((capacity, dtype))
            found = free.pop() if free else None
        if found is None:
            found = self._allocate(capacity, dtype)
        return found[:num_elements]

    def give(self, buffer: torch.Tensor) -> None:
        """Take back what ``take`` gave; nobody uses it any more."""
        whole = buffer._base if buffer._base is not None else buffer  # noqa: SLF001 - the
        # tensor that a view was made of has no public name.
        with self._lock:
            self._free.setdefault((whole.numel(), whole.dtype), []).append(whole)

    def clear(self) -> None:
        """Forget all that is free."""
        with self._lock:
            self._free.clear()
