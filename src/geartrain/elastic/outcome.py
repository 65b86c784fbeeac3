"""How a step, or a membership, ends for one worker."""

from __future__ import annotations

from dataclasses import dataclass

from geartrain.elastic.view import Ending
from geartrain.errors import CommunicationError


@dataclass(frozen=True, slots=True, kw_only=True)
class Committed:
    """All members of the epoch voted: apply the step."""

    step: int
    lineage: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Interrupted:
    """The epoch is over without this step: drop it, and take up the next epoch."""

    reason: str


class MembershipEnded(CommunicationError):  # noqa: N818 - not always an error
    """This process takes part no more; ``ending`` says why, and whose fault it was."""

    def __init__(self, ending: Ending) -> None:
        super().__init__(ending.reason)
        self.ending = ending
