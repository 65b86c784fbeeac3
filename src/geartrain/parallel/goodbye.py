"""The end of a training: nobody leaves before all have made their last step."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from geartrain.errors import CommunicationError

if TYPE_CHECKING:
    from geartrain.parallel.membership import Membership
    from geartrain.parallel.process_group import RankGroups

logger = logging.getLogger(__name__)

_GOODBYE_S = 30.0
_POLL_S = 0.01


@dataclass(slots=True)
class Goodbye:
    """One rank's.

    Args:
        groups: Of this rank.
        membership: Tells who is lost meanwhile.
        settle: Brings this rank in step with those that are left.
    """

    groups: RankGroups
    membership: Membership
    settle: Callable[[CommunicationError], object]
    has_begun: bool = False

    def say(self, finish: Callable[[], None]) -> None:
        """Wait until all have made their last step: one of them may need this state.

        Args:
            finish: What the lead does last; the next one does it, if it is lost.
        """
        deadline_s = time.monotonic() + _GOODBYE_S
        self.has_begun = True
        while time.monotonic() < deadline_s:
            try:
                if self._part(deadline_s, finish):
                    return
                self.membership.check()
            except CommunicationError as error:
                try:
                    self.settle(error)
                except CommunicationError as failure:
                    logger.debug("left the others: %s", failure)
                    return

    @property
    def is_over(self) -> bool:
        """Whether all have made their last step, and the lead what it does last."""
        if not self.has_begun:
            return False
        try:
            store = self.groups.store
            return store is not None and bool(store.check([self._finished]))
        except (RuntimeError, ConnectionError):
            return True  # the store is gone, and with it the launcher

    @property
    def _finished(self) -> str:
        return f"end/{self.groups.generation}/finished"

    def _part(self, deadline_s: float, finish: Callable[[], None]) -> bool:
        """Whether all are done, and the lead with what it does last."""
        store = self.groups.store
        assert store is not None
        prefix = f"end/{self.groups.generation}"
        try:
            store.set(f"{prefix}/{self.groups.rank}", "1")
            keys = [f"{prefix}/{rank}" for rank in self.groups.members]
            if not self._wait_for(keys, deadline_s):
                return False
            self.membership.part()
            if not self.groups.is_lead:
                return self._wait_for([self._finished], deadline_s)
            finish()
            store.set(self._finished, "1")
        except (RuntimeError, ConnectionError):
            pass  # the store is gone, and with it the launcher
        return True

    def _wait_for(self, keys: list[str], deadline_s: float) -> bool:
        """Wait for keys of the store; False as soon as a member is lost."""
        store = self.groups.store
        assert store is not None
        while time.monotonic() < deadline_s:
            if store.check(keys):
                return True
            if self.membership.interruption() is not None:
                break
            time.sleep(_POLL_S)
        return False
