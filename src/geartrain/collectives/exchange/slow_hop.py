"""One piece on its way across racks: swapped whole, or added up by its owner."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from geartrain.collectives.exchange.folding import fold_in_order

if TYPE_CHECKING:
    from geartrain.collectives.exchange.buffers import BufferPool
    from geartrain.collectives.exchange.links import Links, Message
    from geartrain.collectives.exchange.slow_coding import Coder
    from geartrain.planner.exchange.ownership import Piece


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowCoders:
    """Who codes what of a bucket; None is exact. Each belongs to one stage thread."""

    partial_out: tuple[Coder | None, ...]
    """By the other rack: what is sent there. Used where partial sums are sent."""
    partial_in: tuple[Coder | None, ...]
    """By the other rack. Used where partial sums are received."""
    total_out: Coder | None
    """Used where totals are sent, by the thread that receives partial sums."""
    total_in: Coder | None
    """Used where totals are received."""


@dataclass(slots=True, kw_only=True)
class SlowPiece:
    """One piece that this member holds of its rack's sum.

    Swapped pieces go to every other rack's holder, who all add in rack order. Others go
    to the owning rack's holder, who adds them up and sends the total back.

    Args:
        piece: Its elements and holders.
        values: The rack's partial sum, shape (num_elements,); the total afterwards.
        rack: This member's rack.
        swaps: Whether racks swap whole partial sums.
    """

    piece: Piece
    values: torch.Tensor
    rack: int
    swaps: bool
    coders: SlowCoders
    links: Links
    pool: BufferPool
    _partials: list[Message] = field(default_factory=list)
    _total: list[Message] = field(default_factory=list)
    _sent: list[Message] = field(default_factory=list)
    _lent: list[torch.Tensor] = field(default_factory=list)

    def post_receives(self) -> None:
        """Start all receives, before anything can arrive."""
        if self._adds:
            for rack in self._others:
                coder = self.coders.partial_in[rack]
                buffer = self._buffer(coder)
                holder = self.piece.holders[rack]
                self._partials.append(self.links.across_out.receive(buffer, holder))
            return
        total_in = self.coders.total_in
        buffer = self.values if total_in is None else self._buffer(total_in)
        self._total.append(self.links.across_back.receive(buffer, self.piece.owner))

    def send_partial(self) -> None:
        """Start sending this rack's sum to whoever adds it up."""
        if not self.swaps and self._adds:
            return
        targets = self._others if self.swaps else (self.piece.owner_rack,)
        for rack in targets:
            coder = self.coders.partial_out[rack]
            data = self.values
            if coder is not None:
                # Swapping racks must all add what the receivers of a code see.
                data = self._code(coder, replace=self.swaps)
            holder = self.piece.holders[rack]
            self._sent.append(self.links.across_out.send(data, holder))

    def add_partials(self) -> None:
        """Wait for the other racks' sums, add them, and start sending the total."""
        if not self._adds:
            return
        self.links.across_out.wait(self._partials)
        if self.swaps:
            # The sum replaces what was sent, so that must be out first.
            self.links.across_out.wait(self._sent)
            self._sent.clear()
        parts = [self._decoded(message) for message in self._partials]
        fold_in_order(self.values, parts, self.rack)
        for part in parts:
            self.pool.give(part)
        self._partials.clear()
        if not self.swaps:
            self._send_total()

    def take_total(self) -> None:
        """Wait for the total from the owner, where another rack owns the piece."""
        self.links.across_back.wait(self._total)
        total_in = self.coders.total_in
        if self._total and total_in is not None:
            total_in.codec.decode(self._total[0].tensor, self.values)
            self.pool.give(self._total[0].tensor)
        self._total.clear()

    def finish(self) -> None:
        """Wait until all was sent; give buffers back."""
        out = self.links.across_back if self._adds and not self.swaps else None
        (out or self.links.across_out).wait(self._sent)
        self._sent.clear()
        for buffer in self._lent:
            self.pool.give(buffer)
        self._lent.clear()

    @property
    def _adds(self) -> bool:
        return self.swaps or self.piece.owner_rack == self.rack

    @property
    def _others(self) -> tuple[int, ...]:
        return tuple(r for r in range(len(self.piece.holders)) if r != self.rack)

    def _send_total(self) -> None:
        data = self.values
        if self.coders.total_out is not None:
            data = self._code(self.coders.total_out, replace=True)
        for rack in self._others:
            holder = self.piece.holders[rack]
            self._sent.append(self.links.across_back.send(data, holder))

    def _code(self, coder: Coder, *, replace: bool) -> torch.Tensor:
        code = coder.encode(self.values, self.piece.start, self.pool, replace=replace)
        self._lent.append(code)
        return code

    def _buffer(self, coder: Coder | None) -> torch.Tensor:
        num_elements = self.piece.num_elements
        if coder is None:
            return self.pool.take(num_elements, self.values.dtype)
        return self.pool.take(coder.codec.encoded_bytes(num_elements), torch.uint8)

    def _decoded(self, message: Message) -> torch.Tensor:
        rack = self.piece.holders.index(message.member)
        coder = self.coders.partial_in[rack]
        if coder is None:
            return message.tensor
        values = self.pool.take(self.piece.num_elements, torch.float32)
        coder.codec.decode(message.tensor, values)
        self.pool.give(message.tensor)
        return values
