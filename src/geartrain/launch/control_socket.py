"""The socket in a run's directory, by which its devices are changed while it runs.

A Unix socket that only its owner may use: one request a connection, one answer, each a
line of JSON. The launcher polls it; nothing here waits for a client.
"""

from __future__ import annotations

import contextlib
import errno
import os
import selectors
import socket
import stat
import struct
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec

from geartrain import errors
from geartrain.errors import CommunicationError, ConfigError, GeartrainError
from geartrain.launch.control_messages import (
    Answer,
    DrainRequest,
    ErrorKind,
    FleetChange,
    ListRequest,
    Request,
    RunView,
    ScaleRequest,
    plan_change,
)
from geartrain.launch.run_directory import MANIFEST_NAME, RUNS_DIR

SOCKET_NAME = "control.sock"

_MAX_REQUEST_BYTES = 2**20
_MAX_ANSWER_BYTES = 2**26
_MAX_CLIENTS = 32
_CLIENT_S = 10.0
"""How long a client may take to say what it wants, and to take the answer."""
_CHUNK_BYTES = 1 << 16

_request_decoder = msgspec.json.Decoder(Request)
_answer_decoder = msgspec.json.Decoder(Answer)


@dataclass(slots=True, eq=False)
class _Client:
    """One connection."""

    end: socket.socket
    deadline_s: float
    received: bytearray = field(default_factory=bytearray)
    unsent: bytes | None = None
    """What is left of the answer; None: there is none yet."""
    request_id: int | None = None
    """Where it waits for the launcher's word."""


