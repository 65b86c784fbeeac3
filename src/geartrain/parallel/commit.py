"""The global commit: no rank applies a step before all are known to be able to.

Between a step's exchange and its update each rank votes: it has the whole gradient and
the vector behind it. Whoever decides (a ``Committer``) lets nobody go on before all have
voted for the same. So a step that anybody has applied can be applied by everybody that is
left, without a state being sent.

A vote names the whole history that the step ends: a hash chain over the vectors of all
steps, which hold the losses, counts and shares, and a code of each rank's gradients of the
step before. Ranks whose histories differ are never taken for one fleet.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from geartrain.errors import CommunicationError

if TYPE_CHECKING:
    from collections.abc import Callable

    from geartrain.collectives.protocol import Collective
    from geartrain.parallel.trailer import RankFigures, Trailer

_DIGEST_BYTES = 16
_SAMPLE_ELEMENTS = 1 << 14
"""Looked at of each buffer: some 0.1 ms, whatever the size of the model."""
_VOTE_BYTES = 6
"""Of the lineage, which float64 holds exactly."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepName:
    """Names a state by its steps and the history that led to it."""

    step: int = 0
    """Optimizer steps applied."""
    lineage: str = ""
    """Hexadecimal; empty before the first step of this session."""

    def after(self, vector: torch.Tensor) -> StepName:
        """The name after one more step.

        Args:
            vector: What followed the step's gradients, summed over all ranks.

        >>> StepName().after(torch.zeros(2)) == StepName().after(torch.ones(2))
        False
        """
        step = self.step + 1
        digest = hashlib.blake2b(
            bytes.fromhex(self.lineage), digest_size=_DIGEST_BYTES, person=b"gt commit"
        )
        digest.update(step.to_bytes(8, "big"))
        digest.update(vector.contiguous().view(torch.uint8).numpy().tobytes())
        return StepName(step=step, lineage=digest.hexdigest())


@dataclass(frozen=True, slots=True)
class VotedStep:
    """A step that was exchanged, and may be applied once it is committed."""

    trailer: Trailer
    vector: torch.Tensor
    """What the trailer was read from."""
    name: StepName
    """Of the state that it leads to."""
    code: float
    """Of the gradients; 0 where none are held."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReducedStep:
    """A committed step as it is about to be applied: what another rank needs for it."""

    vector: torch.Tensor
    """What followed the gradients, summed over all ranks."""
    factor: float
    """What the gradients are still to be multiplied by."""
    flats: Sequence[torch.Tensor]
    """The gradients, summed over all ranks, one flat tensor a bucket; they are changed
    once the step is applied, so copy what is to be kept."""
    name: StepName
    """Of the state that the step leads to."""


class Committer(Protocol):
    """Decides when a step may be applied."""

    def exchanging(self) -> None:
        """This rank has computed its part, and waits for the others' from now on."""

    def vote(self, name: StepName) -> None:
        """This rank has all that it needs to apply the step that leads to this state.

        Raises:
            CommunicationError: If a member was lost.
        """

    def wait(self, name: StepName) -> None:
        """Return once all members have voted for the same; the step is to be applied.

        Raises:
            CommunicationError: If it is not to be applied here now: a member was lost,
                or another one has another history.
        """


class ExchangeCommitter:
    """Votes by one more sum over all ranks, in which each has a place of its own.

    The sum is there once all have given their part of it, and nobody gives it before it
    has the gradients.

    Args:
        world: All ranks that are left, as they are now.
        members: Their numbers, rising.
        rank: This one.
        device_ids: Of all ranks of the run, for an error.
    """

    def __init__(
        self,
        world: Callable[[], Collective],
        members: Callable[[], Sequence[int]],
        rank: int,
        device_ids: Sequence[str],
    ) -> None:
        self._world = world
        self._members = members
        self._rank = rank
        self._device_ids = device_ids
        self._votes: torch.Tensor | None = None

    def exchanging(self) -> None:
        """Nothing: nobody watches but the exchange."""

    def vote(self, name: StepName) -> None:
        """Give this rank's part of the sum."""
        self._votes = torch.zeros(len(self._device_ids), dtype=torch.float64)
        self._votes[self._rank] = _vote_of(name)

    def wait(self, name: StepName) -> None:
        """Wait for the sum, and compare.

        Raises:
            CommunicationError: If a member was lost, or the ranks have different
                histories, then on all of them.
        """
        votes, self._votes = self._votes, None
        assert votes is not None, "wait comes after vote"
        world = self._world()
        if world.num_members == 1:
            return
        world.all_reduce(votes).wait()
        found = [float(votes[rank]) for rank in self._members()]
        if len(set(found)) == 1:
            return
        told = ", ".join(
            f"{self._device_ids[rank]}: {int(vote):012x}"
            for rank, vote in zip(self._members(), found, strict=True)
        )
        msg = (
            f"the ranks came to step {name.step} by different ways ({told}); it was "
            "applied nowhere. Their weights differ: start again and load the last save"
        )
        raise CommunicationError(msg)


def gradient_code(flats: Sequence[torch.Tensor], step: int) -> float:
    """A code of summed gradients, which must be the same wherever they are applied.

    It looks at one element in ``stride``, others in each step, where there are more than
    16,384 in a buffer: damage to a stretch of at least ``stride`` elements is found at
    once, that of a single element within ``stride`` steps if it comes back each time, and
    else by chance. Sums would find every one, and cost a pass over the gradients.

    Args:
        flats: The buffers, after the exchange and before anything else is done to them.
        step: Chooses the elements.

    Returns:
        A whole number from 1 to 2**32, which float64 holds exactly.

    >>> gradient_code([torch.tensor([1.0, 2.0])], 0) == gradient_code([torch.ones(2)], 0)
    False
    """
    code = 0
    for flat in flats:
        stride = -(-flat.numel() // _SAMPLE_ELEMENTS) or 1
        sample = flat.detach()[step % stride :: stride].cpu().contiguous()
        code = zlib.crc32(sample.view(torch.uint8).numpy().tobytes(), code)
    return float(code + 1)


def check_same_gradients(ranks: Sequence[RankFigures], members: Sequence[int]) -> None:
    """Check that all ranks applied the same gradients in the step before.

    Args:
        ranks: Figures of all ranks.
        members: Those that are left.

    Raises:
        CommunicationError: On all ranks, if not.
    """
    codes = {rank: ranks[rank].gradient_code for rank in members}
    if len({code for code in codes.values() if code}) <= 1:
        return
    told = ", ".join(f"rank {rank}: {int(code):09x}" for rank, code in codes.items())
    msg = (
        f"the ranks got different sums of gradients in the step before ({told}); their "
        "weights differ: start again and load the last save"
    )
    raise CommunicationError(msg)


def _vote_of(name: StepName) -> float:
    digest = hashlib.blake2b(
        f"{name.step} {name.lineage}".encode(), digest_size=_VOTE_BYTES
    )
    return float(int.from_bytes(digest.digest(), "big"))
