"""One all-reduce under way, from the call to the last stage."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from geartrain.errors import CommunicationError

if TYPE_CHECKING:
    from geartrain.planner.exchange.schedule import CommSchedule

Callback = Callable[[CommunicationError | None], None]
"""Told the error, or None where it was done."""


@dataclass(eq=False, slots=True, kw_only=True)
class PendingExchange:
    """Satisfies ``Pending``."""

    index: int
    """Counts the all-reduces of the epoch."""
    tensor: torch.Tensor
    """The caller's; holds the sum at the end."""
    key: str | None
    """The gradient's name across steps, if it has one."""
    schedule: CommSchedule
    """How it is carried out."""
    num_bytes: int
    """The size that the schedule was chosen for."""
    overdue: Callable[[], tuple[float, str | None]]
    """After how many seconds to ask again, and why waiting on makes no sense, or None."""
    queued_at_s: float = field(default_factory=time.monotonic)
    flat: torch.Tensor = field(init=False)
    """What travels, shape (num_elements,)."""
    _ended: threading.Event = field(default_factory=threading.Event)
    _error: CommunicationError | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _callbacks: list[Callback] = field(default_factory=list)

    def __post_init__(self) -> None:
        # Gradients that lie scattered travel as a copy.
        self.flat = self.tensor.detach().contiguous().view(-1)

    def wait(self) -> None:
        """Block until the tensor holds the sum.

        Raises:
            CommunicationError: If a peer was lost, the epoch was aborted, or nothing
                moved until the deadline.
        """
        while not self._ended.is_set():
            ask_again_s, why = self.overdue()
            if why is not None:
                raise CommunicationError(why)
            self._ended.wait(ask_again_s)
        if self._error is not None:
            raise CommunicationError(str(self._error)) from self._error

    @property
    def is_done(self) -> bool:
        """Whether ``wait`` would return or raise at once."""
        return self._ended.is_set()

    def when_done(self, callback: Callback) -> None:
        """Call back once with the error or None, from a stage thread or at once.

        The callback must be short: the next exchange waits for it.
        """
        with self._lock:
            if not self._ended.is_set():
                self._callbacks.append(callback)
                return
        callback(self._error)

    def succeed(self) -> None:
        """The flat tensor holds the sum."""
        if self._ended.is_set():
            return
        if self.flat.data_ptr() != self.tensor.data_ptr():
            self.tensor.detach().copy_(self.flat.view(self.tensor.shape))
        self._end(None)

    def fail(self, error: CommunicationError) -> None:
        """It will not be done; the first end stays."""
        self._end(error)

    def _end(self, error: CommunicationError | None) -> None:
        with self._lock:
            if self._ended.is_set():
                return
            self._error = error
            self._ended.set()
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback(error)
