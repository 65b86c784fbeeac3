"""Processes of one host that add up their gradients in shared memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from geartrain.collectives.host_groups.host_buffers import HostBuffers
from geartrain.collectives.host_groups.shared_segment import (
    SharedSegment,
    num_header_bytes,
)
from geartrain.collectives.host_groups.shared_sum import Part, SlicedSum, WholeSum
from geartrain.collectives.host_groups.slices import cut_pieces, normalised
from geartrain.collectives.host_groups.slots import (
    COUNTERS_PER_LANE,
    Lane,
    LaneLayout,
)
from geartrain.collectives.host_groups.sum_dtype import sum_dtype

if TYPE_CHECKING:
    from collections.abc import Sequence

    from geartrain.collectives.host_groups.meeting import Meeting
    from geartrain.collectives.host_groups.protocol import HostExchange

_NUM_SLOTS = 3
"""One for each step of a sum: filled, added, taken."""
_NUM_SMALL_SLOTS = 8
_SLICED_BYTES = 40 * 2**20
"""All slots of sliced sums together."""
_MAX_PIECE_BYTES = 4 * 2**20
"""Smaller pieces stay in the cache but make processes wait more often: on 2 cores, 4
processes and 25 MB, pieces of 0.5 MiB took 31-35 ms, of 2 MiB and more 15-20."""
_MIN_PIECE_BYTES = 64 * 2**10
_MAX_SMALL_BYTES = 128 * 2**10
_SMALL_ROWS_BYTES = 512 * 2**10
"""Up to here a member adds all rows itself sooner than it meets the others again."""
_NUM_PUBLISH_SLOTS = 4
_PUBLISH_BYTES = 2**20
_ALIGN_BYTES = 128


class SharedMemoryGroup:
    """Several processes of one host, as one member of the exchange between hosts.

    Sums are taken in the members' order, in float32 for 16-bit tensors, and rounded
    once: the same bits on all members, whatever their slices. Tensors on a device are
    copied through the shared memory.

    All members make it at the same time. The memory belongs to no file, so nothing is
    left behind however the processes end. It takes up to 45 MiB a host, which the kernel
    charges to the cgroup of whoever writes a page first.

    Args:
        meeting: The processes and how they meet; the first one leads.
        only_host: Whether this host is the whole world. Then ``reduce`` already leaves
            the sum in every member's tensor, ``publish`` has nothing to do, and there is
            no host tensor, since there is nobody to exchange it with.
        slice_shares: What part of a sum each member adds, for devices of unequal speed,
            in proportion to their share of the host's cores; None for equal parts.

    Raises:
        CommunicationError: If the others did not come in time.
    """

    def __init__(
        self,
        meeting: Meeting,
        *,
        only_host: bool = False,
        slice_shares: Sequence[float] | None = None,
    ) -> None:
        num = len(meeting.names)
        shares = normalised(slice_shares or [1.0] * num, num)
        sliced, whole, publish, num_bytes = _layouts(num, has_publish=not only_host)
        self._segment = SharedSegment(meeting, num_bytes)
        self._only_host = only_host
        self._sliced_lane = Lane(self._segment, sliced)
        self._sliced = SlicedSum(self._segment, self._sliced_lane, shares)
        self._whole_lane = Lane(self._segment, whole)
        self._whole = WholeSum(self._segment, self._whole_lane)
        self._publisher = None if only_host else Publisher(self._segment, publish)
        self._buffers = HostBuffers(lambda num, dtype: torch.empty(num, dtype=dtype))

    @property
    def is_leader(self) -> bool:
        """Whether this process speaks for the host."""
        return self._segment.index == 0

    @property
    def num_members(self) -> int:
        """Processes on this host."""
        return self._segment.num_members

    def open(
        self, tensor: torch.Tensor, chunks: Sequence[tuple[int, int]], weight: float = 1.0
    ) -> HostExchange:
        """Begin with one flat contiguous tensor; all members in the same order.

        Raises:
            ConfigError: If the dtype cannot be summed.
            CommunicationError: If the group was aborted.
        """
        self._segment.raise_if_aborted()
        return _SharedExchange(self, tensor.detach(), chunks, weight)

    def abort(self) -> None:
        """Wake whoever waits in this group with a CommunicationError."""
        self._segment.abort()

    def close(self) -> None:
        """Leave the group; members that are still busy are not disturbed."""
        self._segment.close()
        self._buffers.clear()

    def host_tensor(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Memory for what the leader exchanges with other hosts."""
        if not self.is_leader or self._only_host:
            return None
        if _is_plain(tensor):
            return tensor
        return self._buffers.take(tensor.numel(), sum_dtype(tensor.dtype))

    def give_back(self, host_tensor: torch.Tensor) -> None:
        """Take a host tensor back that is not the member's own."""
        self._buffers.give(host_tensor)

    def sum_range(
        self,
        source: torch.Tensor,
        target: torch.Tensor | None,
        weight: float,
    ) -> None:
        """Add up one chunk over the members."""
        dtype = sum_dtype(source.dtype)
        num = source.numel()
        if num <= self._whole_lane.piece_elements(dtype):
            self._whole.run(Part(source, target, weight, dtype))
            return
        pieces = cut_pieces(0, num, self._sliced_lane.piece_elements(dtype))
        self._sliced.run(
            [
                Part(
                    source[start:stop],
                    None if target is None else target[start:stop],
                    weight,
                    dtype,
                )
                for start, stop in pieces
            ]
        )

    def sum_target(
        self, tensor: torch.Tensor, host_tensor: torch.Tensor | None
    ) -> torch.Tensor | None:
        """Where this member wants the sum: nowhere, if another host's is to be added."""
        return tensor if self._only_host else host_tensor

    def publish_range(self, part: torch.Tensor, host_part: torch.Tensor | None) -> None:
        """Bring the leader's chunk to all members."""
        if self._publisher is not None:
            self._publisher.run(part, host_part)


