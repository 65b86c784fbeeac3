"""The step that is being made on this rank: whose batch, which parts of it, its figures."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch._C._distributed_c10d import PrefixStore

from geartrain.data.batch_split import batch_size_of
from geartrain.errors import ConfigError
from geartrain.parallel.link_watch import take_figures
from geartrain.parallel.seeding import seed_step
from geartrain.parallel.step_work import MicroBatch, StepWork, check_share, sample_context
from geartrain.parallel.tail_tickets import TailTickets
from geartrain.parallel.trailer import RankFigures

if TYPE_CHECKING:
    from geartrain.data.loader import ShareLoader
    from geartrain.data.sampler import CurrentBatch
    from geartrain.parallel.model_calls import ModelCalls
    from geartrain.parallel.plan_director import PlanDirector
    from geartrain.parallel.ranks import RankPlace
    from geartrain.parallel.step_engine import StepEngine


@dataclass(slots=True)
class OpenStep:
    """One rank's step, from its batch to the figures that are exchanged at its end.

    The same object is used for one step after the other.

    Args:
        place: This rank among the others.
        calls: The user's count function.
        engine: Told of the step's samples.
        director: The plan in force.
        seed: Of the session.
    """

    place: RankPlace
    calls: ModelCalls
    engine: StepEngine
    director: PlanDirector
    seed: int
    active_loader: ShareLoader | None = None
    """The one whose batch was asked for last, or is the open step's."""
    num_opened: int = 0
    """Steps opened in this session since ranks were lost last, all ranks alike."""
    _loaders: list[ShareLoader] = field(default_factory=list)  # that were trained on
    _sizes: list[int] = field(default_factory=list)  # of its micro-batches so far
    _read_s: float = 0.0

    def follow(self, loader: ShareLoader) -> None:
        """The loader's next batch was asked for."""
        if loader not in self._loaders:
            self._loaders.append(loader)
        self.active_loader = loader

    def open(self, batch: Any, step_index: int) -> Iterator[MicroBatch]:  # Any: the user's
        """Begin a step.

        Args:
            batch: This rank's share of the global batch, perhaps transformed by the user.
            step_index: Steps applied before.

        Returns:
            This rank's micro-batches.

        Raises:
            CommunicationError: If a peer was lost.
            ConfigError: If the batch is not the share that a loader handed out.
        """
        self._sizes, self._read_s = [], 0.0
        self.num_opened += 1
        seed_step(self.seed, step_index, self.place.rank)
        loader = self._loader_of(batch)
        if loader is None:
            return self._open_without_loader(batch)
        tickets = self._tickets(loader.current)
        check_share(
            batch,
            loader.current,
            has_tail=tickets is not None,
            is_own=batch is loader.last_batch,
        )
        known_counts = self._known_counts(batch, has_tail=tickets is not None)
        self.engine.begin(loader.current.global_count, known_counts)
        replica = self.director.replica
        work = StepWork(
            batch=batch,
            replica=replica,
            loader=loader,
            uniform_count=self.director.uniform_count,
            tickets=tickets if replica is not None else None,
            on_read=self._exclude_reading,
        )
        return work.micro_batches()

    def context(self, micro: MicroBatch, step_index: int) -> AbstractContextManager[None]:
        """What modules may ask for while a micro-batch is computed."""
        current = self.active_loader.current if self.active_loader is not None else None
        return sample_context(micro, current, self.seed, step_index)

    def count(self, micro: MicroBatch) -> None:
        """A micro-batch has been computed."""
        self._sizes.append(micro.num_samples)

    def num_computed(self) -> int:
        """Samples of the open step that have been computed here."""
        return sum(self._sizes)

    def figures(self, step_index: int) -> RankFigures:
        """What this rank tells the others of the step; to be asked once, at its end.

        Args:
            step_index: Steps applied before.
        """
        sizes = [size for size in self._sizes if size]
        probe_s, expected_s = self.director.expectation(sizes, step_index)
        exchange = take_figures(self.engine.gradient_group)
        return RankFigures(
            data_s=self._take_input_s(),
            peak_memory_bytes=float(self._peak_bytes()),
            num_samples=float(sum(sizes)),
            expected_s=expected_s,
            probe_s=probe_s,
            plan_code=self.director.plan_code,
            exchange_s=exchange.exchange_s,
            exchange_predicted_s=exchange.predicted_s,
            exchange_rack_s=exchange.rack_s,
            exchange_slow_hop_s=exchange.slow_hop_s,
        )

    def _loader_of(self, batch: Any) -> ShareLoader | None:
        """Whose batch it is, where a script reads several loaders in turn."""
        for loader in self._loaders:
            if loader.last_batch is batch and loader is not self.active_loader:
                self.active_loader = loader
                self.director.switch_to(loader)
        return self.active_loader

    def _open_without_loader(self, batch: Any) -> Iterator[MicroBatch]:
        if self.place.world_size > 1:
            msg = (
                "step() got a batch but no session loader was iterated; with more than "
                "one device take batches from session.setup_dataloader(...)"
            )
            raise ConfigError(msg)
        count = batch_size_of(batch)
        self.engine.begin(count)
        return iter([MicroBatch(batch=batch, start=0, stop=count, ends_share=True)])

    def _known_counts(self, batch: Any, *, has_tail: bool) -> dict[str, float] | None:
        """Fleet-wide counts by term; only several terms are worth the extra sum.

        None also where a tail is shared: who counts its samples is not known yet.
        """
        own = self.calls.counts(batch)
        is_exact = self.engine.averager is None
        if own is None or len(own) == 1 or has_tail or not is_exact:
            return None
        names = sorted(own)
        totals = torch.tensor([own[name] for name in names], dtype=torch.float64)
        self.place.groups.collective().all_reduce(totals).wait()
        return dict(zip(names, totals.tolist(), strict=True))

    def _tickets(self, current: CurrentBatch) -> TailTickets | None:
        tail = current.tail_stop - current.tail_start
        groups, replica = self.place.groups, self.director.replica
        if not tail or groups.store is None:
            return None
        tickets = TailTickets(
            store=PrefixStore(f"tickets/{groups.generation}", groups.store),
            step=self.num_opened,
            num_samples=tail,
            pace=self.director.keeper.tail_pace(self.place.rank),
            largest_take=max(replica.micro_batch_size, 1) if replica is not None else 1,
        )
        if groups.is_lead:
            tickets.forget_old()
        return tickets

    def _exclude_reading(self, seconds: float) -> None:
        self._read_s += seconds
        self.engine.exclude_time(seconds)

    def _take_input_s(self) -> float:
        data_s = self._read_s
        if self.active_loader is not None:
            data_s += max(self.active_loader.last_wait_s - self.director.planning_s, 0.0)
        self.director.planning_s = 0.0  # the loader waited meanwhile: not input time
        return data_s

    def _peak_bytes(self) -> int:
        device = self.place.device
        return device.adapter.memory_stats(device.local_id).peak_bytes
