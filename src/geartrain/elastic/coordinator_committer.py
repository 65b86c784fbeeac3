"""Commits by the coordinator's word."""

from __future__ import annotations

from collections.abc import Callable

from geartrain.elastic.client import Client
from geartrain.elastic.lineage import first_lineage
from geartrain.elastic.outcome import Interrupted
from geartrain.errors import CommunicationError
from geartrain.parallel.commit import StepName


class CoordinatorCommitter:
    """Votes at the coordinator, and waits for its commits.

    Args:
        client: Of this process.
        epoch: The one in force.
        timeout_s: Outer limit of a wait, within which the coordinator may come back.
    """

    def __init__(self, client: Client, epoch: Callable[[], int], timeout_s: float) -> None:
        self._client = client
        self._epoch = epoch
        self._timeout_s = timeout_s
        self.ahead_by = 0
        """Steps that the coordinator has counted beyond the training's own count. It counts
        commits, also where a script has loaded an earlier state or a later one."""

    def exchanging(self) -> None:
        """Standing still is no fault of this rank now."""
        self._client.enter("waiting")

    def vote(self, name: StepName) -> None:
        """Tell that this rank could apply the step."""
        self._client.vote(self._epoch(), name.step + self.ahead_by, name.lineage)

    def wait(self, name: StepName) -> None:
        """Wait for the commit.

        Raises:
            CommunicationError: If the step is not to be applied here now.
        """
        step = name.step + self.ahead_by
        outcome = self._client.wait_commit(self._epoch(), step, self._timeout_s)
        if isinstance(outcome, Interrupted):
            raise CommunicationError(outcome.reason)


def known_lineage(name: StepName) -> str:
    """The lineage by which the coordinator knows a state, also before the first step."""
    return name.lineage or first_lineage("geartrain", name.step)
