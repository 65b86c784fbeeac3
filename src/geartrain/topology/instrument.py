"""What measures for a survey: the agents of a network, or in tests a simulated one."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import islice
from typing import Protocol

from geartrain.topology.limits import OnProgress, ProbeLimits, ProbeProgress, Stage
from geartrain.topology.readings import PairReadings
from geartrain.topology.rounds import Flow, FlowReading
from geartrain.topology.tournament import disjoint_rounds

_MACHINE_BYTES_PER_S = 125e6
"""What a machine's processor surely carries of several hosts' flows: 1 Gbit/s. Where
hosts are containers, it is that which saturates first, and flows read too slow."""
_LEAST_FLOWS = 2
_FEW_HOSTS = 16
_MOST_FLOWS = 64


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
        machines: Sequence[str] = (),
    ) -> None:
        """Begin.

        Args:
            instrument: What measures.
            num_hosts: Of the network.
            limits: What it may cost.
            on_progress: Told after every step.
            machines: Of each host, which machine it is on; empty if none shares one.
        """
        self.machines = machines
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

    def test_bytes(self) -> int:
        """The longest burst of a flow that tests whether two racks are one."""
        return self.limits.test_bytes(self.instrument.left_bytes)

    def run(self, flows: Sequence[Flow]) -> list[FlowReading]:
        """Run flows, and remember if the budget did not allow it."""
        readings = self.instrument.run(flows)
        self.is_cut_short |= bool(flows) and not readings
        return readings

    def run_groups(
        self, groups: Sequence[Sequence[Flow]], *, quietly: bool = False
    ) -> list[list[FlowReading]]:
        """Run groups of flows, several at once where they hardly disturb each other.

        Args:
            groups: The flows of each run together. Groups without a common host run at the
                same time, but no machine carries more than it surely can.
            quietly: Only one group at a time on each machine.

        Returns:
            What was read of each group; empty where the budget did not allow it.
        """
        found: list[list[FlowReading]] = [[] for _ in groups]
        hosts = [
            tuple({h for f in group for h in (f.source, f.target)}) for group in groups
        ]
        sizes = [len(group) for group in groups]
        limit = 1 if quietly else self._flows_a_machine()
        # Who shares a processor is not always known; with few hosts it costs little not
        # to rely on it.
        alone = quietly and self.num_hosts <= _FEW_HOSTS
        machines = ("",) * self.num_hosts if alone else self.machines
        for positions in disjoint_rounds(hosts, machines, limit, sizes):
            flows = [flow for position in positions for flow in groups[position]]
            readings = iter(self.run(flows))
            for position in positions:
                found[position] = list(islice(readings, sizes[position]))
        return found

    def _flows_a_machine(self) -> int:
        fastest = max((r.bytes_per_s for r in self.readings.rates.values()), default=0.0)
        if not fastest:
            return _LEAST_FLOWS
        return min(max(int(_MACHINE_BYTES_PER_S / fastest), _LEAST_FLOWS), _MOST_FLOWS)

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
