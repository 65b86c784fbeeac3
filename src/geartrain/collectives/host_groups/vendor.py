"""Accelerators of one vendor in one host, as one member of the exchange between hosts.

A chunk is added up by the vendor's reduce-scatter. Each process then brings its shard to
host memory that all share, over its own PCIe link; the leader picks them up. On the way
back each process fetches its shard, and the vendor's all-gather spreads the rest.
"""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from geartrain.collectives.host_groups.host_buffers import HostBuffers
from geartrain.collectives.host_groups.shared_segment import (
    SharedSegment,
    num_header_bytes,
)
from geartrain.collectives.host_groups.slices import cut_pieces
from geartrain.collectives.host_groups.slots import COUNTERS_PER_LANE, Lane, LaneLayout
from geartrain.collectives.host_groups.staging import streams_of
from geartrain.collectives.host_groups.sum_dtype import put_weighted, sum_dtype
from geartrain.errors import CommunicationError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from geartrain.collectives.host_groups.meeting import Meeting
    from geartrain.collectives.host_groups.protocol import HostExchange
    from geartrain.collectives.host_groups.staging import DeviceStreams
    from geartrain.collectives.host_groups.vendor_link import VendorLink

_NUM_SLOTS = 3
_PIECE_BYTES = 4 * 2**20
"""Long enough that a kernel's start (tens of microseconds) does not count."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VendorLinks:
    """Two communicators, since sums and publishing run in threads of their own.

    One communicator must get its operations in the same order on every member, which two
    threads cannot promise.
    """

    reduce: VendorLink
    publish: VendorLink


class VendorGroup:
    """Processes of one host whose accelerators share a vendor's library.

    16-bit tensors are widened on the device and added in float32, and rounded once, by
    the leader. A shard is added by one member, so all members get the same bits; the
    order is the vendor's, the same from run to run for the same devices.

    Args:
        meeting: The processes and how they meet; the first one leads.
        links: The vendor's collectives among them.
        device: This process's.
    """

    def __init__(self, meeting: Meeting, links: VendorLinks, device: torch.device) -> None:
        out, back, num_bytes = _layouts(len(meeting.names))
        self._segment = SharedSegment(meeting, num_bytes)
        self._links = links
        self._streams = streams_of(device)
        self._buffers = HostBuffers(self._streams.allocate)
        self._collector = Collector(
            self._segment, Lane(self._segment, out), links.reduce, self._streams
        )
        self._spreader = Spreader(
            self._segment, Lane(self._segment, back), links.publish, self._streams
        )

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

        To be called in the thread that produced it.

        Raises:
            ConfigError: If the dtype cannot be summed.
            CommunicationError: If the group was aborted.
        """
        self._segment.raise_if_aborted()
        self._streams.follow_producer()
        host = None
        if self.is_leader:
            host = self._buffers.take(tensor.numel(), sum_dtype(tensor.dtype))
        return _VendorExchange(
            self._collector,
            self._spreader,
            self._buffers,
            tensor.detach(),
            host,
            chunks,
            weight,
        )

    def abort(self) -> None:
        """Wake whoever waits in this group with a CommunicationError."""
        self._segment.abort()
        for link in (self._links.reduce, self._links.publish):
            with contextlib.suppress(CommunicationError):  # it is given up in any case
                link.abort()

    def close(self) -> None:
        """Leave the group; members that are still busy are not disturbed."""
        self._segment.close()
        self._buffers.clear()


class _VendorExchange:
    """One tensor on its way through the vendor's collectives."""

    def __init__(  # noqa: PLR0913, PLR0917 - private, made in one place
        self,
        collector: Collector,
        spreader: Spreader,
        buffers: HostBuffers,
        tensor: torch.Tensor,
        host_tensor: torch.Tensor | None,
        chunks: Sequence[tuple[int, int]],
        weight: float,
    ) -> None:
        sum_dtype(tensor.dtype)
        self._collector = collector
        self._spreader = spreader
        self._buffers = buffers
        self._tensor = tensor
        self._host = host_tensor
        self._chunks = chunks
        self._weight = weight

    @property
    def host_tensor(self) -> torch.Tensor | None:
        """On the leader the flat host-memory tensor, shape (num_elements,); else None."""
        return self._host

    def reduce(self, chunk_index: int) -> None:
        """Block until the leader's chunk holds the group's sum."""
        start, stop = self._chunks[chunk_index]
        host = None if self._host is None else self._host[start:stop]
        self._collector.run(self._tensor[start:stop], host, self._weight)

    def publish(self, chunk_index: int) -> None:
        """Block until this member's own tensor holds the leader's chunk."""
        start, stop = self._chunks[chunk_index]
        host = None if self._host is None else self._host[start:stop]
        self._spreader.run(self._tensor[start:stop], host)

    def finish(self) -> None:
        """Give the leader's host memory back."""
        if self._host is not None:
            self._buffers.give(self._host)
            self._host = None


