"""How much memory an agent has given away: pure; a refusal says what would help."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from geartrain.errors import CheckpointError
from geartrain.units import format_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryBudget:
    """Bytes by what they are for; the sum never passes the limit."""

    limit_bytes: int
    used: Mapping[str, int] = field(default_factory=dict)
    """Purpose, such as ``member 3: snapshot``, to bytes."""

    @property
    def used_bytes(self) -> int:
        """Bytes given away."""
        return sum(self.used.values())

    @property
    def free_bytes(self) -> int:
        """Bytes left."""
        return self.limit_bytes - self.used_bytes

    def reserve(self, purpose: str, num_bytes: int) -> MemoryBudget:
        """Give bytes to a purpose, instead of what it had.

        Raises:
            CheckpointError: If they are not there; says who has them.

        >>> MemoryBudget(limit_bytes=10).reserve("log", 4).free_bytes
        6
        """
        if num_bytes < 0:
            msg = f"{purpose} asks for {num_bytes} bytes; expected at least 0"
            raise CheckpointError(msg)
        others = {key: size for key, size in self.used.items() if key != purpose}
        free_bytes = self.limit_bytes - sum(others.values())
        if num_bytes > free_bytes:
            largest = sorted(others.items(), key=lambda item: (-item[1], item[0]))[:3]
            held = ", ".join(f"{key} {format_bytes(size)}" for key, size in largest)
            msg = (
                f"{purpose} needs {format_bytes(num_bytes)} but "
                f"{format_bytes(max(0, free_bytes))} of "
                f"{format_bytes(self.limit_bytes)} are free"
                f"{f' (held: {held})' if held else ''}; raise the agent's memory limit, "
                "keep fewer copies, or give the state to more nodes"
            )
            raise CheckpointError(msg)
        return MemoryBudget(
            limit_bytes=self.limit_bytes, used={**others, purpose: num_bytes}
        )

    def release(self, purpose: str) -> MemoryBudget:
        """Take back what a purpose had; nothing where it had nothing."""
        others = {key: size for key, size in self.used.items() if key != purpose}
        return MemoryBudget(limit_bytes=self.limit_bytes, used=others)
