"""The coordinator's connection to one agent."""

from __future__ import annotations

import socket
import time
from typing import TypeVar

from geartrain.errors import CommunicationError
from geartrain.topology.agent_protocol import (
    AgentAddress,
    Clock,
    Describe,
    Description,
    MeasureMemory,
    MemoryRate,
    ReadClock,
    Refused,
    Reply,
    Request,
    introduce,
    receive_reply,
    send_message,
)
from geartrain.topology.flows import describe_failure

_NUM_CLOCK_READINGS = 4

ReplyKind = TypeVar("ReplyKind")


class AgentClient:
    """Asks one agent, and names it in every error."""

    def __init__(self, address: AgentAddress, token: str, timeout_s: float) -> None:
        """Connect, prove the token, ask which host it is, and compare clocks.

        Raises:
            CommunicationError: If the agent cannot be reached or refuses the token.
        """
        self.address = address
        self.timeout_s = timeout_s
        try:
            self._sock = socket.create_connection(
                (address.host, address.port), timeout=timeout_s
            )
        except OSError as error:
            msg = (
                f"the link agent at {address} cannot be reached: "
                f"{describe_failure(error)}; start `geartrain probe --agent` there, and "
                "check the address and the firewall"
            )
            raise CommunicationError(msg) from error
        try:
            self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            introduce(self._sock, token, timeout_s)
            self.description: Description = self.ask(Describe(), Description)
            self.clock_ahead_s = self._compare_clocks()
        except (OSError, CommunicationError) as error:
            self._sock.close()
            if str(address) in str(error):
                raise
            msg = f"the link agent at {address}: {error}"
            raise CommunicationError(msg) from error

    def __str__(self) -> str:
        return f"{self.description.host_id} ({self.address})"

    def tell(self, request: Request) -> None:
        """Send a request; :meth:`hear` gets the reply."""
        try:
            self._sock.settimeout(self.timeout_s)
            send_message(self._sock, request)
        except OSError as error:
            msg = f"the link agent of {self} is gone: {describe_failure(error)}"
            raise CommunicationError(msg) from error

    def hear(self, kind: type[ReplyKind], timeout_s: float) -> ReplyKind:
        """Await the reply to the last request.

        Raises:
            CommunicationError: If it does not come in time, or is a refusal.
        """
        who = str(self) if hasattr(self, "description") else f"host ({self.address})"
        try:
            reply: Reply = receive_reply(self._sock, timeout_s)
        except CommunicationError as error:
            msg = (
                f"the link agent of {who} gave no reply within {timeout_s:.1f} s "
                f"({error}); see whether that host still runs"
            )
            raise CommunicationError(msg) from error
        if isinstance(reply, Refused):
            msg = f"the link agent of {who} refused: {reply.reason}"
            raise CommunicationError(msg)
        if not isinstance(reply, kind):
            msg = f"the link agent of {who} answered with a {type(reply).__name__}"
            raise CommunicationError(msg)
        return reply

    def ask(self, request: Request, kind: type[ReplyKind]) -> ReplyKind:
        """Send a request and await its reply."""
        self.tell(request)
        return self.hear(kind, self.timeout_s)

    def measure_memory(self, num_bytes: int) -> float:
        """The host's copy rate through shared memory, bytes/s."""
        return self.ask(MeasureMemory(num_bytes=num_bytes), MemoryRate).bytes_per_s

    def _compare_clocks(self) -> float:
        """How far the agent's clock is ahead of this one, by the fastest round trip."""
        best_s, ahead_s = float("inf"), 0.0
        for _ in range(_NUM_CLOCK_READINGS):
            start_s, start = time.time(), time.perf_counter()
            clock = self.ask(ReadClock(), Clock)
            took_s = time.perf_counter() - start
            if took_s < best_s:
                best_s, ahead_s = took_s, clock.at_s - (start_s + took_s / 2)
        return ahead_s

    def close(self) -> None:
        """End the connection; the agent ends its flows."""
        self._sock.close()
