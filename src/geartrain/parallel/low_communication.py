"""Local SGD and DiLoCo: for links too slow to exchange gradients in every step.

Each device makes its own optimizer steps with the gradient of its own samples. Now and
then all models are averaged, each weighted by the samples that its device has worked on
since, and the fleet goes on from there. **This changes the algorithm**: the result is not
that of one device, and depends on the shares.

The average is taken of what the models have moved since the last one (the pseudo-gradient
of DiLoCo), which also is what a codec may code; what it loses is added the next time. The
optimizers' states stay where they are and are never averaged.

Source: Stich, Local SGD converges fast and communicates little, arXiv:1805.09767;
Douillard et al., DiLoCo, arXiv:2311.08105, and Streaming DiLoCo, arXiv:2501.18512
(fragments that are averaged in turn).
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import torch

from geartrain.errors import CheckpointError, CommunicationError, ConfigError

if TYPE_CHECKING:
    from geartrain.collectives.protocol import Collective, Pending

logger = logging.getLogger(__name__)

AVERAGES = "averages"
"""Purpose of the exchange: what a codec loses here is no gradient's."""
EXACT_ALGORITHM: Literal["exact"] = "exact"


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalSGD:
    """Average the models every few steps."""

    sync_every: int = 8
    """Optimizer steps between two averages."""

    def __post_init__(self) -> None:
        _check_interval(self.sync_every, 1)

    @property
    def description(self) -> str:
        """For people, in logs and summaries."""
        return f"local_sgd: not the single-device step; averaged every {self.sync_every}"


@dataclass(frozen=True, slots=True, kw_only=True)
class DiLoCo:
    """Average what the models moved, and let an outer optimizer make a step of it."""

    sync_every: int = 100
    """Optimizer steps between two outer steps."""
    outer_lr: float = 0.7
    outer_momentum: float = 0.9
    """Nesterov's; 0 for none."""
    fragments: int = 1
    """Parts of the model that are averaged in turn: the same bytes in smaller portions."""

    def __post_init__(self) -> None:
        _check_interval(self.sync_every, self.fragments)
        if not (self.outer_lr > 0.0 and 0.0 <= self.outer_momentum < 1.0):
            msg = (
                f"outer_lr={self.outer_lr} must be > 0 and outer_momentum="
                f"{self.outer_momentum} in [0, 1), such as 0.7 and 0.9"
            )
            raise ConfigError(msg)

    @property
    def description(self) -> str:
        """For people, in logs and summaries."""
        return (
            f"diloco: not the single-device step; an outer step every {self.sync_every} "
            f"(lr {self.outer_lr:g}, momentum {self.outer_momentum:g}, "
            f"{self.fragments} fragments)"
        )


Algorithm = Literal["exact"] | LocalSGD | DiLoCo


@dataclass(slots=True, eq=False)  # tensors don't compare to one truth
class _Piece:
    """Parameters of one dtype and device, as they were at the last average."""

    parameters: list[torch.nn.Parameter]
    anchor: torch.Tensor
    """Shape (num_elements,), at least float32."""
    momentum: torch.Tensor | None = None

    def movement(self) -> torch.Tensor:
        """Where from less where to, shape (num_elements,): a descent, like a gradient."""
        return self.anchor - _flatten(self.parameters)

    @torch.no_grad()
    def step(self, movement: torch.Tensor, lr: float, momentum: float) -> None:
        """Make the outer step: SGD with Nesterov's momentum, as torch defines it."""
        if momentum:
            if self.momentum is None:
                self.momentum = torch.zeros_like(self.anchor)
            self.momentum.mul_(momentum).add_(movement)
            movement = movement.add_(self.momentum, alpha=momentum)
        self.anchor.sub_(movement, alpha=lr)
        parts = torch.split(self.anchor, [p.numel() for p in self.parameters])
        for parameter, part in zip(self.parameters, parts, strict=True):
            parameter.copy_(part.view(parameter.shape))


@dataclass(slots=True, eq=False)
class _Fragment:
    """What is averaged at once."""

    pieces: list[_Piece]
    phase: int
    """Steps less until the first average, so that fragments take turns."""
    num_steps: int = 0
    """Since the last average."""
    num_left: int = 0
    """Until the next."""
    samples: list[float] = field(default_factory=list)
    """By rank, since the last average."""


