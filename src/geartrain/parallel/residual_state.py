"""What gradient compression still owes: kept with its owners, moved, and saved.

The numbers that travel are mean gradients times the loss scale: of each step's own batch,
also of a shorter one at the end of an epoch. So what a code lost in one step may be added
to the next as it is, and only a change of the loss scale rescales it. (Where a loss is a
mean over tokens that are counted during the step, they are mean gradients times tokens a
sample, which is taken as alike in neighbouring steps.)
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from geartrain.collectives.codecs.error_feedback import state_pieces
from geartrain.collectives.codecs.residual_ranges import Move, Piece, lay_out, plan_moves
from geartrain.collectives.residuals import (
    MemberResiduals,
    State,
    carry_out,
    merge_states,
)
from geartrain.errors import CheckpointError, CommunicationError, ConfigError
from geartrain.units import format_bytes

if TYPE_CHECKING:
    import torch

    from geartrain.collectives.gradient_buckets import GradientBuckets
    from geartrain.parallel.process_group import RankGroups

logger = logging.getLogger(__name__)

_SAVE_WAIT_S = 60.0
"""How long the lead waits for the others to save: they are at the same step."""
_ELEMENT_BYTES = 4

SavedResiduals = dict[str, Any]  # Any: a tree of the checkpoint room
"""``loss_scale``, and ``pieces``: tensors by side and start in the flat gradient."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Note:
    """What one rank tells the others."""

    holds: tuple[tuple[str, int, int], ...]
    codes: tuple[tuple[str, int, int], ...]


@dataclass(slots=True)
class ResidualState:
    """This rank's part of what compression owes.

    Args:
        groups: All ranks.
        buckets: The gradient buckets in use; None where nothing is exchanged.
        loss_scale: The loss scale in force; 1 without one.
    """

    groups: RankGroups
    buckets: Callable[[], GradientBuckets | None]
    loss_scale: Callable[[], float]
    _mine: MemberResiduals | None = None
    _are_coded: bool = False
    _is_open: bool = False
    _scale: float = 1.0
    """When the step under way began."""

    # -- a step -------------------------------------------------------------------------

    def begin_step(self) -> None:
        """Open a step; one that was not finished before was not applied."""
        if self._is_open:
            self.end_step(applied=False)
        self._is_open = True
        if self._mine is not None:
            self._scale = self.loss_scale()

    def end_step(self, *, applied: bool) -> None:
        """Close a step.

        Args:
            applied: False where the update was skipped: then what was owed before the
                step is owed again.
        """
        self._is_open = False
        if self._mine is not None:
            self._mine.end_step(applied=applied)

    def adopt_step(self) -> None:
        """Close a step that others have applied, once their state is in place here.

        They had all sums, so this rank's codes are in them.
        """
        if self._mine is not None:
            factor = self.loss_scale() / self._scale
            self.end_step(applied=factor >= 1.0)
            self.scale_(factor)

    def scale_(self, factor: float) -> None:
        """Follow a loss scale that was multiplied by ``factor``."""
        if self._mine is not None and factor != 1.0:
            self._mine.scale_(factor)

    # -- moving -------------------------------------------------------------------------

    def follow(self, collective: object) -> None:
        """Gradients go another way from now on; all ranks call it together.

        Needed whenever members, links or buckets changed. What a rank owes goes to
        whoever codes that part of the gradient from now on.

        Args:
            collective: What this rank exchanges gradients by now; None if left out.

        Raises:
            CommunicationError: If a rank was lost or late.
        """
        if not self._may_code:
            return
        before, held = self._mine, self._take_out()
        self._mine = mine = self._find(collective)
        me = self._me
        notes = self._tell(_note(held, mine.codes(me) if mine is not None else ()))
        old, new = (
            _pieces_of([n.holds for n in notes]),
            _pieces_of([n.codes for n in notes]),
        )
        self._are_coded = bool(new)
        moves = plan_moves(old, new)
        group = self.groups.process_group() if _leave_a_rank(moves) else None
        arrived, here = carry_out(moves, held, me, group, self.groups.timeout_s)
        if mine is not None:
            mine.load(arrived, here)
        if self._me == 0 and old:
            _tell_moves(moves)
            _tell_missing(old, before)

    # -- saving -------------------------------------------------------------------------

    @property
    def are_coded(self) -> bool:
        """Whether any rank codes gradients now, so that all must take part in saving."""
        return self._are_coded

    def collect(self) -> SavedResiduals | None:
        """Hand all that is owed to the lead; all ranks call it where any codes gradients.

        Where it succeeds on one rank it does on all that are left.

        Returns:
            On the lead what to save; None elsewhere, and where there is nothing.

        Raises:
            CommunicationError: If a rank did not call it, or was lost.
        """
        if not self._are_coded:
            return None
        me = self._me
        held = self._held()
        notes = self._tell(_note(held, ()), saves=True)
        moves = [
            Move(source=p, start=p.start, stop=p.stop, to_owner=0, to_side=p.side)
            for p in _pieces_of([note.holds for note in notes])
        ]
        group = self.groups.process_group() if _leave_a_rank(moves) else None
        arrived, here = carry_out(moves, held, me, group, self.groups.timeout_s)
        self.groups.rendezvous.gather("collected residuals", me, int)
        if me != 0:
            return None
        pieces = merge_states(
            {f"{move.to_side}:{move.start}": arrived[move.source.name]} for move in here
        )
        return {"loss_scale": self.loss_scale(), "pieces": pieces}

    def restore(self, saved: SavedResiduals | None) -> None:
        """Take on what was saved, on whoever codes it now; all ranks call it together.

        Parts that nobody codes any more are dropped with one warning.

        Args:
            saved: What ``collect`` returned, read by every rank; None: nothing is owed.

        Raises:
            CheckpointError: If it is damaged.
            CommunicationError: If a rank was lost or late.
        """
        state = _read(saved)
        if self._may_code:
            self._take_out()
            self._is_open = False
        mine = self._mine
        own = mine.codes(self._me) if mine is not None else ()
        new: tuple[Piece, ...] = ()
        if self._may_code:
            new = _pieces_of([n.codes for n in self._tell(_note({}, own))])
        moves = plan_moves(state_pieces(state), new)
        if mine is not None and saved is not None:
            mine.load(state, [m for m in moves if m.to_owner == self._me])
            mine.scale_(self.loss_scale() / float(saved["loss_scale"]))
        lost_bytes = _lost_bytes(moves)
        if lost_bytes and self._me == 0:
            warnings.warn(
                f"the saved run owed {format_bytes(lost_bytes)} of gradients that its "
                "compression had held back; nothing codes them now, so they are dropped. "
                "Resume with the same compression to keep them",
                stacklevel=2,
            )

    # -- inside -------------------------------------------------------------------------

    @property
    def _me(self) -> int:
        """Position among the ranks that are left."""
        return self.groups.rendezvous.rank

    @property
    def _may_code(self) -> bool:
        """Alike on all ranks, and known without asking."""
        hub = self.groups.hub
        if hub is None or hub.compression is None:
            return False
        return not hub.network.is_one_host

    def _find(self, collective: object) -> MemberResiduals | None:
        hub, buckets = self.groups.hub, self.buckets()
        opened = hub.opened(collective) if hub is not None else None
        if opened is None or buckets is None:
            return None
        sizes = [parameter.numel() for _, parameter in buckets.named_parameters]
        found = MemberResiduals(
            book=opened.collective.book,
            member=opened.member,
            layout=lay_out(sizes, buckets.contents),
            partial=opened.feedback[0],
            total=opened.feedback[1],
        )
        found.clear()  # an exchange that is used again has handed its own on
        return found

    def _held(self) -> State:
        if self._mine is None:
            return {}
        if self._is_open:  # its exchange failed, or an error left it unfinished
            self.end_step(applied=False)
        return self._mine.state()

    def _take_out(self) -> State:
        held = self._held()
        if self._mine is not None:
            self._mine.clear()
        return held

    def _tell(self, note: _Note, *, saves: bool = False) -> list[_Note]:
        rendezvous = self.groups.rendezvous
        if not saves:
            return rendezvous.gather("compression residuals", note, _Note)
        limit_s = self.groups.timeout_s
        if self._me == 0:
            limit_s = min(limit_s, _SAVE_WAIT_S)
        try:
            return rendezvous.gather(
                "compression residuals to save", note, _Note, timeout_s=limit_s
            )
        except CommunicationError as error:
            hub = self.groups.hub
            name = hub.compression if hub is not None else None
            msg = (
                f"{error}. With compression={name!r} each rank keeps a part of what its "
                "codes lost, so session.save() must be called on every rank, not only "
                "where session.is_main"
            )
            raise CommunicationError(msg) from error


