"""Hands this rank's state to processes that join, beside the training.

The training gives a copy of its state at one of its step boundaries, and each step that it
applies from then on; threads of this module send them. A receiver that does not keep up is
dropped: it is told at the next boundary what it lacks.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import socket
import threading
from collections.abc import Mapping
from typing import Any

import torch

from geartrain.checkpoint.tree_file import tree_to_bytes
from geartrain.elastic.greeting import Credentials
from geartrain.elastic.state_wire import greet_receiver, send_tree
from geartrain.errors import GeartrainError

logger = logging.getLogger(__name__)

Tree = Mapping[str, Any]  # Any: what checkpoint.tree keeps

_ACCEPT_S = 0.5
_MOST_WAITING = 16
_MOST_QUEUED_BYTES = 1 << 30


class StateGiver:
    """Listens for receivers; a daemon thread, and one for each receiver.

    Args:
        host: Address to listen at.
        credentials: Of the run; who does not prove to know them gets nothing.
    """

    def __init__(self, host: str, credentials: Credentials) -> None:
        self._credentials = credentials
        self._listening = socket.create_server((host, 0), backlog=_MOST_WAITING)
        self._lock = threading.Lock()
        self._waiting: list[_Receiver] = []
        self._followers: list[_Receiver] = []
        self._is_closed = False
        threading.Thread(target=self._accept, name="state giver", daemon=True).start()

    @property
    def address(self) -> str:
        """Where it listens, as HOST:PORT."""
        host, port = self._listening.getsockname()[:2]
        return f"{host}:{port}"

    @property
    def has_waiting(self) -> bool:
        """Whether a receiver waits for a state."""
        return bool(self._waiting)

    @property
    def has_followers(self) -> bool:
        """Whether a receiver has got a state, and waits for what comes after it."""
        return bool(self._followers)

    def give(self, state: Tree) -> None:
        """Send a state to all that wait; nobody may change it any more."""
        with self._lock:
            waiting, self._waiting = self._waiting, []
            self._followers += waiting
        for receiver in waiting:
            receiver.put(state)

    def pass_on(self, step: Tree) -> None:
        """Send a step to all that have the state before it."""
        for follower in list(self._followers):
            follower.put(step)
        with self._lock:
            self._followers = [f for f in self._followers if not f.is_over]

    def drop_followers(self) -> None:
        """Send them nothing more."""
        with self._lock:
            followers, self._followers = self._followers, []
        for follower in followers:
            follower.end()

    def close(self) -> None:
        """Listen no more; what is on its way still goes."""
        self._is_closed = True
        with contextlib.suppress(OSError):  # wakes the thread that waits in it
            self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        self.drop_followers()

    def _accept(self) -> None:
        while not self._is_closed:
            try:
                connected, _ = self._listening.accept()
            except OSError:
                return
            threading.Thread(
                target=self._serve, args=(connected,), name="state receiver", daemon=True
            ).start()

    def _serve(self, connected: socket.socket) -> None:
        with connected:
            try:
                greet_receiver(connected, self._credentials)
                receiver = _Receiver(connected)
                with self._lock:
                    self._waiting.append(receiver)
                receiver.send_all()
            except (OSError, GeartrainError) as error:
                logger.debug("a receiver of the state is gone: %s", error)


class _Receiver:
    """One process that is given a state, and then what follows."""

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        self._queue: queue.SimpleQueue[Tree | None] = queue.SimpleQueue()
        self._num_queued_bytes = 0
        self.is_over = False

    def put(self, tree: Tree) -> None:
        """Send it, after what was put before."""
        if self.is_over:
            return
        self._num_queued_bytes += _num_bytes(tree)
        if self._num_queued_bytes > _MOST_QUEUED_BYTES and not self._queue.empty():
            self.end()  # it does not keep up
            return
        self._queue.put(tree)

    def end(self) -> None:
        """Send nothing more."""
        self.is_over = True
        self._queue.put(None)

    def send_all(self) -> None:
        """Send until the end; in a thread of its own."""
        try:
            while (tree := self._queue.get()) is not None:
                send_tree(self._socket, tree_to_bytes(tree))
                self._num_queued_bytes -= _num_bytes(tree)
        finally:
            self.is_over = True


def _num_bytes(tree: Any) -> int:  # Any: what checkpoint.tree keeps
    if isinstance(tree, torch.Tensor):
        return tree.numel() * tree.element_size()
    if isinstance(tree, Mapping):
        return sum(_num_bytes(value) for value in tree.values())
    if isinstance(tree, list | tuple):
        return sum(_num_bytes(value) for value in tree)
    return 0
