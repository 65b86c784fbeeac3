"""What is asked of the exchange planner."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from geartrain.errors import ConfigError
from geartrain.planner.exchange.schedule import CodecProfile
from geartrain.topology.profile import Topology

HostGroupKind = Literal["lone", "shared_memory", "vendor"]
AUTO = "auto"
AUTO_CODECS = ("fp16", "bf16", "int8")
"""What policy ``auto`` may take: these held the held-out loss within 1 % of exact. 4-bit
and top-k may cost up to 2 %, so they are taken by name only; fp8 moves the bytes of int8
with a larger error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeRequest:
    """One all-reduce to plan."""

    topology: Topology
    placement: tuple[str, ...]
    """Host id of each member, shape (num_members,)."""
    num_bytes: int = 0
    """Of the tensor as float32."""
    codecs: tuple[CodecProfile, ...] = ()
    """What each codec costs on the slowest host."""
    policy: str | None = None
    """None: exact. ``auto``: a codec of ``AUTO_CODECS`` where it pays. A codec's name: that
    one, on the slow hop, wherever there is one."""
    host_group: HostGroupKind = "lone"
    core_fraction: float = 1.0
    """Processor cores that each host has for the exchange."""

    def __post_init__(self) -> None:
        names = [codec.name for codec in self.codecs]
        if self.policy not in (None, AUTO, *names):
            msg = (
                f"compression={self.policy!r} is not known here; expected None, "
                f"{AUTO!r} or one of {names}"
            )
            raise ConfigError(msg)
        if self.num_bytes < 0 or self.core_fraction <= 0:
            msg = (
                f"exchange of {self.num_bytes} bytes with {self.core_fraction} cores; "
                "expected >= 0 bytes and > 0 cores"
            )
            raise ConfigError(msg)

    def codec(self, name: str) -> CodecProfile:
        """The costs of a codec that the request knows."""
        return next(codec for codec in self.codecs if codec.name == name)