class ControlSocket:
    """The launcher's side.

    Args:
        run_dir: Where the socket is made.
        view: The run, now; see ``update``.

    Raises:
        ConfigError: If the socket can't be made there.
    """

    def __init__(self, run_dir: Path, view: RunView) -> None:
        self._path = run_dir / SOCKET_NAME
        self._view = view
        self._num_requests = 0
        self._changes: list[FleetChange] = []
        self._listener = _listen(run_dir)
        self._clients: set[_Client] = set()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)

    def update(self, view: RunView) -> None:
        """Say how the run is now; the next requests are checked against it."""
        self._view = view

    def poll(self) -> tuple[FleetChange, ...]:
        """Serve clients, without waiting for any.

        Returns:
            Changes that were asked for and are possible; each is to be answered.
        """
        for key, _ in self._selector.select(0):
            if key.data is None:
                self._accept()
            elif key.data.unsent is None:
                self._receive(key.data)
            else:
                self._send(key.data)
        now_s = time.monotonic()
        for client in [c for c in self._clients if now_s > c.deadline_s]:
            if client.request_id is None:
                self._drop(client)
        changes, self._changes = tuple(self._changes), []
        return changes

    def answer(
        self, change: FleetChange, message: str, error: ErrorKind | None = None
    ) -> None:
        """Tell who asked for a change what becomes of it; one that has gone is not told.

        Args:
            change: From ``poll``.
            message: For people.
            error: The class of error that this is; None: it is done, or will be.
        """
        for client in self._clients:
            if client.request_id == change.request_id:
                answer = Answer(
                    message=message,
                    error=error,
                    added=() if error else tuple(p.device_id for p in change.add),
                    removed=() if error else change.remove,
                )
                self._reply(client, answer)
                return

    def close(self) -> None:
        """Tell those who wait that the run is over, and remove the socket."""
        self._listener.close()
        self._path.unlink(missing_ok=True)
        over = Answer(
            message=f"run {self._view.run_id} ended before this was done",
            error="ConfigError",
        )
        for client in list(self._clients):
            if client.request_id is not None:
                self._reply(client, over)
            if client in self._clients:
                self._drop(client)
        self._selector.close()

    def _accept(self) -> None:
        try:
            end, _ = self._listener.accept()
        except OSError:  # who knocked has gone, or there are too many files
            return
        end.setblocking(False)
        client = _Client(end=end, deadline_s=time.monotonic() + _CLIENT_S)
        self._clients.add(client)
        self._selector.register(end, selectors.EVENT_READ, client)
        if not _may_ask(end):
            self._drop(client)
        elif len(self._clients) > _MAX_CLIENTS:
            busy = f"{_MAX_CLIENTS} others are asking this run; try again"
            self._reply(client, Answer(message=busy, error="CommunicationError"))

    def _receive(self, client: _Client) -> None:
        try:
            data = client.end.recv(_CHUNK_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if client.request_id is not None and data:
            return  # one request a connection; what follows is passed over
        client.received += data
        line, newline, _ = client.received.partition(b"\n")
        if newline:
            self._reply_to(client, bytes(line))
        elif not data:
            self._drop(client)
        elif len(client.received) > _MAX_REQUEST_BYTES:
            msg = f"the request is longer than {_MAX_REQUEST_BYTES} bytes"
            self._reply(client, Answer(message=msg, error="ConfigError"))

    def _reply_to(self, client: _Client, line: bytes) -> None:
        try:
            request = _request_decoder.decode(line)
            if isinstance(request, ListRequest):
                self._reply(client, Answer(run=self._view))
                return
            self._num_requests += 1
            change = replace(
                plan_change(request, self._view), request_id=self._num_requests
            )
        except (msgspec.DecodeError, RecursionError) as error:
            msg = f"not a request: {error}; use the geartrain of the run's version"
            self._reply(client, Answer(message=msg, error="ConfigError"))
        except ConfigError as error:
            self._reply(client, Answer(message=str(error), error="ConfigError"))
        else:
            if not change.add and not change.remove:
                msg = f"run {self._view.run_id} is as asked already"
                self._reply(client, Answer(message=msg))
                return
            client.request_id = change.request_id
            client.received.clear()
            self._changes.append(change)

    def _reply(self, client: _Client, answer: Answer) -> None:
        client.request_id = None
        client.deadline_s = time.monotonic() + _CLIENT_S
        client.unsent = msgspec.json.encode(answer) + b"\n"
        self._selector.modify(client.end, selectors.EVENT_WRITE, client)
        self._send(client)

    def _send(self, client: _Client) -> None:
        assert client.unsent is not None, "it has an answer"
        try:
            sent = client.end.send(client.unsent)
        except BlockingIOError:
            return
        except OSError:  # it has gone
            self._drop(client)
            return
        client.unsent = client.unsent[sent:]
        if not client.unsent:
            self._drop(client)

    def _drop(self, client: _Client) -> None:
        self._clients.discard(client)
        self._selector.unregister(client.end)
        client.end.close()


def find_run(name: Path) -> Path:
    """Find a run directory by its path, or by its name in ``runs``.

    Raises:
        ConfigError: If there is no run.
    """
    for run_dir in (name, RUNS_DIR / name):
        if (run_dir / MANIFEST_NAME).is_file():
            return run_dir
    msg = f"no run at {name} or {RUNS_DIR / name}; name a run directory, as in runs/"
    raise ConfigError(msg)


def ask_run(
    run_dir: Path,
    request: ScaleRequest | DrainRequest | ListRequest,
    within_s: float = _CLIENT_S,
) -> Answer:
    """Ask a run that is going on, and wait for its answer.

    Raises:
        ConfigError: If the run is over, is another user's, or refuses.
        CommunicationError: If it does not answer in time.
        DeviceError: If the run could not do it.
    """
    deadline_s = time.monotonic() + within_s
    with _connect(run_dir, within_s) as end:
        try:
            end.sendall(msgspec.json.encode(request) + b"\n")
            answer = _answer_decoder.decode(_receive_line(end, deadline_s))
        except TimeoutError as error:
            msg = (
                f"the launcher of {run_dir} did not answer within {within_s:g} s; it may "
                "be stopped or busy, and may still do what was asked: see "
                f"geartrain nodes list {run_dir}"
            )
            raise CommunicationError(msg) from error
        except (OSError, msgspec.DecodeError) as error:
            msg = f"run {run_dir} ended while it was asked ({error})"
            raise ConfigError(msg) from error
    if answer.error is not None:
        kind: type[GeartrainError] = getattr(errors, answer.error)
        raise kind(answer.message)
    return answer


def _receive_line(end: socket.socket, deadline_s: float) -> bytes:
    received = bytearray()
    while not received.endswith(b"\n"):
        left_s = deadline_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError
        end.settimeout(left_s)
        data = end.recv(_CHUNK_BYTES)
        if not data or len(received) > _MAX_ANSWER_BYTES:
            msg = "no whole answer came"
            raise ConnectionError(msg)
        received += data
    return bytes(received)


def _connect(run_dir: Path, within_s: float) -> socket.socket:
    end = socket.socket(socket.AF_UNIX)
    try:
        end.settimeout(within_s)
        with _address(run_dir) as address:
            end.connect(address)
    except OSError as error:
        end.close()
        if error.errno == errno.ENOENT:
            msg = (
                f"run {run_dir} is over, or its launcher takes no requests; only a run "
                "that goes on can be asked"
            )
        elif error.errno == errno.ECONNREFUSED:
            msg = f"run {run_dir} is over: its launcher has gone; start another one"
        elif error.errno in {errno.EACCES, errno.EPERM}:
            msg = f"run {run_dir} is another user's; ask as the one who started it"
        else:
            msg = f"run {run_dir} can't be asked: {error}; is its launcher stopped?"
            raise CommunicationError(msg) from error
        raise ConfigError(msg) from error
    return end


def _listen(run_dir: Path) -> socket.socket:
    (run_dir / SOCKET_NAME).unlink(missing_ok=True)  # a killed launcher's
    listener = socket.socket(socket.AF_UNIX)
    try:
        if sys.platform == "linux":
            # Linux takes the mode over to the file, which so is never open to others.
            os.fchmod(listener.fileno(), stat.S_IRUSR | stat.S_IWUSR)
        with _address(run_dir) as address:
            listener.bind(address)
        (run_dir / SOCKET_NAME).chmod(stat.S_IRUSR | stat.S_IWUSR)
        listener.listen(_MAX_CLIENTS)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        msg = f"no socket can be made in {run_dir}: {error}; use another --run-dir"
        raise ConfigError(msg) from error
    return listener


@contextlib.contextmanager
def _address(run_dir: Path) -> Iterator[str]:
    """The socket's address, short enough for the kernel wherever the directory is."""
    if sys.platform != "linux":
        yield str(run_dir / SOCKET_NAME)
        return
    directory = os.open(run_dir, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{directory}/{SOCKET_NAME}"
    finally:
        os.close(directory)


def _may_ask(end: socket.socket) -> bool:
    """Whether the client is this user or root, whatever the file's mode has become."""
    if sys.platform != "linux":
        return True
    size = struct.calcsize("3i")
    credentials = end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
    _, user_id, _ = struct.unpack("3i", credentials)
    return user_id in {0, os.geteuid()}
