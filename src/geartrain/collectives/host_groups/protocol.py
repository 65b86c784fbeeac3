"""What a device group offers to the exchange between hosts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch


class HostExchange(Protocol):
    """One tensor on its way through the device group.

    ``reduce`` and ``publish`` are called from two threads, one each, every chunk once
    and in index order.
    """

    @property
    def host_tensor(self) -> torch.Tensor | None:
        """On the leader the flat host-memory tensor, shape (num_elements,); else None."""

    def reduce(self, chunk_index: int) -> None:
        """Block until the leader's chunk holds the group's sum, added in rank order."""

    def publish(self, chunk_index: int) -> None:
        """Block until this member's own tensor holds the leader's chunk."""

    def finish(self) -> None:
        """Give scratch memory back; called once, after the last chunk was published."""


class HostGroup(Protocol):
    """The processes of one host: one alone, shared memory, or a vendor's library."""

    @property
    def is_leader(self) -> bool:
        """Whether this process speaks for the host."""

    @property
    def num_members(self) -> int:
        """Processes on this host."""

    def open(
        self, tensor: torch.Tensor, chunks: Sequence[tuple[int, int]], weight: float = 1.0
    ) -> HostExchange:
        """Begin with one flat contiguous tensor; all members in the same order.

        Args:
            tensor: This member's part, shape (num_elements,), on any device.
            chunks: ``(start, stop)`` elements of each chunk, covering the tensor.
            weight: What this member's part is multiplied by; 0 counts it as zeros
                without reading it.
        """

    def abort(self) -> None:
        """Wake whoever waits in this group with a CommunicationError."""

    def close(self) -> None:
        """Give shared segments and groups back."""
