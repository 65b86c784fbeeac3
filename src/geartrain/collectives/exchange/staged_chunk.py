"""One chunk on its way through the five stages of the exchange.

Each method belongs to one stage thread. All receives are posted before anything can
arrive, so that a message never waits for its receiver's "ready" notice, which Gloo would
send behind queued payload. That is safe also where a total lands in the place of a
partial sum: it cannot come before the partial sum has arrived at its owner.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import torch

from geartrain.collectives.exchange.folding import fold_in_order
from geartrain.collectives.exchange.slow_hop import SlowPiece

if TYPE_CHECKING:
    from geartrain.collectives.exchange.buffers import BufferPool
    from geartrain.collectives.exchange.links import Links, Message
    from geartrain.collectives.exchange.protocol import Handle
    from geartrain.collectives.exchange.routes import ChunkRoute, Place
    from geartrain.collectives.exchange.slow_hop import SlowCoders


class ChunkWork(Protocol):
    """What the stage threads call, one method each, chunks in index order."""

    def post_receives(self) -> None:
        """Start all receives; the first thread, before the host's sum is there."""

    def send_in(self) -> None:
        """Start giving away what others hold; the first thread."""

    def add_rack(self) -> None:
        """Add up what this host holds and start the slow hop; the second thread."""

    def add_across(self) -> None:
        """Add up the racks' sums and start the way back; the third thread."""

    def hand_out(self) -> None:
        """Start handing the total out in the rack; the fourth thread."""

    def collect(self) -> None:
        """Wait until the chunk is whole and nothing is under way; the fifth thread."""


@dataclass(slots=True, kw_only=True)
class StagedChunk:
    """A chunk of the staged exchange; also leader-only and within one rack.

    Args:
        route: Which elements this member holds, and with whom it exchanges them.
        place: Where this member stands.
        leaders: Positions of this rack's leaders, in host order.
        tensor: The whole flat tensor, shape (num_elements,).
    """

    route: ChunkRoute
    place: Place
    leaders: tuple[int, ...]
    tensor: torch.Tensor
    coders: SlowCoders
    links: Links
    pool: BufferPool
    _parts: list[Message] = field(default_factory=list)
    _totals: list[Message] = field(default_factory=list)
    _sent_in: list[Message] = field(default_factory=list)
    _sent_out: list[Message] = field(default_factory=list)
    _slow: list[SlowPiece] = field(default_factory=list)

    def post_receives(self) -> None:
        """Start all receives of this chunk."""
        start, stop = self.route.rack_cuts[self.place.host_index]
        for host_index in self._other_hosts if stop > start else ():
            buffer = self.pool.take(stop - start, self.tensor.dtype)
            leader = self.leaders[host_index]
            self._parts.append(self.links.rack_in.receive(buffer, leader))
        for piece in self.route.slow_pieces:
            slow = SlowPiece(
                piece=piece,
                values=self.tensor[piece.start : piece.stop],
                rack=self.place.rack_index,
                swaps=self.route.swaps,
                coders=self.coders,
                links=self.links,
                pool=self.pool,
            )
            slow.post_receives()
            self._slow.append(slow)
        for host_index in self._by_distance(-1):
            first, last = self.route.rack_cuts[host_index]
            if last > first:
                held = self.tensor[first:last]
                leader = self.leaders[host_index]
                self._totals.append(self.links.rack_out.receive(held, leader))

    def send_in(self) -> None:
        """Send to every host of the rack what it holds."""
        for host_index in self._by_distance(1):
            first, last = self.route.rack_cuts[host_index]
            if last > first:
                held = self.tensor[first:last]
                leader = self.leaders[host_index]
                self._sent_in.append(self.links.rack_in.send(held, leader))

    def add_rack(self) -> None:
        """Add up the rack's sum of what this host holds; send it across."""
        self.links.rack_in.wait(self._parts)
        if self._parts:
            parts = [message.tensor for message in self._parts]
            start, stop = self.route.rack_cuts[self.place.host_index]
            fold_in_order(self.tensor[start:stop], parts, self.place.host_index)
            self._parts.clear()
            for part in parts:
                self.pool.give(part)
        for slow in self._slow:
            slow.send_partial()

    def add_across(self) -> None:
        """Add up the racks' sums of what this host holds."""
        for slow in self._slow:
            slow.add_partials()

    def hand_out(self) -> None:
        """Send the total of what this host holds to the rack's other hosts."""
        for slow in self._slow:
            slow.take_total()
        start, stop = self.route.rack_cuts[self.place.host_index]
        for host_index in self._by_distance(1) if stop > start else ():
            held = self.tensor[start:stop]
            leader = self.leaders[host_index]
            self._sent_out.append(self.links.rack_out.send(held, leader))

    def collect(self) -> None:
        """Wait for what the rack's other hosts hold, and for all that was sent."""
        self.links.rack_out.wait(self._totals)
        self.links.rack_in.wait(self._sent_in)
        for slow in self._slow:
            slow.finish()
        self.links.rack_out.wait(self._sent_out)
        for messages in (self._totals, self._sent_in, self._sent_out, self._slow):
            messages.clear()

    @property
    def _other_hosts(self) -> tuple[int, ...]:
        return tuple(i for i in range(len(self.leaders)) if i != self.place.host_index)

    def _by_distance(self, step: int) -> list[int]:
        """The other hosts, nearest first, so that not all turn to the same one."""
        count = len(self.leaders)
        return [(self.place.host_index + step * i) % count for i in range(1, count)]


@dataclass(slots=True, kw_only=True)
class RingChunk:
    """A chunk that takes Gloo's ring over all leaders."""

    values: torch.Tensor
    links: Links
    whom: str
    _handle: Handle | None = None

    def post_receives(self) -> None:
        """The ring receives by itself."""

    def send_in(self) -> None:
        """The ring starts in the next stage, beside the next chunk's host sum."""

    def add_rack(self) -> None:
        """Start the ring."""
        self._handle = self.links.ring.all_reduce(self.values)

    def add_across(self) -> None:
        """Nothing: there is one stage only."""

    def hand_out(self) -> None:
        """Nothing: there is one stage only."""

    def collect(self) -> None:
        """Wait for the sum."""
        if self._handle is not None:
            self.links.ring.wait_for(self._handle, self.whom)
            self._handle = None


class IdleChunk:
    """A chunk of a process that does not speak for its host, or of a single host."""

    def post_receives(self) -> None:
        """Nothing arrives."""

    def send_in(self) -> None:
        """Nothing is sent."""

    def add_rack(self) -> None:
        """Nothing to add."""

    def add_across(self) -> None:
        """Nothing to add."""

    def hand_out(self) -> None:
        """Nothing to hand out."""

    def collect(self) -> None:
        """Nothing to wait for."""