def _note(held: Mapping[str, torch.Tensor], codes: Sequence[Piece]) -> _Note:
    return _Note(
        holds=tuple((p.side, p.start, p.stop) for p in state_pieces(held)),
        codes=tuple((p.side, p.start, p.stop) for p in codes),
    )


def _pieces_of(ranges: Sequence[Sequence[tuple[str, int, int]]]) -> tuple[Piece, ...]:
    """Of all ranks, in rank order."""
    return tuple(
        Piece(owner=rank, side=side, start=start, stop=stop)
        for rank, of_rank in enumerate(ranges)
        for side, start, stop in of_rank
    )


def _tell_moves(moves: Sequence[Move]) -> None:
    moved = sum(m.stop - m.start for m in moves if m.to_owner not in (None, m.source.owner))
    logger.info(
        "compression: %s of what gradients are owed went to other ranks",
        format_bytes(moved * _ELEMENT_BYTES),
    )
    lost_bytes = _lost_bytes(moves)
    if lost_bytes:
        logger.warning(
            "compression: %s of what gradients were owed are dropped, since nothing codes "
            "them any more",
            format_bytes(lost_bytes),
        )


def _tell_missing(old: Sequence[Piece], before: MemberResiduals | None) -> None:
    """Log what members kept that are not there any more."""
    if before is None:
        return
    coded = sum(p.stop - p.start for p in before.all_codes())
    missing = coded - sum(p.stop - p.start for p in old)
    if missing > 0:
        logger.warning(
            "compression: %s of what gradients were owed are gone with the ranks that "
            "were lost",
            format_bytes(missing * _ELEMENT_BYTES),
        )


def _leave_a_rank(moves: Sequence[Move]) -> bool:
    return any(move.to_owner not in (None, move.source.owner) for move in moves)


def _lost_bytes(moves: Sequence[Move]) -> int:
    lost = sum(move.stop - move.start for move in moves if move.to_owner is None)
    return lost * _ELEMENT_BYTES


def _read(saved: SavedResiduals | None) -> State:
    """The pieces of a snapshot.

    Raises:
        CheckpointError: If they are not what ``collect`` returns.
    """
    if saved is None:
        return {}
    try:
        pieces: State = dict(saved["pieces"])
        scale = float(saved["loss_scale"])
        state_pieces(pieces)
    except (KeyError, TypeError, ValueError, IndexError, ConfigError) as error:
        msg = (
            f"the snapshot's residuals are damaged ({error!r}); expected loss_scale and "
            "pieces named SIDE:START; save it again, or delete the component"
        )
        raise CheckpointError(msg) from error
    if not scale > 0:
        msg = f"the snapshot's residuals have the loss scale {scale}, expected > 0"
        raise CheckpointError(msg)
    return pieces
