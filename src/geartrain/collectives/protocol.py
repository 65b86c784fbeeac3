"""What a gradient exchange must offer. Torch only for types."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch


class Pending(Protocol):
    """A collective under way."""

    def wait(self) -> None:
        """Block until the tensor holds the sum.

        Raises:
            CommunicationError: If a peer was lost or the deadline passed.
        """


class Collective(Protocol):
    """Sums tensors over a group of ranks."""

    @property
    def num_members(self) -> int:
        """Ranks that take part."""

    def all_reduce(
        self, tensor: torch.Tensor, weight: float = 1.0, *, key: str | None = None
    ) -> Pending:
        """Start replacing the tensor by its weighted sum over all members.

        All members must start the same collectives in the same order. The result
        has the same bits on every member.

        Args:
            tensor: This member's part; don't touch it until waited for.
            weight: What this part is multiplied by; 0 counts it as zeros without
                reading it, so that a NaN in it is harmless.
            key: Name of a gradient, the same in every step. Only what has one may be
                sent in a lossy code, and what the code lost is added in the next step.
        """

    def predict_s(self, num_bytes: int) -> float:
        """Predicted duration of one all-reduce of this size."""
