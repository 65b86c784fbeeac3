"""The flows that begin or end at an agent, and the connections that carry them."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable

from geartrain.errors import CommunicationError
from geartrain.topology.agent_protocol import (
    FlowFailure,
    FlowsDone,
    FlowsOpened,
    OpenFlows,
    Refused,
    Reply,
    RunFlows,
    SendOrder,
    introduce,
)
from geartrain.topology.flows import FlowTask, Receiver, Sender, close_now
from geartrain.topology.interfaces import connect_from

_UNCLAIMED_S = 10.0
"""A connection that no flow asks for within this time is closed."""
_MAX_FLOWS = 256
_MAX_BURST_S = 5.0


class ParkedSockets:
    """Connections of flows, from the caller's handshake until the flow asks for them."""

    def __init__(self) -> None:
        self._arrived = threading.Condition()
        self._sockets: dict[str, tuple[socket.socket, float]] = {}
        self._closed = False

    def park(self, flow_id: str, sock: socket.socket) -> bool:
        """Keep a socket; False where it must not."""
        now_s = time.monotonic()
        with self._arrived:
            for old_id, (old, at_s) in list(self._sockets.items()):
                if now_s - at_s > _UNCLAIMED_S:  # nobody came for it
                    close_now(old)
                    del self._sockets[old_id]
            too_many = len(self._sockets) >= _MAX_FLOWS
            if self._closed or too_many or flow_id in self._sockets:
                return False
            self._sockets[flow_id] = (sock, now_s)
            self._arrived.notify_all()
            return True

    def take(self, flow_id: str, timeout_s: float) -> socket.socket:
        """Wait for a flow's socket."""
        with self._arrived:
            self._arrived.wait_for(
                lambda: self._closed or flow_id in self._sockets, timeout=timeout_s
            )
            if flow_id not in self._sockets:
                msg = f"the sender did not connect within {timeout_s:g} s"
                raise CommunicationError(msg)
            sock, _ = self._sockets.pop(flow_id)
        sock.settimeout(timeout_s)
        return sock

    def close(self) -> None:
        """Close what nobody came for."""
        with self._arrived:
            self._closed = True
            for sock, _ in self._sockets.values():
                close_now(sock)
            self._sockets.clear()
            self._arrived.notify_all()


class AgentFlows:
    """The flows that one coordinator has running here."""

    def __init__(self, token: str, own_address: str, parked: ParkedSockets) -> None:
        self._token = token
        self._own_address = own_address
        self._parked = parked
        self._senders: list[tuple[Sender, FlowTask]] = []
        self._receivers: list[tuple[Receiver, FlowTask]] = []

    def open(self, request: OpenFlows) -> Reply:
        """Connect all flows of a round."""
        self.cancel()
        if len(request.sends) + len(request.receives) > _MAX_FLOWS:
            return Refused(reason=f"more than {_MAX_FLOWS} flows at once")
        deadline_s = time.monotonic() + request.timeout_s
        for flow_id in request.receives:
            receiver = Receiver(flow_id, self._acceptor(flow_id, request.timeout_s))
            self._receivers.append((receiver, FlowTask(receiver)))
        for order in request.sends:
            if not 0 < order.duration_s <= _MAX_BURST_S:
                return Refused(reason=f"a burst of {order.duration_s} s is out of bounds")
            sender = Sender(order, self._connector(order, request.timeout_s))
            self._senders.append((sender, FlowTask(sender)))
        failures = []
        for task in self._tasks():
            if not task.await_open(max(deadline_s - time.monotonic(), 0.0)):
                reason = task.failure or f"not connected within {request.timeout_s:g} s"
                failures.append(FlowFailure(flow_id=task.end.flow_id, reason=reason))
        return FlowsOpened(
            latencies_s={sender.flow_id: sender.latency_s for sender, _ in self._senders},
            failures=tuple(failures),
        )

    def run(self, request: RunFlows) -> Reply:
        """Run them all at once."""
        tasks = self._tasks()
        deadline_s = time.monotonic() + request.timeout_s
        for task in tasks:
            task.go(request.start_at_s, request.timeout_s)
        failures = []
        for task in tasks:
            if not task.await_done(max(deadline_s - time.monotonic(), 0.0)):
                reason = task.failure or f"not done within {request.timeout_s:g} s"
                failures.append(FlowFailure(flow_id=task.end.flow_id, reason=reason))
        done = FlowsDone(
            sent_bytes={sender.flow_id: sender.sent_bytes for sender, _ in self._senders},
            arrivals={
                receiver.flow_id: tuple(receiver.arrivals)
                for receiver, _ in self._receivers
            },
            started_at_s={
                sender.flow_id: sender.started_at_s for sender, _ in self._senders
            },
            acknowledged={
                sender.flow_id: tuple(sender.acknowledged) for sender, _ in self._senders
            },
            failures=tuple(failures),
        )
        self.cancel()
        return done

    def cancel(self) -> None:
        """End what still runs."""
        for task in self._tasks():
            task.cancel()
        self._senders.clear()
        self._receivers.clear()

    def _tasks(self) -> list[FlowTask]:
        return [task for _, task in (*self._senders, *self._receivers)]

    def _acceptor(self, flow_id: str, timeout_s: float) -> Callable[[], socket.socket]:
        return lambda: self._parked.take(flow_id, timeout_s)

    def _connector(self, order: SendOrder, timeout_s: float) -> Callable[[], socket.socket]:
        def connect() -> socket.socket:
            # From the chosen interface, also where the routing table prefers another.
            sock = connect_from(
                self._own_address, order.target_host, order.target_port, timeout_s
            )
            try:
                introduce(sock, self._token, timeout_s, order.flow_id)
                sock.settimeout(timeout_s)
            except BaseException:
                sock.close()
                raise
            return sock

        return connect
