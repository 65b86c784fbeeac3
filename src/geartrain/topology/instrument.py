"""What measures for a survey: the agents of a network, or in tests a simulated one."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Protocol

from geartrain.topology.limits import OnProgress, ProbeLimits, ProbeProgress, Stage
from geartrain.topology.readings import PairReadings
from geartrain.topology.rounds import Flow, FlowReading


class Instrument(Protocol):
    """Fills links and says what arrived."""

    @property
    def left_bytes(self) -> int:
        """What may still be sent."""

    @property
    def sent_bytes(self) -> int:
        """What was sent so far."""

    def run(self, flows: Sequence[Flow]) -> list[FlowReading]:
        """Run flows at the same time; empty if the budget does not suffice."""


class Survey:
    """A probe under way: its instrument, its limits, and what is known so far."""

    def __init__(
        self,
        instrument: Instrument,
        num_hosts: int,
        limits: ProbeLimits,
        on_progress: OnProgress | None = None,
    ) -> None:
        self.instrument = instrument
        self.num_hosts = num_hosts
        self.limits = limits
        self.readings = PairReadings(num_hosts)
        self.notes: list[str] = []
        self.is_cut_short = False
        self._on_progress = on_progress
        self._start_s = time.monotonic()

    @property
    def elapsed_s(self) -> float:
        """Since the start."""
        return time.monotonic() - self._start_s

    @property
    def worst_latency_s(self) -> float:
        """One way, over all links measured so far."""
        return max(self.readings.latencies_s.values(), default=0.0)

    def pair_bytes(self, num_flows: int) -> int:
        """The longest burst of each of so many flows that are still to come."""
        return self.limits.pair_bytes(
            self.num_hosts, self.instrument.sent_bytes, max(num_flows, 1)
        )

    def run(self, flows: Sequence[Flow]) -> list[FlowReading]:
        """Run flows, and remember if the budget did not allow it."""
        readings = self.instrument.run(flows)
        self.is_cut_short |= bool(flows) and not readings
        return readings

    def tell(self, stage: Stage, done: int, total: int) -> None:
        """Report progress."""
        if self._on_progress is not None:
            self._on_progress(
                ProbeProgress(
                    stage=stage,
                    done=done,
                    total=total,
                    elapsed_s=self.elapsed_s,
                    sent_bytes=self.instrument.sent_bytes,
                )
            )