class _Shards:
    """Device memory for a piece in equal shards, padded to a multiple."""

    def __init__(self, num_members: int) -> None:
        self._num = num_members
        self._kept: dict[tuple[torch.dtype, torch.device], torch.Tensor] = {}

    def of(self, part: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, int]:
        """Memory of shape (num_members * shard_elements,), and shard_elements."""
        shard = max(1, math.ceil(part.numel() / self._num))
        key = (dtype, part.device)
        kept = self._kept.get(key)
        if kept is None or kept.numel() < shard * self._num:
            kept = torch.empty(shard * self._num, dtype=dtype, device=part.device)
            self._kept[key] = kept
        return kept[: shard * self._num], shard


class Collector:
    """Sums on their way from the devices to the leader's host memory."""

    def __init__(
        self, segment: SharedSegment, lane: Lane, link: VendorLink, streams: DeviceStreams
    ) -> None:
        self._segment = segment
        self._lane = lane
        self._link = link
        self._streams = streams
        self._parts = _Shards(segment.num_members)
        self._own = _Shards(1)

    def run(self, part: torch.Tensor, host: torch.Tensor | None, weight: float) -> None:
        """Add up a chunk; on the leader it then lies in ``host``.

        Raises:
            CommunicationError: If a member was lost or late.
        """
        dtype = sum_dtype(part.dtype)
        size = self._lane.piece_elements(dtype)
        try:
            for start, stop in cut_pieces(0, part.numel(), size):
                piece_host = None if host is None else host[start:stop]
                self._run_piece(part[start:stop], piece_host, weight, dtype)
        except BaseException:
            self._segment.abort()  # so that nobody waits for this member
            raise

    def _run_piece(
        self,
        part: torch.Tensor,
        host: torch.Tensor | None,
        weight: float,
        dtype: torch.dtype,
    ) -> None:
        lane, me, num = self._lane, self._segment.index, part.numel()
        number = lane.begin_piece()
        with self._streams.out():
            parts, size = self._parts.of(part, dtype)
            put_weighted(parts[:num], part, weight)
            parts[num:].zero_()
            own, _ = self._own.of(parts[:size], dtype)
            self._link.reduce_scatter(own, parts)
            start, stop = min(me * size, num), min((me + 1) * size, num)
            # A blocking copy: when it returns the shard is in host memory.
            lane.row(number, 0, dtype)[start:stop].copy_(own[: stop - start])
        lane.say_filled()
        if host is not None:
            for member in range(self._segment.num_members):
                if member != me:
                    lane.wait_filled(number, member)
            host.copy_(lane.row(number, 0, dtype)[:num])
        lane.say_done()


class Spreader:
    """Sums on their way from the leader's host memory to the devices."""

    def __init__(
        self, segment: SharedSegment, lane: Lane, link: VendorLink, streams: DeviceStreams
    ) -> None:
        self._segment = segment
        self._lane = lane
        self._link = link
        self._streams = streams
        self._parts = _Shards(segment.num_members)
        self._own = _Shards(1)

    def run(self, part: torch.Tensor, host: torch.Tensor | None) -> None:
        """Overwrite this member's chunk by what lies in the leader's ``host``.

        Raises:
            CommunicationError: If a member was lost or late.
        """
        size = self._lane.piece_elements(part.dtype)
        try:
            for start, stop in cut_pieces(0, part.numel(), size):
                piece_host = None if host is None else host[start:stop]
                self._run_piece(part[start:stop], piece_host)
        except BaseException:
            self._segment.abort()  # so that nobody waits for this member
            raise

    def _run_piece(self, part: torch.Tensor, host: torch.Tensor | None) -> None:
        lane, me, num = self._lane, self._segment.index, part.numel()
        if host is not None:
            number = lane.begin_piece()
            lane.label(number, 0, num, part.dtype)
            lane.row(number, 0, part.dtype)[:num].copy_(host)
            lane.say_filled()
        else:
            number = lane.next_piece()
            lane.wait_filled(number, 0)
            lane.expect(number, 0, num, part.dtype, 0)
        with self._streams.back():
            parts, size = self._parts.of(part, part.dtype)
            own, _ = self._own.of(parts[:size], part.dtype)
            start, stop = min(me * size, num), min((me + 1) * size, num)
            own[: stop - start].copy_(lane.row(number, 0, part.dtype)[start:stop])
            self._link.all_gather(parts, own)
            part.copy_(parts[:num])
        self._streams.wait_back()
        lane.say_done()


def _layouts(num_members: int) -> tuple[LaneLayout, LaneLayout, int]:
    """Lanes off the devices and back, and the segment's size."""
    out = LaneLayout(
        offset_bytes=num_header_bytes(num_members),
        first_counter=1,
        num_slots=_NUM_SLOTS,
        num_rows=1,
        piece_bytes=_PIECE_BYTES,
    )
    back = LaneLayout(
        offset_bytes=out.offset_bytes + out.num_bytes,
        first_counter=1 + COUNTERS_PER_LANE,
        num_slots=_NUM_SLOTS,
        num_rows=1,
        piece_bytes=_PIECE_BYTES,
    )
    return out, back, back.offset_bytes + back.num_bytes
