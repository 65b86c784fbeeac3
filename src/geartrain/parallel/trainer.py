"""Carries a plan out on one rank: set-up, steps, re-plans, saving."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch._C._distributed_c10d import PrefixStore

from geartrain.collectives.job_network import probe_again
from geartrain.data.batch_split import batch_size_of
from geartrain.data.sampler import ShareView
from geartrain.errors import CommunicationError, ConfigError, TrainingStopped
from geartrain.parallel.link_watch import (
    StepWatch,
    describe_change,
    describe_links,
    take_figures,
)
from geartrain.parallel.loss_terms import LossTerm
from geartrain.parallel.model_calls import ModelCalls
from geartrain.parallel.plan_director import PlanDirector
from geartrain.parallel.regroup import Regrouper
from geartrain.parallel.regroup_training import (
    check_members,
    do_again,
    own_forward,
    retried,
)
from geartrain.parallel.residual_state import ResidualState
from geartrain.parallel.run_recorder import RunRecorder, StepFacts
from geartrain.parallel.saved_state import TrainState, load_state, save_state
from geartrain.parallel.seeding import seed_step
from geartrain.parallel.state_sync import broadcast_buffers
from geartrain.parallel.step_engine import StepEngine, StepOutcome
from geartrain.parallel.step_work import MicroBatch, StepWork, check_share, sample_context
from geartrain.parallel.survivors import Survivors
from geartrain.parallel.tail_tickets import TailTickets
from geartrain.parallel.trailer import RankFigures
from geartrain.parallel.trainer_settings import TrainerSettings, UserParts
from geartrain.parallel.trainer_setup import (
    install_stop_handler,
    make_engine,
    make_hub,
    make_residuals,
    make_survivors,
    prepare_model,
)
from geartrain.parallel.worker_spec import WorkerSpec

if TYPE_CHECKING:
    from geartrain.data.loader import ShareLoader
    from geartrain.data.sampler import CurrentBatch
    from geartrain.parallel.ranks import RankPlace

logger = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(slots=True)
class Trainer:
    """One rank's trainer.

    Args:
        place: This rank among the others.
        parts: The user's model and functions.
        settings: How to train.
        spec: What the launcher said; None without one.
    """

    place: RankPlace
    parts: UserParts
    settings: TrainerSettings
    spec: WorkerSpec | None
    model: torch.nn.Module = field(init=False)
    step_index: int = 0
    active_loader: ShareLoader | None = None
    """The one whose batch was asked for last, or is the open step's."""
    calls: ModelCalls = field(init=False)
    is_evaluating: bool = False
    positions: Callable[[], list[dict[str, int | bool]]] = list
    """Positions of all the session's loaders, for saving when asked to stop."""
    _engine: StepEngine = field(init=False)
    _residuals: ResidualState = field(init=False)
    _recorder: RunRecorder = field(init=False)
    director: PlanDirector = field(init=False)
    _loaders: list[ShareLoader] = field(default_factory=list)  # that were trained on
    _num_opened: int = 0  # steps opened in this session, all ranks alike
    _stop_requested: bool = False
    _work: Iterator[MicroBatch] | None = None
    _micro: MicroBatch | None = None
    _sizes: list[int] = field(default_factory=list)  # micro-batches of the open step
    _read_s: float = 0.0
    _watch: StepWatch | None = None
    _finished_at_s: float = 0.0
    regrouper: Regrouper | None = None
    """None where a lost rank ends the training."""
    is_step_open: bool = False
    """Until it is applied."""
    _last_loss: float = 0.0

    def __post_init__(self) -> None:
        if self.spec is not None:
            install_stop_handler(self._request_stop)
        place, parts, settings = self.place, self.parts, self.settings
        spec, is_main = self.spec, place.rank == 0
        run_dir = Path(spec.run_dir) if spec is not None and is_main else None
        self._recorder = RunRecorder(device_ids=place.groups.device_ids, run_dir=run_dir)
        place.groups.hub = make_hub(place, settings, self.spec)
        survivors = make_survivors(place.groups, self.spec)
        self.model = prepare_model(place, parts, settings)
        self.calls = self._make_calls()
        self._engine = make_engine(place, parts, settings, self.model)
        self._tell_algorithm()
        self._residuals = make_residuals(place.groups, self._engine)
        self._watch = self._make_watch()
        self.director = self._make_director()
        if survivors is not None:
            self.regrouper = self._make_regrouper(survivors, run_dir)

    # -- what the session asks ----------------------------------------------------

    def assign(self, loader: ShareLoader) -> ShareView:
        """The shares in force for a loader's next batch; plans at the first one."""
        if self.is_evaluating:
            return self.director.evaluation_shares()
        planned_at_s = self.director.planned_at_s
        view = retried(self, lambda: self._assign(loader))
        if self.director.planned_at_s != planned_at_s:
            self._finished_at_s = self.director.planned_at_s  # no step took that time
        if loader not in self._loaders:
            self._loaders.append(loader)
        self.active_loader = loader
        return view

    def step(self, batch: Any) -> float:  # Any: the user's batch
        """Make one optimizer step; see ``Session.step``."""
        self.calls.require_loss()  # also where this rank's share is empty
        first = self.step_index
        while True:
            try:
                return self._make_step(batch)
            except CommunicationError as error:
                batch = do_again(self, error, batch)
                if self.step_index > first:  # it had been applied, here or elsewhere
                    return self._last_loss

    def _make_step(self, batch: Any) -> float:  # Any: the user's batch
        try:
            for micro in self._open(batch):
                check_members(self)
                with self._context(micro):
                    terms = self.calls.loss_terms(micro.batch)
                    self._engine.accumulate(terms, last=micro.is_last, ghost=micro.is_ghost)
                self._sizes.append(micro.num_samples)
        except BaseException:
            self._engine.abandon()
            raise
        return self._close()

    def micro_batches(self, batch: Any) -> Iterator[Any]:  # Any: the user's batch
        """Open a step for an own forward; see ``Session.micro_batches``."""
        with own_forward(self):
            self._work = self._open(batch)
        try:
            for micro in self._work:
                self._micro = micro
                with self._context(micro):
                    yield micro.batch
                if self._micro is not None:
                    msg = (
                        "a micro-batch got no backward(); call it once for each micro-batch"
                    )
                    raise ConfigError(msg)
        except BaseException:  # GeneratorExit too: the loop was left before its end
            self._engine.abandon()
            raise
        finally:
            self._work = self._micro = None

    def backward(self, terms: dict[str, LossTerm]) -> None:
        """Run backward of the open micro-batch; see ``Session.backward``."""
        micro = self._micro
        if micro is None:
            msg = (
                "backward() needs an open micro-batch; iterate session.micro_batches(batch)"
            )
            raise ConfigError(msg)
        self._micro = None
        with own_forward(self):
            check_members(self)
            self._engine.accumulate(terms, last=micro.is_last, ghost=micro.is_ghost)
        self._sizes.append(micro.num_samples)

    def optimizer_step(self) -> float:
        """Finish the step of an own forward; see ``Session.optimizer_step``."""
        if self._work is not None:
            msg = (
                "optimizer_step() came before the last micro-batch; run the loop over "
                "session.micro_batches(batch) to its end first"
            )
            raise ConfigError(msg)
        with own_forward(self):
            return self._close()

    def together(self, operation: Callable[[], T]) -> T:
        """Do what needs all ranks; again with those left, where one is lost meanwhile.

        Raises:
            CommunicationError: If the others can't go on.
        """
        result = retried(self, operation)
        if self.regrouper is not None:
            self.regrouper.num_together += 1
        return result

    def save(self, path: Path, positions: list[dict[str, int | bool]]) -> None:
        """Save everything on rank 0; see ``Session.save``."""
        residuals = self._residuals.collect()
        if self.place.rank != 0:
            return
        save_state(path, self._state(), positions, residuals)
        self._recorder.add_event(self.step_index, "saved", f"saved to {path}")

    def load(self, path: Path) -> list[dict[str, int | bool]]:
        """Load everything; returns the loaders' positions."""
        loaded = load_state(path, self._state())
        self.step_index = loaded.step_index
        self._residuals.restore(loaded.residuals)
        return loaded.positions

    def average_models(self) -> None:
        """Give all ranks one model, where steps are not exact; all ranks must call it."""
        if self._engine.averager is not None:
            self._engine.averager.settle()

    def sync_buffers(self) -> None:
        """Before evaluating: running statistics may differ between ranks."""
        self.average_models()
        broadcast_buffers(self.place.groups, self.model)

    def evaluation_micro_batch_size(self) -> int:
        """Samples a forward pass without gradients may take."""
        replica = self.director.replica
        return replica.micro_batch_size if replica is not None else 0

    def close(self, *, gather_waits: bool) -> None:
        """Write the last step's records."""
        if self.regrouper is not None:
            if gather_waits:
                self.regrouper.say_goodbye(self.step_index)
            self.regrouper.close()
        waits_s = [self._engine.last_wait_s] * self.place.world_size
        if gather_waits:
            waits_s = self.place.groups.collect_last_waits(self._engine.last_wait_s)
        self._recorder.flush(waits_s)
        self._recorder.close()

    # -- a step ---------------------------------------------------------------------

    def _open(self, batch: Any) -> Iterator[MicroBatch]:
        self._sizes, self._read_s = [], 0.0
        self._num_opened += 1
        self.is_step_open = True
        if self.regrouper is not None:
            self.regrouper.begin_step(self.step_index)
        seed_step(self.settings.seed, self.step_index, self.place.rank)
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
        self._engine.begin(loader.current.global_count, known_counts)
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
        self._engine.begin(count)
        return iter([MicroBatch(batch=batch, start=0, stop=count, ends_share=True)])

    def _close(self) -> float:
        data_s = self._read_s
        if self.active_loader is not None:
            data_s += max(self.active_loader.last_wait_s - self.director.planning_s, 0.0)
        self.director.planning_s = 0.0  # the loader waited meanwhile: not input time
        sizes = [size for size in self._sizes if size]
        probe_s, expected_s = self.director.expectation(sizes, self.step_index)
        exchange = take_figures(self._engine.gradient_group)
        figures = RankFigures(
            data_s=data_s,
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
        outcome = self._engine.finish(figures, stop=self._stop_requested)
        self._after_step(outcome)
        return outcome.loss

    def _after_step(self, outcome: StepOutcome) -> None:
        now_s = time.time()
        step_s = now_s - self._finished_at_s if self._finished_at_s else 0.0
        self._finished_at_s = now_s
        facts = StepFacts(
            step=self.step_index,
            at_s=now_s,
            step_s=step_s,
            loss=outcome.loss,
            figures=tuple(outcome.trailer.ranks),
        )
        self._recorder.add_step(facts)
        self._step_scheduler(outcome.loss)
        self._count_step(outcome)
        if outcome.trailer.stop_requested:
            self._stop()
        if self.active_loader is not None:
            self.director.observe(self.step_index, facts.figures)
            self._watch_links(facts.figures)

    def _count_step(self, outcome: StepOutcome) -> None:
        self.step_index += 1
        self._last_loss = outcome.loss
        self.is_step_open = False
        if self.regrouper is not None:
            self.regrouper.applied(self.step_index)

    def _watch_links(self, figures: Sequence[RankFigures]) -> None:
        """Measure links again that are off, and plan anew if they changed."""
        hub = self.place.groups.hub
        if self._watch is None or hub is None:
            return
        suspects, reason = self._watch.observe(figures)
        if not suspects:
            return
        before = hub.network.topology
        network = probe_again(self.place.groups.rendezvous, hub.network, suspects)
        message = f"{reason}; measured {', '.join(suspects)} again: "
        if self._watch.measured(network.topology):
            self.place.groups.relink(network)
            self.director.relink(self.step_index)
        message += describe_change(before, network.topology)
        self._recorder.add_event(self.step_index, "relinked", message)

    def _step_scheduler(self, loss: float) -> None:
        scheduler = self.parts.lr_scheduler
        if scheduler is None or self._engine.gradient_group is None:
            return
        if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
            scheduler.step(loss)
        else:
            scheduler.step()

    def _stop(self) -> None:
        where = ""
        if self.spec is not None:  # all ranks stop after the same step
            path = Path(self.spec.run_dir) / "checkpoint"
            self.average_models()
            self.save(path, self.positions())
            where = f"; saved to {path}" if self.place.rank == 0 else ""
        self._recorder.add_event(
            self.step_index, "stopped", f"stopped when asked to{where}"
        )
        msg = f"stopped after {self.step_index} steps because it was asked to{where}"
        raise TrainingStopped(msg)

    def _known_counts(self, batch: Any, *, has_tail: bool) -> dict[str, float] | None:
        """Fleet-wide counts by term; only several terms are worth the extra sum.

        None also where a tail is shared: who counts its samples is not known yet.
        """
        own = self.calls.counts(batch)
        is_exact = self._engine.averager is None
        if own is None or len(own) == 1 or has_tail or not is_exact:
            return None
        names = sorted(own)
        totals = torch.tensor([own[name] for name in names], dtype=torch.float64)
        self.place.groups.collective().all_reduce(totals).wait()
        return dict(zip(names, totals.tolist(), strict=True))

    def _context(self, micro: MicroBatch) -> AbstractContextManager[None]:
        current = self.active_loader.current if self.active_loader is not None else None
        return sample_context(micro, current, self.settings.seed, self.step_index)

    def _exclude_reading(self, seconds: float) -> None:
        self._read_s += seconds
        self._engine.exclude_time(seconds)

    def _tickets(self, current: CurrentBatch) -> TailTickets | None:
        tail = current.tail_stop - current.tail_start
        store = self.place.groups.store
        if not tail or store is None:
            return None
        tickets = TailTickets(
            store=PrefixStore(f"tickets/{self.place.groups.generation}", store),
            step=self._num_opened,
            num_samples=tail,
            pace=self.director.keeper.tail_pace(self.place.rank),
            largest_take=max(self.evaluation_micro_batch_size(), 1),
        )
        if self.place.rank == 0:
            tickets.forget_old()
        return tickets

    def _assign(self, loader: ShareLoader) -> ShareView:
        if self.director.plan is not None:
            check_members(self)
        return self.director.assign(loader)

    def after_regrouping(self, outcome: StepOutcome | None) -> None:
        """Those that are left are in step again.

        Args:
            outcome: Of a step that others had applied, and whose state was taken over.

        Raises:
            TrainingStopped: If a stop was asked for in that step.
        """
        self._num_opened = 0
        self._watch = None  # links are watched among all ranks or not at all
        if outcome is None:
            return
        now_s = time.time()
        facts = StepFacts(
            step=self.step_index,
            at_s=now_s,
            step_s=now_s - self._finished_at_s,
            loss=outcome.loss,
            figures=tuple(outcome.trailer.ranks),
        )
        self._finished_at_s = now_s
        self._recorder.add_step(facts)
        self._count_step(outcome)
        if outcome.trailer.stop_requested:
            self._stop()

    # -- set-up -------------------------------------------------------------------------

    def _make_calls(self) -> ModelCalls:
        return ModelCalls(
            model=self.model,
            device_type=self.place.device.torch_device.type,
            loss_fn=self.parts.loss_fn,
            forward_fn=self.parts.forward_fn,
            count_fn=self.parts.count_fn,
            autocast_dtype=self.settings.autocast_dtype,
        )

    def _make_director(self) -> PlanDirector:
        return PlanDirector(
            place=self.place,
            calls=self.calls,
            engine=self._engine,
            settings=self.settings,
            spec=self.spec,
            recorder=self._recorder,
            state=self._state,
        )

    def _make_regrouper(self, survivors: Survivors, run_dir: Path | None) -> Regrouper:
        regrouper = Regrouper(
            survivors=survivors,
            groups=self.place.groups,
            director=self.director,
            engine=self._engine,
            recorder=self._recorder,
            state=self._state,
            run_dir=run_dir,
        )
        survivors.on_gathered = regrouper.report
        return regrouper

    def _request_stop(self) -> None:
        self._stop_requested = True

    def _make_watch(self) -> StepWatch | None:
        """Links are watched where there are any and plans may follow them."""
        hub = self.place.groups.hub
        is_fixed = self.settings.deterministic or self.settings.pinned_plan is not None
        is_fixed = is_fixed or self._engine.averager is not None  # seldom used links
        if hub is None or hub.network.is_one_host or is_fixed:
            return None
        self._recorder.add_event(0, "linked", describe_links(hub.network.topology))
        return StepWatch(hub.network.topology)

    def _tell_algorithm(self) -> None:
        algorithm = self.settings.algorithm
        if not isinstance(algorithm, str):
            self._recorder.add_event(0, "note", algorithm.description)
            if self.place.rank == 0:
                logger.warning("%s", algorithm.description)

    def _state(self) -> TrainState:
        return TrainState(
            model=self.model,
            optimizer=self.parts.optimizer,
            lr_scheduler=self.parts.lr_scheduler,
            scaler=self._engine.scaler,
            step_index=self.step_index,
            seed=self.settings.seed,
            averager=self._engine.averager,
        )

    def _peak_bytes(self) -> int:
        device = self.place.device
        return device.adapter.memory_stats(device.local_id).peak_bytes
