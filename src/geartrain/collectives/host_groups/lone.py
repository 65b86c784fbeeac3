"""A process that is alone on its host, or stands for itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

from geartrain.collectives.host_groups.host_buffers import HostBuffers
from geartrain.collectives.host_groups.staging import DeviceStreams, streams_of
from geartrain.collectives.host_groups.sum_dtype import put_weighted, scale_, sum_dtype
from geartrain.errors import CommunicationError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from geartrain.collectives.host_groups.protocol import HostExchange
    from geartrain.collectives.host_groups.staging import Copied

_AHEAD = 2
"""Chunks that are fetched from the device before they are asked for."""


class LoneGroup:
    """The group of one process.

    A float32 or float64 tensor in host memory is exchanged where it is. Every other
    tensor goes through host memory of the group's own: a whole float32 (float64)
    tensor, page-locked for a device and used again for the next tensor of that size,
    plus 16-bit buffers of one chunk each. The next chunk leaves the device while the one
    before is exchanged.

    Args:
        make_streams: How to copy from and to a device.
    """

    is_leader = True
    num_members = 1

    def __init__(
        self, make_streams: Callable[[torch.device], DeviceStreams] = streams_of
    ) -> None:
        self._make_streams = make_streams
        self._paths: dict[torch.device, tuple[DeviceStreams, HostBuffers]] = {}
        self._is_over = False

    def open(
        self, tensor: torch.Tensor, chunks: Sequence[tuple[int, int]], weight: float = 1.0
    ) -> HostExchange:
        """Begin with one flat contiguous tensor.

        To be called in the thread that produced it: a device's copies follow what that
        thread has queued so far.

        Raises:
            ConfigError: If the dtype cannot be summed.
            CommunicationError: If the group was aborted or closed.
        """
        if self._is_over:
            msg = "the exchange of this host was aborted or closed; rebuild it"
            raise CommunicationError(msg)
        tensor = tensor.detach()
        if tensor.device.type == "cpu" and sum_dtype(tensor.dtype) == tensor.dtype:
            return _InPlace(tensor, chunks, weight)
        streams, buffers = self._path(tensor.device)
        return StagedExchange(tensor, chunks, weight, streams, buffers)

    def abort(self) -> None:
        """Nobody waits in here: a single process waits for its own device only."""
        self._is_over = True

    def close(self) -> None:
        """Give host memory back."""
        self._is_over = True
        self._paths.clear()

    def _path(self, device: torch.device) -> tuple[DeviceStreams, HostBuffers]:
        if device not in self._paths:
            streams = self._make_streams(device)
            self._paths[device] = (streams, HostBuffers(streams.allocate))
        return self._paths[device]


class _InPlace:
    """A host tensor that is exchanged where it is."""

    def __init__(
        self, tensor: torch.Tensor, chunks: Sequence[tuple[int, int]], weight: float
    ) -> None:
        self._tensor = tensor
        self._chunks = chunks
        self._weight = weight

    @property
    def host_tensor(self) -> torch.Tensor | None:
        """The tensor itself."""
        return self._tensor

    def reduce(self, chunk_index: int) -> None:
        """Multiply the chunk by its weight."""
        start, stop = self._chunks[chunk_index]
        scale_(self._tensor[start:stop], self._weight)

    def publish(self, chunk_index: int) -> None:
        """Leave the chunk where it is."""

    def finish(self) -> None:
        """Nothing was taken."""


class StagedExchange:
    """A tensor that is exchanged in another place or dtype than its own.

    Args:
        tensor: Shape (num_elements,), on any device.
        chunks: ``(start, stop)`` elements of each chunk.
        weight: Of this member's part.
        streams: Copies from and to the tensor's device.
        buffers: Host memory for it.
    """

    def __init__(
        self,
        tensor: torch.Tensor,
        chunks: Sequence[tuple[int, int]],
        weight: float,
        streams: DeviceStreams,
        buffers: HostBuffers,
    ) -> None:
        self._tensor = tensor
        self._chunks = chunks
        self._weight = weight
        self._streams = streams
        self._buffers = buffers
        dtype = sum_dtype(tensor.dtype)
        self._host: torch.Tensor | None = buffers.take(tensor.numel(), dtype)
        self._widens = dtype != tensor.dtype
        self._fetched: dict[int, tuple[torch.Tensor, Copied]] = {}
        # 16-bit chunks: one buffer for each that is fetched ahead, one for the way back.
        self._narrow: list[torch.Tensor] = []
        if self._widens:
            longest = max((stop - start for start, stop in chunks), default=0)
            count = min(_AHEAD, len(chunks)) + 1
            self._narrow = [buffers.take(longest, tensor.dtype) for _ in range(count)]
        streams.follow_producer()
        for index in range(min(_AHEAD, len(chunks))):
            self._fetch(index)

    @property
    def host_tensor(self) -> torch.Tensor | None:
        """The copy in host memory, float32 for 16-bit tensors."""
        return self._host

    def reduce(self, chunk_index: int) -> None:
        """Block until the host tensor holds the weighted chunk."""
        start, stop = self._chunks[chunk_index]
        host = self._held()[start:stop]
        if self._weight == 0:
            host.zero_()
        else:
            arrived, copied = self._fetched.pop(chunk_index)
            copied.synchronize()
            if self._widens:
                put_weighted(host, arrived, self._weight)
        if chunk_index + _AHEAD < len(self._chunks):
            self._fetch(chunk_index + _AHEAD)

    def publish(self, chunk_index: int) -> None:
        """Block until the tensor holds the host tensor's chunk."""
        start, stop = self._chunks[chunk_index]
        host = self._held()[start:stop]
        if self._widens:
            host = self._narrow[-1][: stop - start].copy_(host)
        self._streams.copy_back(self._tensor[start:stop], host).synchronize()

    def finish(self) -> None:
        """Give the host memory back for the next tensor."""
        for buffer in self._narrow:
            self._buffers.give(buffer)
        self._narrow = []
        self._buffers.give(self._held())
        self._host = None

    def _held(self) -> torch.Tensor:
        assert self._host is not None, "the exchange is finished"
        return self._host

    def _fetch(self, index: int) -> None:
        """Start bringing a chunk to the host; a weight of 0 brings nothing."""
        if self._weight == 0:
            return
        start, stop = self._chunks[index]
        part = self._tensor[start:stop]
        if self._widens:
            # The weight is applied in float32, on the host, to be rounded once.
            target = self._narrow[index % _AHEAD][: stop - start]
        else:
            with self._streams.out():
                scale_(part, self._weight)
            target = self._held()[start:stop]
        self._fetched[index] = (target, self._streams.copy_out(target, part))
