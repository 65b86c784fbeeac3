"""A small server on each host that measures links when told to."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from geartrain.errors import CommunicationError, ConfigError
from geartrain.topology.agent_flows import AgentFlows, ParkedSockets
from geartrain.topology.agent_protocol import (
    AgentAddress,
    Clock,
    Describe,
    Description,
    MeasureMemory,
    MemoryRate,
    OpenFlows,
    ReadClock,
    Refused,
    Reply,
    Request,
    RunFlows,
    greet,
    is_loopback,
    receive_request,
    send_message,
)
from geartrain.topology.flows import close_now
from geartrain.topology.host_identity import HostIdentity, read_host_identity
from geartrain.topology.interfaces import interface_of
from geartrain.topology.priority import raise_priority
from geartrain.topology.shared_memory import measure_copy_rate

logger = logging.getLogger(__name__)

_HANDSHAKE_S = 5.0
_MAX_CONNECTIONS = 512
_MAX_MEMORY_BYTES = 1 << 28
_ANY_ADDRESS = ("0.0.0.0", "::")  # noqa: S104 - refused, not bound


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentSettings:
    """How an agent listens and what it tells of its host."""

    addresses: tuple[str, ...] = ("127.0.0.1",)
    """Numeric, one an interface; each host of a probe is reached at one of them."""
    port: int = 0
    """0 takes a free one."""
    device_ids: tuple[str, ...] = ()
    """This host's devices, for the topology."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """This host's Kubernetes node labels, if any."""
    notes: tuple[str, ...] = ()
    """Why this interface, and which were passed over."""
    idle_timeout_s: float = 3600.0
    """A coordinator that says nothing for so long is let go."""

    def __post_init__(self) -> None:
        if not self.addresses:
            msg = "a link agent needs an address to listen on; got none"
            raise ConfigError(msg)
        for address in self.addresses:
            if address in _ANY_ADDRESS:
                msg = (
                    f"a link agent listens on chosen interfaces, not on all ({address}); "
                    "name an address of this host"
                )
                raise ConfigError(msg)


class LinkAgent:
    """Answers a coordinator's questions and takes part in its bursts.

    >>> with LinkAgent("secret") as agent:
    ...     agent.address.host
    '127.0.0.1'
    """

    def __init__(
        self,
        token: str,
        settings: AgentSettings | None = None,
        identity: HostIdentity | None = None,
    ) -> None:
        """Listen.

        Args:
            token: What callers must know; empty only on loopback.
            settings: Where to listen.
            identity: Which host this is; None reads it.

        Raises:
            ConfigError: If an address cannot be listened on, or is open to the network
                without a token.
        """
        self.settings = settings or AgentSettings()
        for address in self.settings.addresses:
            if not token and not is_loopback(address):
                msg = (
                    f"a link agent on {address} can be reached by others and needs a "
                    "token; give one, or listen on 127.0.0.1"
                )
                raise ConfigError(msg)
        self.identity = identity or read_host_identity()
        self._token = token
        self._parked = ParkedSockets()
        self._closing = False
        self._lock = threading.Lock()
        self._connections: set[socket.socket] = set()
        self._listeners = _listen(self.settings)
        self.addresses = tuple(
            AgentAddress(host=address, port=listener.getsockname()[1])
            for address, listener in zip(
                self.settings.addresses, self._listeners, strict=True
            )
        )
        self._threads = [
            threading.Thread(
                target=self._accept, args=(listener,), name="geartrain-agent", daemon=True
            )
            for listener in self._listeners
        ]
        for thread in self._threads:
            thread.start()

    @property
    def address(self) -> AgentAddress:
        """Where it is reached: the first of its addresses."""
        return self.addresses[0]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stop listening and end all connections."""
        with self._lock:
            self._closing = True
            connections = list(self._connections)
        for sock in (*self._listeners, *connections):
            close_now(sock)
        self._parked.close()
        for thread in self._threads:
            thread.join(timeout=_HANDSHAKE_S)

    def _accept(self, listener: socket.socket) -> None:
        raise_priority()
        while True:
            try:
                sock, _ = listener.accept()
            except OSError:
                if self._closing:
                    return
                time.sleep(0.05)  # out of descriptors: some connection will end
                continue
            with self._lock:
                full = self._closing or len(self._connections) >= _MAX_CONNECTIONS
                if not full:
                    self._connections.add(sock)
            if full:
                close_now(sock)
                continue
            threading.Thread(
                target=self._handle, args=(sock,), name="geartrain-agent-call", daemon=True
            ).start()

    def _handle(self, sock: socket.socket) -> None:
        parked = False
        raise_priority()  # this thread only waits and passes on
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            flow_id = greet(sock, self._token, _HANDSHAKE_S)
            if flow_id:
                parked = self._parked.park(flow_id, sock)
            else:
                self._serve(sock)
        except (OSError, CommunicationError) as error:
            logger.debug("a caller of the link agent went away: %s", error)
        finally:
            with self._lock:
                self._connections.discard(sock)
            if not parked:
                close_now(sock)

    def _serve(self, sock: socket.socket) -> None:
        flows = AgentFlows(self._token, sock.getsockname()[0], self._parked)
        try:
            while True:
                request = receive_request(sock, self.settings.idle_timeout_s)
                reply = self._answer(request, flows, sock)
                sock.settimeout(_HANDSHAKE_S)
                send_message(sock, reply)
        finally:
            flows.cancel()

    def _answer(self, request: Request, flows: AgentFlows, sock: socket.socket) -> Reply:
        match request:
            case Describe():
                return self._describe(sock.getsockname()[0])
            case ReadClock():
                return Clock(at_s=time.time())
            case MeasureMemory(num_bytes=num_bytes):
                if not 0 < num_bytes <= _MAX_MEMORY_BYTES:
                    return Refused(reason=f"num_bytes={num_bytes}: 1..{_MAX_MEMORY_BYTES}")
                return MemoryRate(bytes_per_s=measure_copy_rate(num_bytes))
            case OpenFlows():
                return flows.open(request)
            case RunFlows():
                return flows.run(request)

    def _describe(self, address: str) -> Description:
        return Description(
            host_id=self.identity.host_id,
            name=self.identity.name,
            boot_id=self.identity.boot_id,
            network_namespace=self.identity.network_namespace,
            address=address,
            interface=interface_of(address) or "",
            device_ids=self.settings.device_ids,
            labels=dict(self.settings.labels),
            notes=self.settings.notes,
        )


def _listen(settings: AgentSettings) -> list[socket.socket]:
    listeners: list[socket.socket] = []
    port = settings.port
    for address in settings.addresses:
        try:
            found = socket.getaddrinfo(
                address, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST
            )
            family, _, _, _, target = found[0]
            listener = socket.create_server(target, family=family, backlog=128)
        except OSError as error:
            for open_one in listeners:
                open_one.close()
            msg = (
                f"a link agent cannot listen on {address} port {port or 'any'}: {error}; "
                "name a numeric address of this host and a free port"
            )
            raise ConfigError(msg) from error
        listeners.append(listener)
    return listeners
