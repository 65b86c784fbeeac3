"""One stage of a Gloo transport: messages, rings, and what to say when they fail."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from geartrain.collectives.exchange.first_contact import FirstContact
from geartrain.collectives.exchange.gloo_group import GlooGroup
from geartrain.errors import CommunicationError, ConfigError

if TYPE_CHECKING:
    from geartrain.collectives.exchange.gloo_transport import GlooTransport


_SIZES = 2**19 - 1
"""A prime: sizes share a remainder only where they differ by a multiple of it."""
_NUMBERS = 2**12
"""More messages of a pair than can be under way at once; a tag has 31 bits."""


class GlooStage:
    """Satisfies ``StageGroup``; one thread uses it."""

    def __init__(
        self,
        transport: GlooTransport,
        name: str,
        members: tuple[int, ...],
        *,
        shares_links: bool = False,
    ) -> None:
        self.name = name
        self.shares_links = shares_links
        self.members = members
        self.group: GlooGroup | None = None
        self.error: Exception | None = None
        self._transport = transport
        self._index_of = {member: index for index, member in enumerate(members)}
        self._sent = dict.fromkeys(members, 0)
        self._received = dict.fromkeys(members, 0)
        self._contacts: dict[tuple[int, ...], FirstContact] = {}

    def take(self) -> GlooGroup | None:
        """Hand the group over to whoever ends it."""
        group, self.group = self.group, None
        return group

    def tune(self, group: GlooGroup) -> None:
        """Suit the connections that the group has by now to what they carry."""
        if self.shares_links:
            group.share_links()

    def send(self, tensor: torch.Tensor, to_member: int) -> GlooHandle:
        """Start sending a contiguous host tensor; it stays untouched until waited for."""
        data = as_bytes(tensor)
        tag = message_tag(self._sent[to_member], data.numel())
        self._sent[to_member] += 1
        return self._start(
            lambda group: group.send(data, self._index_of[to_member], tag),
            data,
            f"sending {data.numel()} bytes to",
            (to_member,),
        )

    def receive(self, tensor: torch.Tensor, from_member: int) -> GlooHandle:
        """Start receiving into a contiguous host tensor of the size that is sent."""
        data = as_bytes(tensor)
        tag = message_tag(self._received[from_member], data.numel())
        self._received[from_member] += 1
        return self._start(
            lambda group: group.receive(data, self._index_of[from_member], tag),
            data,
            f"receiving {data.numel()} bytes from",
            (from_member,),
        )

    def all_reduce(self, tensor: torch.Tensor) -> GlooHandle:
        """Start Gloo's ring all-reduce over this stage's members, in their order."""
        others = tuple(m for m in self.members if m != self._transport.me)
        return self._start(
            lambda group: group.all_reduce(tensor, self._transport.timeout_s),
            tensor if others else tensor[:0],
            f"adding {tensor.nbytes} bytes with",
            others,
        )

    def _start(
        self,
        start: Callable[[GlooGroup], dist.Work],
        tensor: torch.Tensor,
        what: str,
        waited_for: tuple[int, ...],
    ) -> GlooHandle:
        self._transport.check()
        handle = GlooHandle(self._transport, tensor, what, waited_for)
        group = self.group
        # None where it was aborted since the check: the handle will say so.
        if tensor.numel() == 0 or group is None:
            handle.begin(None)
        elif not (group.is_lazy and self._is_queued(handle, group, start, waited_for)):
            handle.begin(lambda: start(group))
        return handle

    def _is_queued(
        self,
        handle: GlooHandle,
        group: GlooGroup,
        start: Callable[[GlooGroup], dist.Work],
        waited_for: tuple[int, ...],
    ) -> bool:
        """Whether the pair (or ring) is still to be connected, in its own thread."""

        def first() -> dist.Work:
            work = start(group)
            if len(waited_for) > 1:  # a ring connects while it is waited for
                work.wait(timedelta(seconds=self._transport.timeout_s))
            self.tune(group)
            return work

        contact = self._contacts.setdefault(waited_for, FirstContact())
        return contact.add(lambda: handle.begin(first, is_here=False))


class GlooHandle:
    """Satisfies ``Handle``; keeps the tensor alive while Gloo may touch it."""

    __slots__ = (
        "_begun",
        "_error",
        "_tensor",
        "_transport",
        "_waited_for",
        "_what",
        "_work",
    )

    def __init__(
        self,
        transport: GlooTransport,
        tensor: torch.Tensor,
        what: str,
        waited_for: tuple[int, ...],
    ) -> None:
        self._transport = transport
        self._work: dist.Work | None = None
        self._begun = False
        self._error: RuntimeError | None = None
        self._tensor: torch.Tensor | None = tensor
        self._what = what
        self._waited_for = waited_for

    def begin(self, start: Callable[[], dist.Work] | None, *, is_here: bool = True) -> None:
        """Start it; None where nothing is to be sent.

        Args:
            start: Gloo's call.
            is_here: Whether this is the thread that asked; else ``wait`` raises instead.

        Raises:
            CommunicationError: If it could not be started, and ``is_here``.
        """
        try:
            self._work = start() if start is not None else None
        except RuntimeError as error:
            if is_here:
                raise self._explained(error) from error
            self._error = error
        self._begun = True
        if not is_here:
            self._transport.notify()

    def wait(self) -> None:
        """Block until it is done.

        Raises:
            CommunicationError: If a peer was lost, the deadline passed, or the epoch
                was aborted.
        """
        try:
            with self._transport.waiting(self._waited_for):
                self._wait()
        except RuntimeError as error:
            raise self._explained(error) from error
        # What came in an epoch that is over is not to be used, even if it came whole.
        self._transport.check()
        self._work = self._tensor = None
        self._transport.progressed()

    def _wait(self) -> None:
        if not self._begun and not self._transport.wait_for(lambda: self._begun):
            msg = f"not connected within {self._transport.timeout_s:g} s"
            raise RuntimeError(msg)
        if self._error is not None:
            raise self._error
        if self._work is not None:
            self._work.wait(timedelta(seconds=self._transport.timeout_s))

    def _explained(self, error: RuntimeError) -> CommunicationError:
        return explain(self._transport, error, self._what, self._waited_for)


def explain(
    transport: GlooTransport, error: RuntimeError, what: str, waited_for: tuple[int, ...]
) -> CommunicationError:
    """The failure in words; the epoch is over from here on."""
    names = transport.names(waited_for)
    if transport.over is None:
        reason = f"{what} {names} failed: {first_line(error)}"
        transport.fail(reason, waited_for)
    return CommunicationError(f"{what} {names}: {transport.over_message()}")


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's memory as bytes, shape (num_bytes,): Gloo doesn't know all dtypes.

    Raises:
        ConfigError: If it is not contiguous host memory.
    """
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        msg = (
            f"a message must be contiguous host memory, not shape {tuple(tensor.shape)} "
            f"strides {tensor.stride()} on {tensor.device}; copy it first"
        )
        raise ConfigError(msg)
    return tensor.detach().reshape(-1).view(torch.uint8)


def message_tag(number: int, num_bytes: int) -> int:
    """By which both ends know a message: its number in the pair, and its size.

    Gloo ends the whole process where more comes than was asked for, and takes less without
    a word. With the size in its tag such a message finds nobody, and the wait for it ends
    like any other that nothing comes of.

    Args:
        number: Counts the pair's messages in this direction.
        num_bytes: As this end sees it.
    """
    return number % _NUMBERS * (_SIZES + 1) + num_bytes % _SIZES


def first_line(error: BaseException) -> str:
    """The part of an error's text that says what happened."""
    text = (str(error).strip() or type(error).__name__).splitlines()[0]
    text = text.partition(". This is typically")[0]  # Gloo goes on with advice
    _, found, rest = text.partition("] ")  # Gloo begins with [file:line]
    return rest if found and text.startswith("[") else text
