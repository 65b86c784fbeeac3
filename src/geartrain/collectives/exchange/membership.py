"""Who takes part in one epoch."""

from __future__ import annotations

from dataclasses import dataclass

from geartrain.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Membership:
    """The members of one epoch, as one of them sees it."""

    epoch: int
    """Number of this membership; later ones are larger."""
    me: int
    """This process's position."""
    member_ids: tuple[str, ...]
    """What to call the members, in order of position."""

    def __post_init__(self) -> None:
        if not 0 <= self.me < len(self.member_ids) or self.epoch < 0:
            msg = (
                f"membership: me={self.me} must be one of {len(self.member_ids)} members, "
                f"and epoch={self.epoch} >= 0"
            )
            raise ConfigError(msg)

    @property
    def num_members(self) -> int:
        """Processes that take part."""
        return len(self.member_ids)

    def names(self, members: tuple[int, ...]) -> str:
        """What to call some of them."""
        return ", ".join(self.member_ids[member] for member in members)
