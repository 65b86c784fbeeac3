"""Copies between a device and host memory, beside the computation.

Written on what ``torch.cuda`` (CUDA and ROCm), ``torch.xpu`` and ``torch.npu`` have in
common: ``Stream``, ``Event``, ``stream()``, ``current_stream()``. Devices without
streams of their own (MPS, XLA) are copied in place of the caller.
"""

from __future__ import annotations

import contextlib
import logging
from typing import TYPE_CHECKING, Any, Protocol

import torch

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

logger = logging.getLogger(__name__)


class Copied(Protocol):
    """A copy under way."""

    def synchronize(self) -> None:
        """Block until it is done."""


class DeviceStreams(Protocol):
    """Two queues of work beside the computation: off the device, and back."""

    def follow_producer(self) -> None:
        """Let what comes wait for what this thread has queued on the device so far.

        To be called in the thread that produced the tensors.
        """

    def out(self) -> AbstractContextManager[object]:
        """Device work in here goes to the queue off the device."""

    def back(self) -> AbstractContextManager[object]:
        """Device work in here goes to the queue back to the device."""

    def copy_out(self, target: torch.Tensor, source: torch.Tensor) -> Copied:
        """Start copying from the device to page-locked memory."""

    def copy_back(self, target: torch.Tensor, source: torch.Tensor) -> Copied:
        """Start copying from page-locked memory to the device."""

    def wait_back(self) -> None:
        """Block until the queue back to the device is empty."""

    def allocate(self, num_elements: int, dtype: torch.dtype) -> torch.Tensor:
        """Host memory that the device copies to without an intermediate stop."""


def streams_of(device: torch.device) -> DeviceStreams:
    """The queues of a device of any kind."""
    space = getattr(torch, device.type, None)
    names = ("Stream", "Event", "stream", "current_stream")
    if device.type != "cpu" and all(hasattr(space, name) for name in names):
        return SideStreams(space, device)
    return NoStreams(device)


class SideStreams:
    """Streams of a device whose torch module has them.

    Args:
        space: ``torch.cuda``, ``torch.xpu`` or ``torch.npu``.
        device: One device of that kind.
    """

    def __init__(
        self,
        space: Any,  # Any: a module, or a stand-in with its names
        device: torch.device,
    ) -> None:
        self._space = space
        self._device = device
        # Two, so that copies in both directions overlap: links are full duplex.
        self._out = space.Stream(device=device)
        self._back = space.Stream(device=device)

    def follow_producer(self) -> None:
        """Let both queues wait for the work queued so far by this thread."""
        current = self._space.current_stream(self._device)
        self._out.wait_stream(current)
        self._back.wait_stream(current)

    def out(self) -> AbstractContextManager[object]:
        """Device work in here goes to the queue off the device."""
        return self._enter(self._out)

    def back(self) -> AbstractContextManager[object]:
        """Device work in here goes to the queue back to the device."""
        return self._enter(self._back)

    def copy_out(self, target: torch.Tensor, source: torch.Tensor) -> Copied:
        """Start copying from the device to page-locked memory."""
        return self._copy(self._out, target, source)

    def copy_back(self, target: torch.Tensor, source: torch.Tensor) -> Copied:
        """Start copying from page-locked memory to the device."""
        return self._copy(self._back, target, source)

    def wait_back(self) -> None:
        """Block until the queue back to the device is empty."""
        self._back.synchronize()

    def allocate(self, num_elements: int, dtype: torch.dtype) -> torch.Tensor:
        """Page-locked host memory; pageable, with a warning, where there is none."""
        try:
            return torch.empty(num_elements, dtype=dtype, pin_memory=True)
        except RuntimeError as error:  # NotImplementedError is one
            logger.warning(
                "no page-locked memory for %s (%s): copies to the host will be slower",
                self._device,
                error,
            )
            return torch.empty(num_elements, dtype=dtype)

    def _enter(self, stream: object) -> AbstractContextManager[object]:
        entered: AbstractContextManager[object] = self._space.stream(stream)
        return entered

    def _copy(self, stream: Any, target: torch.Tensor, source: torch.Tensor) -> Copied:
        # Any: a stream class of that device's module.
        with self._space.stream(stream):
            target.copy_(source, non_blocking=True)
            event = self._space.Event()
            event.record(stream)
        copied: Copied = event
        return copied


class _Done:
    """A copy that was done at once."""

    def synchronize(self) -> None:
        pass


class NoStreams:
    """Copies that block, for devices without streams.

    Args:
        device: Any device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def follow_producer(self) -> None:
        """Nothing to order: every operation follows the one before."""

    def out(self) -> AbstractContextManager[object]:
        """Device work in here goes to the device's only queue."""
        return contextlib.nullcontext()

    def back(self) -> AbstractContextManager[object]:
        """Device work in here goes to the device's only queue."""
        return contextlib.nullcontext()

    def copy_out(self, target: torch.Tensor, source: torch.Tensor) -> Copied:
        """Copy from the device."""
        target.copy_(source)
        return _Done()

    def copy_back(self, target: torch.Tensor, source: torch.Tensor) -> Copied:
        """Copy to the device."""
        target.copy_(source)
        return _Done()

    def wait_back(self) -> None:
        """Nothing is left to do: every copy blocked."""

    def allocate(self, num_elements: int, dtype: torch.dtype) -> torch.Tensor:
        """Ordinary host memory."""
        return torch.empty(num_elements, dtype=dtype)
