"""What the staged exchange needs from below: messages between leaders."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch


class Handle(Protocol):
    """A message or collective under way."""

    def wait(self) -> None:
        """Block until it is done.

        Raises:
            CommunicationError: If a peer was lost, the deadline passed, or the epoch
                was aborted, by whatever thread.
        """


class StageGroup(Protocol):
    """Messages of one stage between host leaders, over sockets of its own.

    A stage has sockets of its own because Gloo sends its "ready to receive" notices
    through the same socket, behind queued payload. Messages between two members arrive
    in the order in which they were started; one thread uses a stage.
    """

    def send(self, tensor: torch.Tensor, to_member: int) -> Handle:
        """Start sending a contiguous host tensor; it stays untouched until waited for."""

    def receive(self, tensor: torch.Tensor, from_member: int) -> Handle:
        """Start receiving into a contiguous host tensor of the size that is sent."""

    def all_reduce(self, tensor: torch.Tensor) -> Handle:
        """Start Gloo's ring all-reduce over this stage's members, in their order."""


class Transport(Protocol):
    """All stages of one epoch; made anew for the next."""

    @property
    def epoch(self) -> int:
        """Number of this membership; later ones are larger."""

    @property
    def me(self) -> int:
        """This process's position among the members."""

    @property
    def num_members(self) -> int:
        """Processes that take part."""

    def stage(
        self, name: str, members: Sequence[int], *, shares_links: bool = False
    ) -> StageGroup:
        """The stage of that name among these members, in this order; made once.

        All its members must ask for it. ``send`` and ``receive`` take positions among
        all members, not indices into ``members``. ``shares_links`` tells that messages of
        several members go through the same link at once.

        Raises:
            CommunicationError: If it could not be made within the build deadline.
        """
