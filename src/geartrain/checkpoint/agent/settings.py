"""How a node agent listens, what it may use, and where it is."""

from __future__ import annotations

from dataclasses import dataclass

from geartrain.errors import ConfigError
from geartrain.topology.agent_protocol import is_loopback


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentSettings:
    """Settings of one node's agent.

    Raises:
        ConfigError: If it would listen beyond loopback without a token, or anywhere.
    """

    node_id: str
    host_id: str
    """Failure domain: a copy never lies on the host of its origin."""
    rack_id: str = ""
    """Larger failure domain; empty where it is not known."""
    address: str = "127.0.0.1"
    """Numeric, of the interface that peers reach."""
    port: int = 0
    """0 takes a free one."""
    memory_limit_bytes: int
    """Of everything it holds, buffers of the trainers included."""
    linger_s: float = 0.0
    """How long it stays when the process that started it is gone."""

    def check_token(self, token: str) -> None:
        """Check that nobody gets at a state without being asked for a token.

        Raises:
            ConfigError: If that would be so.
        """
        if not token and not is_loopback(self.address):
            msg = (
                f"the agent of {self.node_id} would listen on {self.address} without a "
                "token; give it one, or let it listen on 127.0.0.1"
            )
            raise ConfigError(msg)

    def __post_init__(self) -> None:
        if not self.node_id or not self.host_id or self.memory_limit_bytes <= 0:
            msg = (
                f"node_id={self.node_id!r}, host_id={self.host_id!r}, memory_limit_bytes="
                f"{self.memory_limit_bytes}: expected names and a positive limit"
            )
            raise ConfigError(msg)
        if self.address in {"", "0.0.0.0", "::"}:  # noqa: S104 - refused, not bound
            msg = (
                f"address={self.address!r} would listen on every interface; give the "
                "address of the one that peers reach"
            )
            raise ConfigError(msg)