class _SharedExchange:
    """One tensor on its way through shared memory."""

    def __init__(
        self,
        group: SharedMemoryGroup,
        tensor: torch.Tensor,
        chunks: Sequence[tuple[int, int]],
        weight: float,
    ) -> None:
        sum_dtype(tensor.dtype)
        self._group = group
        self._tensor = tensor
        self._chunks = chunks
        self._weight = weight
        self._host_tensor = group.host_tensor(tensor)
        self._target = group.sum_target(tensor, self._host_tensor)

    @property
    def host_tensor(self) -> torch.Tensor | None:
        """On the leader the flat host-memory tensor, shape (num_elements,); else None."""
        return self._host_tensor

    def reduce(self, chunk_index: int) -> None:
        """Block until the leader's chunk holds the group's sum, added in rank order."""
        start, stop = self._chunks[chunk_index]
        target = None if self._target is None else self._target[start:stop]
        self._group.sum_range(self._tensor[start:stop], target, self._weight)

    def publish(self, chunk_index: int) -> None:
        """Block until this member's own tensor holds the leader's chunk."""
        start, stop = self._chunks[chunk_index]
        host = self._host_tensor
        host_part = None if host is None else host[start:stop]
        self._group.publish_range(self._tensor[start:stop], host_part)

    def finish(self) -> None:
        """Give scratch memory back."""
        host, self._host_tensor = self._host_tensor, None
        if host is not None and host is not self._tensor:
            self._group.give_back(host)


class Publisher:
    """The leader's chunks on their way to all members, in the tensor's own dtype.

    Args:
        segment: The processes.
        layout: A lane of one row.
    """

    def __init__(self, segment: SharedSegment, layout: LaneLayout) -> None:
        self._segment = segment
        self._lane = Lane(segment, layout)

    def run(self, part: torch.Tensor, host_part: torch.Tensor | None) -> None:
        """Copy a chunk from the leader's host tensor to every member's tensor.

        Args:
            part: This member's chunk, shape (num_elements,), which is overwritten.
            host_part: On the leader, what it is overwritten with.

        Raises:
            CommunicationError: If a member was lost or late.
        """
        size = self._lane.piece_elements(part.dtype)
        for start, stop in cut_pieces(0, part.numel(), size):
            if host_part is None:
                self._receive(part[start:stop])
            else:
                self._send(part[start:stop], host_part[start:stop])

    def _send(self, part: torch.Tensor, host_part: torch.Tensor) -> None:
        lane, num = self._lane, part.numel()
        number = lane.begin_piece()
        lane.label(number, 0, num, part.dtype)
        row = lane.row(number, 0, part.dtype)[:num]
        row.copy_(host_part)
        lane.say_filled()
        if part.data_ptr() != host_part.data_ptr():
            part.copy_(row)
        lane.say_done()

    def _receive(self, part: torch.Tensor) -> None:
        lane, num = self._lane, part.numel()
        number = lane.next_piece()
        lane.wait_filled(number, 0)
        lane.expect(number, 0, num, part.dtype, 0)
        part.copy_(lane.row(number, 0, part.dtype)[:num])
        lane.say_done()


def _is_plain(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu" and sum_dtype(tensor.dtype) == tensor.dtype


def _layouts(
    num_members: int, *, has_publish: bool
) -> tuple[LaneLayout, LaneLayout, LaneLayout, int]:
    """Lanes for sliced sums, whole sums and publishing, and the segment's size."""
    piece_bytes = _SLICED_BYTES // (_NUM_SLOTS * (num_members + 1))
    piece_bytes = min(max(piece_bytes, _MIN_PIECE_BYTES), _MAX_PIECE_BYTES)
    small_bytes = min(_SMALL_ROWS_BYTES // num_members, _MAX_SMALL_BYTES)
    sizes = (
        (_NUM_SLOTS, num_members + 1, piece_bytes),
        (_NUM_SMALL_SLOTS, num_members, small_bytes),
        (_NUM_PUBLISH_SLOTS if has_publish else 0, 1, _PUBLISH_BYTES),
    )
    layouts = []
    offset = num_header_bytes(num_members)
    for index, (num_slots, num_rows, num_bytes) in enumerate(sizes):
        layout = LaneLayout(
            offset_bytes=offset,
            first_counter=1 + index * COUNTERS_PER_LANE,
            num_slots=num_slots,
            num_rows=num_rows,
            piece_bytes=max(num_bytes // _ALIGN_BYTES, 1) * _ALIGN_BYTES,
        )
        layouts.append(layout)
        offset += layout.num_bytes
    sliced, whole, publish = layouts
    return sliced, whole, publish, offset
