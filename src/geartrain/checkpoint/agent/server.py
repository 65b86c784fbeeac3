"""Listens for trainers on a Unix socket and for peers on a TCP port."""

from __future__ import annotations

import logging
import secrets
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from geartrain.checkpoint.agent.messages import (
    Begin,
    LocalRequest,
    LogStep,
    PublicRequest,
    ReadStatus,
    Reserve,
    Seal,
    SetPeers,
    Status,
    WriteVersion,
)
from geartrain.checkpoint.agent.public import STALL_LIMIT_S, PublicDesk
from geartrain.checkpoint.agent.replication import Replication
from geartrain.checkpoint.agent.settings import AgentSettings
from geartrain.checkpoint.agent.shelf import Shelf
from geartrain.checkpoint.agent.trainer_desk import TrainerDesk
from geartrain.checkpoint.agent.version_writer import VersionWriter
from geartrain.checkpoint.agent.wire import is_same_user, receive_message
from geartrain.errors import CommunicationError
from geartrain.topology.agent_protocol import AgentAddress, greet

logger = logging.getLogger(__name__)

_HANDSHAKE_S = 5.0
_MAX_CONNECTIONS = 256
_BACKLOG = 64


class AgentServer:
    """A node agent's sockets and threads; the process around it decides when it ends.

    Args:
        settings: How it listens.
        token: Asked of whoever comes by TCP; never logged.

    Raises:
        ConfigError: If it would listen beyond loopback without a token.
        CommunicationError: If the address or the port can't be had.
    """

    def __init__(self, settings: AgentSettings, token: str) -> None:
        settings.check_token(token)
        self._settings = settings
        self._token = token
        self.shelf = Shelf(settings.memory_limit_bytes)
        self._desk = PublicDesk(settings=settings, shelf=self.shelf)
        self._replication = Replication(settings, self.shelf, token)
        self._lock = threading.Lock()
        self._trainers: dict[str, socket.socket] = {}
        self._open: set[socket.socket] = set()
        # Abstract: it belongs to the network namespace, and no file is left behind.
        name = f"geartrain-agent-{secrets.token_hex(16)}"
        self.local_address = f"@{name}"
        self._versions = VersionWriter(self.local_address, token)
        self._local = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._local.bind(f"\0{name}")
        self._local.listen(_BACKLOG)
        self._public = _listen(settings)
        port = self._public.getsockname()[1]
        self.peer_address = str(AgentAddress(host=settings.address, port=port))
        for listener, serve in (
            (self._local, self._serve_trainer),
            (self._public, self._serve_peer),
        ):
            # Apart, so that strangers at the port can't keep the trainers out.
            room = threading.BoundedSemaphore(_MAX_CONNECTIONS)
            self._start(partial(self._accept, listener, serve, room), "accept")

    def close(self) -> None:
        """Stop listening, end every connection, and forget the peers."""
        self._replication.close()
        with self._lock:
            sockets = [self._local, self._public, *self._open]
        for sock in sockets:
            # Wakes whoever waits in it, which closing it would not.
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        self._local.close()
        self._public.close()

    def _start(self, target: Callable[[], None], name: str) -> None:
        threading.Thread(target=target, name=f"geartrain-{name}", daemon=True).start()

    def _accept(
        self,
        listener: socket.socket,
        serve: Callable[[socket.socket], None],
        room: threading.BoundedSemaphore,
    ) -> None:
        while True:
            try:
                sock, _ = listener.accept()
            except OSError:
                return  # closed
            if not room.acquire(blocking=False):
                sock.close()  # whoever it is has 256 connections already
                continue
            self._start(partial(self._guard, sock, serve, room), "serve")

    def _guard(
        self,
        sock: socket.socket,
        serve: Callable[[socket.socket], None],
        room: threading.BoundedSemaphore,
    ) -> None:
        try:
            with sock:
                with self._lock:
                    self._open.add(sock)
                serve(sock)
        except (OSError, CommunicationError) as error:
            logger.debug("a connection ended: %s", error)
        finally:
            with self._lock:
                self._open.discard(sock)
            room.release()

    def _serve_peer(self, sock: socket.socket) -> None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # A peer whose machine vanished is noticed here, and not only by what it owes.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        greet(sock, self._token, _HANDSHAKE_S)
        while True:
            request = receive_message(sock, PublicRequest, STALL_LIMIT_S, lambda: True)
            self._desk.answer(sock, request)

    def _serve_trainer(self, sock: socket.socket) -> None:
        if not is_same_user(sock):
            return
        desk = TrainerDesk(sock, self.shelf)
        try:
            while True:
                request = receive_message(sock, LocalRequest, STALL_LIMIT_S, lambda: True)
                self._answer_trainer(sock, desk, request)
        finally:
            desk.close()

    def _answer_trainer(
        self, sock: socket.socket, desk: TrainerDesk, request: LocalRequest
    ) -> None:
        match request:
            case Reserve():
                self._fence(request.member_id, sock)
                desk.answer(request)
            case Begin() | Seal() | LogStep():
                desk.answer(request)
            case SetPeers():
                self._replication.set_peers(request.peers, request.num_copies)
            case WriteVersion():
                self._versions.start(request, desk.send)
            case ReadStatus():
                desk.send(self._status(desk.member_id))
            case _:
                self._desk.answer(sock, request)

    def _fence(self, member_id: str, sock: socket.socket) -> None:
        """Turn an earlier trainer of the same member away: it may wake up again."""
        with self._lock:
            before = self._trainers.get(member_id)
            self._trainers[member_id] = sock
        if before is not None and before is not sock:
            with suppress(OSError):  # it is gone already
                before.shutdown(socket.SHUT_RDWR)

    def _status(self, member_id: str) -> Status:
        copies, warning = self._replication.status()
        return Status(
            copies=copies,
            warning=warning,
            free_bytes=self.shelf.free_bytes,
            log_bytes=self.shelf.log_state(member_id)[0] if member_id else 0,
        )


def _listen(settings: AgentSettings) -> socket.socket:
    try:
        family, kind, protocol, _, where = socket.getaddrinfo(
            settings.address, settings.port, type=socket.SOCK_STREAM
        )[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(where)
        listener.listen(_BACKLOG)
    except OSError as error:
        msg = (
            f"the agent of {settings.node_id} can't listen on {settings.address} port "
            f"{settings.port} ({error}); give an address of this host and a free port"
        )
        raise CommunicationError(msg) from error
    return listener
