"""Training whose links are watched, as a session does it: one rank's part.

A small model, a real optimizer, geartrain's exchange and its watch; a worker has no more
than a session has: what its own exchanges took, and what the others say theirs took.
"""

from __future__ import annotations

import time
from dataclasses import replace

import torch

from geartrain.bench.comm.exactness import checksum
from geartrain.bench.comm.messages import OURS, Order, Report, Timing
from geartrain.bench.comm.worker import LabWorker, describe_network
from geartrain.collectives.job_network import JobNetwork, probe_again
from geartrain.parallel.link_watch import StepWatch, take_figures
from geartrain.parallel.trailer import RankFigures

_SAMPLES = 32
_SEED = 5


class WatchedTraining:
    """Carries out the orders of the case ``link_drop``."""

    def __init__(self, worker: LabWorker) -> None:
        self._worker = worker
        self._num_opened = 0

    def begin(self, order: Order) -> Report:
        """Probe and plan from scratch; the model starts anew, too."""
        worker = self._worker
        worker.network = None
        network = worker.find_network()
        self._open(network)
        self._watch = StepWatch(network.topology)
        self._facts = worker.rendezvous_of(f"facts{self._num_opened}")
        torch.manual_seed(_SEED)
        width = int((order.num_bytes / 4) ** 0.5)
        self._model = torch.nn.Linear(width, width, bias=False)
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=0.1)
        worker.baselines.barrier()
        return describe_network(network) if worker.member.rank == 0 else Report()

    def steps(self, order: Order) -> Report:
        """Train; each step as long as the slowest rank takes, re-planning included."""
        steps_s, notes = [], []
        self._worker.baselines.barrier()
        for _ in range(order.repeats):
            started_at_s = time.perf_counter()
            self._step()
            if note := self._look_at_links():
                notes.append(note)
            steps_s.append(time.perf_counter() - started_at_s)
        weight = self._model.weight.detach().flatten()
        return Report(
            steps_s=tuple(steps_s),
            timings=(Timing(scheme=OURS, seconds=sum(steps_s), checksum=checksum(weight)),),
            notes=tuple(notes),
        )

    def _step(self) -> None:
        world_size = self._worker.member.world_size
        batch = torch.randn(_SAMPLES, self._model.in_features)
        self._optimizer.zero_grad()
        self._model(batch).square().mean().backward()
        gradient = self._model.weight.grad
        assert gradient is not None
        self._collective.all_reduce(gradient, 1 / world_size, key="weight").wait()
        self._optimizer.step()

    def _look_at_links(self) -> str:
        """All ranks see the same figures, so that they agree without asking."""
        own = take_figures(self._collective)
        figures = RankFigures(
            exchange_s=own.exchange_s,
            exchange_predicted_s=own.predicted_s,
            exchange_rack_s=own.rack_s,
            exchange_slow_hop_s=own.slow_hop_s,
        )
        suspects, reason = self._watch.observe(
            self._facts.gather("figures", figures, RankFigures)
        )
        if not suspects:
            return ""
        network = self._worker.find_network()
        found = probe_again(self._facts, network, suspects)
        if not self._watch.measured(found.topology):
            return f"{reason}: measured again, nothing new"
        self._worker.network = replace(network, topology=found.topology)
        self._open(found)
        return f"{reason}: planned again"

    def _open(self, network: JobNetwork) -> None:
        self._worker.close()
        self._num_opened += 1
        name = f"watched{self._num_opened}"
        self._collective = self._worker.open_exchange(name, None, network)
