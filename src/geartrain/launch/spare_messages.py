"""What the launcher and its warm processes say to each other, over a socket pair.

JSON, a message a line. The files that a worker prints to, and its socket to the
launcher, travel beside the message that asks for the worker.
"""

from __future__ import annotations

import array
import os
import selectors
import socket
import time
from collections.abc import Sequence
from contextlib import suppress

import msgspec

from geartrain.errors import CommunicationError

MAX_MESSAGE_BYTES = 4 * 2**20
"""Twice what the kernel allows a command line; whatever is longer is damaged."""

_CHUNK_BYTES = 1 << 16
_MAX_FILES = 8
_CLOSE_ON_EXEC = getattr(socket, "MSG_CMSG_CLOEXEC", 0)  # absent on macOS


class StartWorker(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """To a warm process: a worker is wanted. Comes with four files.

    They are what becomes its stdout, its stderr, its socket to the launcher, and a pipe
    that holds a byte for as long as the order stands.
    """

    order_id: int
    arguments: tuple[str, ...]
    """Of ``geartrain.launch.worker``, but for who and where the launcher is."""
    threads: int | None = None
    """Threads of an operator; None leaves them as they are."""
    namespace: str | None = None
    """The network namespace that it works in."""
    cgroup_files: tuple[str, ...] = ()
    """``cgroup.procs`` files in which it enters itself before anything else."""
    directory: str
    """Where it works."""
    num_files: int = 4


class ReapWorker(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """To the fork server: nobody asks about this worker any more, free its number."""

    process_id: int
    num_files: int = 0


class SpareReady(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """From a warm process: all is imported."""

    warm_up_s: float
    num_threads: int
    """Of the process; a fork server with more than one can't fork safely."""
    num_files: int = 0


class WorkerStarted(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """From a warm process: the worker exists."""

    order_id: int
    process_id: int
    num_files: int = 0


class WorkerRefused(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """From the fork server: it could not fork."""

    order_id: int
    reason: str
    num_files: int = 0


class WorkerEnded(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """From the fork server: how a worker ended. It is a zombie until it is reaped."""

    process_id: int
    exit_code: int
    """Minus the signal's number where a signal ended it."""
    num_files: int = 0


Message = (
    StartWorker | ReapWorker | SpareReady | WorkerStarted | WorkerRefused | WorkerEnded
)

_decoder = msgspec.json.Decoder(Message)


class MessageChannel:
    """One end of the socket pair.

    Args:
        end: A connected Unix stream socket, which belongs to the channel from now on.
    """

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(True)
        self._end = end
        self._text = bytearray()
        self._files: list[int] = []
        self.has_ended = False
        """The other side is gone."""

    def fileno(self) -> int:
        """For a selector."""
        return self._end.fileno()

    def send(self, message: Message, files: Sequence[int] = (), *, within_s: float) -> None:
        """Send a message; the other side gets copies of the files.

        Raises:
            CommunicationError: If the other side is gone or takes nothing in time.
        """
        data = msgspec.json.encode(message) + b"\n"
        self._end.settimeout(within_s)
        try:
            sent = socket.send_fds(self._end, [data], list(files)) if files else 0
            if sent < len(data):  # else who has it all may be gone by now, rightly
                self._end.sendall(data[sent:])
        except OSError as error:  # a timeout is one
            msg = (
                f"{type(message).__name__} was not taken within {within_s:g} s: {error}; "
                "the process at the other end hangs or is gone"
            )
            raise CommunicationError(msg) from error
        finally:
            with suppress(OSError):
                self._end.settimeout(None)

    def receive(self, within_s: float = 0.0) -> list[tuple[Message, tuple[int, ...]]]:
        """Take the messages that are there, waiting for the first one if need be.

        Returns:
            Messages, each with the files that came with it; none after ``within_s``, or
            when the other side is gone, see ``has_ended``.

        Raises:
            CommunicationError: If what came is no message.
        """
        deadline_s = time.monotonic() + within_s
        with selectors.DefaultSelector() as selector:
            selector.register(self._end, selectors.EVENT_READ)
            while not self.has_ended:
                left_s = max(deadline_s - time.monotonic(), 0.0)
                if not selector.select(left_s):
                    return []
                self._read()
                if messages := self._take():
                    return messages
        return []

    def close(self) -> None:
        """Let go of the socket and of files that nobody took."""
        self._end.close()
        for file in self._files:
            os.close(file)
        self._files.clear()

    def _read(self) -> None:
        try:
            data, ancillary, _, _ = self._end.recvmsg(
                _CHUNK_BYTES, socket.CMSG_SPACE(4 * _MAX_FILES), _CLOSE_ON_EXEC
            )
        except ConnectionError:
            data, ancillary = b"", []
        for level, kind, payload in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                files = array.array("i")
                files.frombytes(payload[: len(payload) - len(payload) % files.itemsize])
                self._files.extend(files)
        self.has_ended = not data
        self._text += data
        if len(self._text) > MAX_MESSAGE_BYTES:
            msg = f"a message of more than {MAX_MESSAGE_BYTES} bytes came; it is damaged"
            raise CommunicationError(msg)

    def _take(self) -> list[tuple[Message, tuple[int, ...]]]:
        messages = []
        while (end := self._text.find(b"\n")) >= 0:
            line = bytes(self._text[:end])
            del self._text[: end + 1]
            try:
                message = _decoder.decode(line)
            except msgspec.DecodeError as error:
                msg = f"{line[:80]!r} is no message to or from a warm process: {error}"
                raise CommunicationError(msg) from error
            # The kernel may glue a message without files to the next one with some.
            files = tuple(self._files[: message.num_files])
            del self._files[: message.num_files]
            messages.append((message, files))
        return messages
