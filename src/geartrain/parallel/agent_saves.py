"""Saves to the local disk that the node's agent writes, out of what it holds in memory.

A save that is due asks all ranks for a snapshot, which comes a few steps later; the agent
of the lead's node then collects the parts and writes them. The trainers copy once for both.
Where the agent can't, the trainer writes by itself, as without one.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from geartrain.checkpoint.agent.messages import SnapshotFacts, WriteVersion
from geartrain.units import format_seconds

if TYPE_CHECKING:
    from geartrain.checkpoint.agent.link import AgentLink
    from geartrain.parallel.peer_memory import PeerMemory
    from geartrain.parallel.save_spec import SaveSpec
    from geartrain.telemetry import EventKind

_TAKEN_S = 30.0
"""For all ranks to be ready; a step may take seconds."""
_POLL_S = 0.02

Outcome = Literal["none", "saved", "failed"]


@dataclass(slots=True)
class AgentSaves:
    """What one rank leaves to its agent, while it leads.

    Args:
        memory: Takes the snapshots.
        spec: Where saves go.
        tell: Told of saves, the kind of an event and its text.
    """

    memory: PeerMemory
    spec: SaveSpec
    tell: Callable[[EventKind, str], None]
    _asked_at_s: float | None = None
    _ordered_step: int | None = None

    @property
    def is_busy(self) -> bool:
        """Whether a save is on its way."""
        return self._asked_at_s is not None or self._ordered_step is not None

    @property
    def is_able(self) -> bool:
        """Whether the agent keeps this run's states by now."""
        return self.memory.has_kept

    def begin(self) -> None:
        """A save is due: ask for a snapshot."""
        self._asked_at_s = time.monotonic()
        self.memory.wants_soon = True

    def sealed(self, link: AgentLink, facts: SnapshotFacts) -> None:
        """A snapshot is on its way into memory: have it written, if a save waits for it.

        Raises:
            CommunicationError: If the agent is gone.
        """
        if self._asked_at_s is None:
            return
        self._asked_at_s, self._ordered_step = None, facts.step
        link.write_version(
            WriteVersion(
                step=facts.step,
                lineage=facts.lineage,
                directory=self.spec.directory,
                created_at_s=time.time(),
                keep_last=self.spec.retention.keep_last,
                config=self.spec.config,
                others=self.memory.connection.other_agents(),
            )
        )

    def poll(self) -> Outcome:
        """Look what has become of it."""
        if self._asked_at_s is not None:
            is_late = time.monotonic() > self._asked_at_s + _TAKEN_S
            if is_late or self.memory.connection.link is None:
                return self._fail("its agent took no snapshot")
        if self._ordered_step is not None:
            return self._poll_written(self._ordered_step)
        return "none"

    def _poll_written(self, step: int) -> Outcome:
        link = self.memory.connection.link
        if link is None:
            return self._fail("its agent was lost")
        written = link.state.written
        if written is None or written.step != step:
            return "none"
        if written.problem:
            return self._fail(written.problem)
        self._ordered_step = None
        took = format_seconds(written.save_s)
        self.tell(
            "saved", f"step {step} is in {self.spec.directory} ({took}, by the agent)"
        )
        return "saved"

    def wait(self, limit_s: float) -> None:
        """Wait for what is being written; the run ends."""
        end_s = time.monotonic() + limit_s
        while self._ordered_step is not None and time.monotonic() < end_s:
            with self.memory.connection.guarded():
                if (link := self.memory.connection.link) is not None:
                    link.poll()
            if self.poll() == "none":
                time.sleep(_POLL_S)

    def _fail(self, why: str) -> Outcome:
        self._asked_at_s = self._ordered_step = None
        self.memory.wants_soon = False
        self.tell("unsaved", f"{self.spec.directory}: {why}; the trainer writes it itself")
        return "failed"
