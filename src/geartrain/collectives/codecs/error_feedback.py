"""What a code lost is added to the next step's gradient.

Whoever encodes an interval of a bucket keeps what its code lost there::

    feedback.compensate(key, start, values)  # values += what was lost before
    codec.encode(values, code)
    codec.decode(code, decoded)              # the encoder needs this sum anyway
    feedback.keep(key, start, values, decoded)
    ...
    feedback.end_step(applied=True)          # False: loss scaler or a fault dropped it

Where a total is coded again (more than two racks), its owner keeps what that second
code lost, in an ``ErrorFeedback`` of its own.

Under momentum, feedback alone can do harm once few elements are sent: a lump of several
steps' gradients arrives late, and the optimizer's momentum then carries it on for as
many steps again. With ``momentum=m`` momentum is accumulated before the selection. What
then arrives is the optimizer's velocity, late where it had to wait; ``MomentumUndo``
turns it back into a gradient on every rank, so that the user's optimizer stays as it is.

Source: Lin et al., Deep Gradient Compression, arXiv:1712.01887, sections 3.2 (momentum
correction) and 3.3 (momentum factor masking).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from geartrain.collectives.codecs.interval_store import IntervalStore
from geartrain.collectives.codecs.residual_ranges import Piece, to_buckets, to_flat
from geartrain.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from geartrain.collectives.codecs.residual_ranges import Layout, Move

_LOST, _VELOCITY = 0, 1


@dataclass(slots=True)
class ErrorFeedback:
    """Losses of one side's codes, by bucket and interval.

    Intervals may be cut differently from one step to the next. One thread at a time
    uses an object; stages that encode have one each.

    Args:
        momentum: Of the optimizer, to correct for it; 0 leaves momentum alone.
        forget_sent_momentum: Also set the momentum of what was sent to zero, as the paper
            does against staleness. Elements sent in most steps then train as if without
            momentum, which at a given learning rate can cost more than it gains.

    Raises:
        ConfigError: If the momentum is not in [0, 1).
    """

    momentum: float = 0.0
    forget_sent_momentum: bool = False
    _store: IntervalStore = field(init=False)

    def __post_init__(self) -> None:
        _check_momentum(self.momentum)
        self._store = IntervalStore(num_planes=2 if self.momentum else 1)

    @property
    def num_bytes(self) -> int:
        """Memory that the residuals take: 2 floats an element kept, 4 with momentum."""
        return self._store.num_bytes

    def compensate(self, key: str, start: int, values: torch.Tensor) -> None:
        """Add to the values what codes lost there before.

        Args:
            key: Names the bucket.
            start: Of the interval in the bucket, in elements.
            values: float32, shape (num_elements,); changed in place.
        """
        kept = self._store.at(key, start, values.numel())
        kept.changed = False  # the step before was applied if nobody said otherwise
        if self.momentum:
            velocity = kept.other[_VELOCITY]
            torch.mul(kept.now[_VELOCITY], self.momentum, out=velocity)
            velocity.add_(values)
            torch.add(kept.now[_LOST], velocity, out=values)
        else:
            values.add_(kept.now[_LOST])

    def keep(
        self, key: str, start: int, values: torch.Tensor, decoded: torch.Tensor
    ) -> None:
        """Remember what the code lost; nothing if it stands for NaN.

        Args:
            key: As in ``compensate``.
            start: As in ``compensate``.
            values: What was encoded, shape (num_elements,).
            decoded: What its code stands for, same shape. A code is finite as a whole or
                not at all, so its first element tells.
        """
        if values.numel() == 0 or not bool(torch.isfinite(decoded[0])):
            return
        kept = self._store.at(key, start, values.numel())
        torch.sub(values, decoded, out=kept.other[_LOST])
        if self.momentum and self.forget_sent_momentum:
            kept.other[_VELOCITY].masked_fill_(decoded != 0, 0.0)
        kept.flip(changed=True)

    def end_step(self, *, applied: bool) -> None:
        """Close a step, once all its exchanges have ended or failed.

        Args:
            applied: False if the step's gradients were dropped: then what codes had lost
                before the step is owed again.
        """
        self._store.end_step(applied=applied)

    def scale_(self, factor: float) -> None:
        """Multiply all that is owed, when the loss scale is multiplied by ``factor``."""
        self._store.scale_(factor)

    def clear(self) -> None:
        """Forget everything."""
        self._store.clear()

    def pieces(self, side: str, layout: Layout, owner: int) -> tuple[Piece, ...]:
        """What is kept here, as ranges of the model's flat gradient.

        Args:
            side: Names these codes on all members: ``partial-RACK`` or ``total``.
            layout: Where each bucket's elements lie in the flat gradient; others are left
                out.
            owner: This member.
        """
        return tuple(
            Piece(owner=owner, side=side, start=start, stop=start + tensor.shape[1])
            for start, tensor in self._flat_tensors(layout)
        )

    def state(self, side: str, layout: Layout) -> dict[str, torch.Tensor]:
        """What is kept here, to be saved or handed to another owner.

        Args:
            side: As in ``pieces``.
            layout: As in ``pieces``.

        Returns:
            Copies of shape (1 or 2, num_elements), by ``Piece.name``. All owners' dicts
            merged are the state of the exchange, whatever the ranks.
        """
        return {f"{side}:{start}": t.clone() for start, t in self._flat_tensors(layout)}

    def load(
        self,
        side: str,
        layout: Layout,
        state: Mapping[str, torch.Tensor],
        moves: Sequence[Move],
    ) -> None:
        """Take over what others kept.

        Args:
            side: As in ``pieces``.
            layout: Of the buckets as they are now.
            state: The dicts of the former owners, merged; what no move names is ignored.
            moves: Those of ``plan_moves(state_pieces(state), ...)`` that end here.

        Raises:
            ConfigError: If the state lacks a piece, or was kept with momentum correction
                and this is not (or the other way round).
        """
        for move in moves:
            if move.to_side != side:
                continue
            planes = self._planes(state, move)
            for key, span in to_buckets(layout, move.start, move.stop):
                kept = self._store.at(key, span.bucket_start, span.num_elements)
                first = span.flat_start - move.start
                kept.now.add_(planes[:, first : first + span.num_elements])
                kept.changed = False

    def _planes(self, state: Mapping[str, torch.Tensor], move: Move) -> torch.Tensor:
        source = state.get(move.source.name)
        size = move.source.stop - move.source.start
        if source is None or source.shape != (self._store.num_planes, size):
            seen = "nothing" if source is None else f"a tensor of {tuple(source.shape)}"
            msg = (
                f"residual {move.source.name}: the state holds {seen}, expected "
                f"({self._store.num_planes}, {size}); resume with the compression and "
                "momentum of the saved run, or drop its residuals"
            )
            raise ConfigError(msg)
        return source[:, move.start - move.source.start : move.stop - move.source.start]

    def _flat_tensors(self, layout: Layout) -> list[tuple[int, torch.Tensor]]:
        return [
            (flat.flat_start, kept.now[:, first : first + flat.num_elements])
            for key, kept in self._store
            if key in layout
            for flat in to_flat(layout[key], kept.start, kept.stop)
            for first in (flat.bucket_start - kept.start,)
        ]


@dataclass(slots=True)
class MomentumUndo:
    """Turns exchanged velocities into gradients, on every rank.

    SGD with momentum computes ``b = m * b + grad`` and steps by ``b``. From velocities
    ``p`` that already contain momentum, ``grad = p - m * p_before`` makes it step by
    ``p``. Holds for SGD without dampening and without Nesterov's variant; it costs two
    floats an element on each rank.

    Args:
        momentum: The optimizer's, and that of ``ErrorFeedback``.
    """

    momentum: float
    _store: IntervalStore = field(init=False)

    def __post_init__(self) -> None:
        _check_momentum(self.momentum)
        self._store = IntervalStore(num_planes=1)

    def undo_(self, key: str, start: int, total: torch.Tensor) -> None:
        """Replace a summed velocity by the gradient that leads SGD to it.

        Args:
            key: Names the bucket.
            start: Of the interval in the bucket.
            total: float32, shape (num_elements,), equal on all ranks.
        """
        kept = self._store.at(key, start, total.numel())
        kept.other[0].copy_(total)
        total.sub_(kept.now[0], alpha=self.momentum)
        kept.flip(changed=True)

    def end_step(self, *, applied: bool) -> None:
        """Close a step; one that was not applied is forgotten."""
        self._store.end_step(applied=applied)


def state_pieces(state: Mapping[str, torch.Tensor], owner: int = 0) -> tuple[Piece, ...]:
    """The pieces that a saved state holds, as if one owner kept them all.

    Raises:
        ConfigError: If a name is not ``SIDE:START``.
    """
    pieces = []
    for name, tensor in state.items():
        side, colon, start = name.rpartition(":")
        if not colon or not start.isdigit():
            msg = f"residual state: {name!r} is not SIDE:START; expected names of state()"
            raise ConfigError(msg)
        stop = int(start) + tensor.shape[1]
        pieces.append(Piece(owner=owner, side=side, start=int(start), stop=stop))
    return tuple(pieces)


def _check_momentum(momentum: float) -> None:
    if not 0.0 <= momentum < 1.0:
        msg = f"momentum={momentum} must be in [0, 1), as the optimizer has it"
        raise ConfigError(msg)