class ModelAverager:
    """Averages the models of all ranks, as local SGD or DiLoCo do.

    Args:
        parameters: The trainable ones, in the model's order; the same on all ranks.
        algorithm: How often, and what for.
        rank: This rank.
    """

    def __init__(
        self,
        parameters: Iterable[torch.nn.Parameter],
        algorithm: LocalSGD | DiLoCo,
        rank: int,
    ) -> None:
        self.algorithm = algorithm
        self.collective: Collective | None = None
        """Of the ranks that take part; None where this one is left out."""
        self._rank = rank
        outer = algorithm if isinstance(algorithm, DiLoCo) else None
        self._lr = outer.outer_lr if outer is not None else 1.0
        self._momentum = outer.outer_momentum if outer is not None else 0.0
        groups = _cut(list(parameters), outer.fragments if outer is not None else 1)
        interval = algorithm.sync_every
        self._fragments = [
            _Fragment(_pieces(group), index * interval // len(groups))
            for index, group in enumerate(groups)
        ]
        self._begin_anew()

    def after_step(self, samples: Sequence[float]) -> None:
        """Count a step of all ranks, and average what is due; all ranks must call it.

        The step itself has been made, and stays so if a peer is lost now: the loss comes
        out with the next exchange, and what was due is averaged after the next step.

        Args:
            samples: That each rank worked on in this step, shape (world_size,).
        """
        for fragment in self._fragments:
            before = fragment.samples or [0.0] * len(samples)
            fragment.samples = [a + b for a, b in zip(before, samples, strict=True)]
            fragment.num_steps += 1
            fragment.num_left -= 1
        due = [fragment for fragment in self._fragments if fragment.num_left <= 0]
        try:
            self._average(due)
        except CommunicationError as error:
            logger.warning("models were not averaged: %s", error)
            return
        for fragment in due:
            fragment.num_left = self.algorithm.sync_every

    def settle(self) -> None:
        """Average everything now, so that all ranks hold one model; all must call it.

        Does nothing where no step was made since the last average.

        Raises:
            CommunicationError: If a peer was lost; nothing was averaged.
        """
        self._average(self._fragments)
        for fragment in self._fragments:
            fragment.num_left = self.algorithm.sync_every - fragment.phase

    def state_dict(self) -> dict[str, Any]:  # Any: a tree of the checkpoint room
        """Where the last average was, the outer momentum, and when the next is due."""
        return {
            "fragments": [
                {
                    "num_steps": fragment.num_steps,
                    "num_left": fragment.num_left,
                    "anchors": [piece.anchor for piece in fragment.pieces],
                    "momenta": [
                        piece.momentum
                        for piece in fragment.pieces
                        if piece.momentum is not None
                    ],
                }
                for fragment in self._fragments
            ]
        }

    def load_state_dict(self, state: dict[str, Any] | None) -> None:  # Any: as above
        """Go on from a saved state, with the parameters already loaded.

        Args:
            state: None, where steps were exact until now: the model is all there is.

        Raises:
            CheckpointError: If it is of another model or other fragments.
        """
        if state is None:
            self._begin_anew()
            return
        saved = state["fragments"]
        shapes = [[piece.anchor.shape for piece in f.pieces] for f in self._fragments]
        if [[anchor.shape for anchor in f["anchors"]] for f in saved] != shapes:
            msg = (
                f"the saved averages have {len(saved)} fragments of other sizes than the "
                f"model's {len(shapes)}; set up the algorithm as it was when it was saved"
            )
            raise CheckpointError(msg)
        for fragment, part in zip(self._fragments, saved, strict=True):
            fragment.num_steps, fragment.num_left = part["num_steps"], part["num_left"]
            fragment.samples = []
            momenta = part["momenta"] or [None] * len(fragment.pieces)
            for piece, anchor, momentum in zip(
                fragment.pieces, part["anchors"], momenta, strict=True
            ):
                piece.anchor.copy_(anchor)
                piece.momentum = None
                if momentum is not None:
                    piece.momentum = piece.anchor.clone().copy_(momentum)

    # -- inside -------------------------------------------------------------------------

    def _begin_anew(self) -> None:
        for fragment in self._fragments:
            fragment.num_steps, fragment.samples = 0, []
            fragment.num_left = self.algorithm.sync_every - fragment.phase
            for piece in fragment.pieces:
                piece.anchor.copy_(_flatten(piece.parameters))
                piece.momentum = None

    def _average(self, fragments: Sequence[_Fragment]) -> None:
        moved = [fragment for fragment in fragments if fragment.num_steps]
        if self.collective is not None:
            sums = self._send(moved, self.collective)
            # All or nothing: not one outer step before the last sum is there.
            for _, _, pending in sums:
                pending.wait()
            for piece, movement, _ in sums:
                piece.step(movement, self._lr, self._momentum)
        for fragment in moved:
            fragment.num_steps, fragment.samples = 0, []

    def _send(
        self, fragments: Sequence[_Fragment], collective: Collective
    ) -> list[tuple[_Piece, torch.Tensor, Pending]]:
        sums = []
        for fragment in fragments:
            weight = self._weight(fragment, collective.num_members)
            first = self._fragments.index(fragment)
            for index, piece in enumerate(fragment.pieces):
                movement = piece.movement()
                key = f"movement{first}/{index}"
                sums.append(
                    (piece, movement, collective.all_reduce(movement, weight, key=key))
                )
        return sums

    def _weight(self, fragment: _Fragment, num_members: int) -> float:
        total = sum(fragment.samples)
        if not total:  # all came from a snapshot, and nobody has worked since
            return 1.0 / num_members
        return fragment.samples[self._rank] / total


def _check_interval(sync_every: int, fragments: int) -> None:
    if sync_every < 1 or not 1 <= fragments <= sync_every:
        msg = (
            f"sync_every={sync_every} must be >= 1 step, and fragments={fragments} from 1 "
            "to sync_every"
        )
        raise ConfigError(msg)


def _cut(
    parameters: list[torch.nn.Parameter], num_groups: int
) -> list[list[torch.nn.Parameter]]:
    """Consecutive groups of about equal size; fewer where parameters are fewer."""
    total = sum(p.numel() for p in parameters)
    groups: list[list[torch.nn.Parameter]] = [[] for _ in range(num_groups)]
    passed = 0
    for parameter in parameters:
        middle = passed + parameter.numel() / 2
        groups[min(int(middle * num_groups / total), num_groups - 1)].append(parameter)
        passed += parameter.numel()
    return [group for group in groups if group]


def _pieces(parameters: list[torch.nn.Parameter]) -> list[_Piece]:
    kinds: dict[tuple[torch.dtype, torch.device], list[torch.nn.Parameter]] = {}
    for parameter in parameters:
        kinds.setdefault((parameter.dtype, parameter.device), []).append(parameter)
    return [_Piece(group, _flatten(group)) for group in kinds.values()]


def _flatten(parameters: Iterable[torch.nn.Parameter]) -> torch.Tensor:
    """A copy, in float32 where the parameters are narrower: steps are small."""
    flat = torch.cat([p.detach().reshape(-1) for p in parameters])
    return flat if flat.dtype == torch.float64 else flat.float()
