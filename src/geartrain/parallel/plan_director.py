"""Which plan is in force on this rank, and who takes part in it."""

from __future__ import annotations

import time
import warnings
import zlib
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from geartrain.collectives.exchange.bucket_size import choose_bucket_bytes
from geartrain.collectives.exchange.scheduled_collective import ScheduledCollective
from geartrain.data.sampler import ShareView
from geartrain.errors import ConfigError
from geartrain.parallel.batchnorm import convert_batchnorm, has_batchnorm, set_group
from geartrain.parallel.device_rates import DeviceRates, KnownRates
from geartrain.parallel.low_communication import AVERAGES
from geartrain.parallel.model_timing import PlanningRequest
from geartrain.parallel.planning import (
    adopt_keeper,
    check_agreement,
    make_keeper,
    measure_alone,
)
from geartrain.parallel.process_group import INSIDE_MODEL
from geartrain.parallel.saved_state import TrainState, send_state
from geartrain.planner.curve_fit import predict_s
from geartrain.planner.exchange import EXACT
from geartrain.planner.exchange_cost import largest_bucket_bytes
from geartrain.planner.model_profile import (
    DEFAULT_BACKWARD_FRACTION,
    ComputeCurve,
    ModelProfile,
    only_devices,
)
from geartrain.planner.pinned_plan import without_tail
from geartrain.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from geartrain.data.loader import ShareLoader
    from geartrain.parallel.model_calls import ModelCalls
    from geartrain.parallel.plan_keeper import PlanKeeper
    from geartrain.parallel.ranks import RankPlace
    from geartrain.parallel.run_recorder import RunRecorder
    from geartrain.parallel.step_engine import StepEngine
    from geartrain.parallel.trailer import RankFigures
    from geartrain.parallel.trainer_settings import TrainerSettings
    from geartrain.parallel.worker_spec import WorkerSpec
    from geartrain.planner import Plan, Replica


@dataclass(slots=True)
class PlanDirector:
    """Keeps one plan a global batch size, and the groups of the one in force.

    Args:
        place: This rank among the others.
        calls: The user's model and functions, for measuring.
        engine: Told which group exchanges gradients.
        settings: How to train.
        spec: What the launcher said; None without one.
        recorder: Told of plans.
        state: The training state, for devices that come back.
    """

    place: RankPlace
    calls: ModelCalls
    engine: StepEngine
    settings: TrainerSettings
    spec: WorkerSpec | None
    recorder: RunRecorder
    state: Callable[[], TrainState]
    planning_s: float = 0.0
    """How long planning took since the last step; the loader waited meanwhile."""
    planned_at_s: float = 0.0
    _keepers: dict[int, PlanKeeper] = field(default_factory=dict)
    _keeper: PlanKeeper | None = None
    _next_plan: Plan | None = None  # given by the user, from the next batch on
    _members: tuple[int, ...] = field(init=False)
    rates: DeviceRates = field(default_factory=DeviceRates)
    adopting: ShareLoader | None = None
    """Whose plans this rank takes over from the others, which it joins."""

    def __post_init__(self) -> None:
        groups = self.place.groups
        self._members = () if groups.joins else groups.members

    @property
    def plan(self) -> Plan | None:
        """The plan in force; None before the first batch."""
        return self._keeper.plan if self._keeper is not None else None

    @property
    def keeper(self) -> PlanKeeper:
        """The keeper of the plan in force, which exists once a batch was handed out."""
        assert self._keeper is not None
        return self._keeper

    @property
    def replica(self) -> Replica | None:
        """This rank's replica; None where it is left out, or before the first batch."""
        if self._keeper is None:
            return None
        return self._keeper.plan.replica_of(self.place.groups.device_ids[self.place.rank])

    @property
    def plan_code(self) -> float:
        """A code of the plan that fits a float: all ranks must send the same."""
        plan = self.plan
        return float(zlib.crc32(plan.fingerprint.encode())) if plan is not None else 0.0

    @property
    def uniform_count(self) -> int | None:
        """Micro-batches that every rank runs; None where numbers may differ."""
        plan = self.plan
        if plan is None or not plan.uniform_micro_batches or self.place.world_size == 1:
            return None
        return max(replica.num_micro_batches for replica in plan.replicas)

    def assign(self, loader: ShareLoader) -> ShareView:
        """The shares in force for a loader's next batch; plans at the first one."""
        size = loader.config.global_batch_size
        if size not in self._keepers:
            started_at_s = time.perf_counter()
            self._keepers[size] = self._plan_for(loader)
            self.planning_s += time.perf_counter() - started_at_s
            self.planned_at_s = time.time()
        keeper = self._keepers[size]
        plan = self._next_plan
        if plan is not None and plan.global_batch_size == size:
            keeper.pin(plan)
            self._next_plan = None
        is_new = self._keeper is None
        self._use(keeper)
        if is_new:
            self._tell_exchange()
        return keeper.share_view(self.place.rank)

    def evaluation_shares(self) -> ShareView:
        """By the plan's rates where there is a plan, else equal."""
        left = self.place.groups.members
        weights = tuple(int(r in left) for r in range(self.place.world_size))
        if self._keeper is not None and any(self._keeper.shares):
            weights = self._keeper.shares
        return ShareView(shares=weights, rank=self.place.rank)

    def switch_to(self, loader: ShareLoader) -> None:
        """Use the plan of another loader's global batches."""
        self._use(self._keepers[loader.config.global_batch_size])

    def observe(self, step_index: int, figures: Sequence[RankFigures]) -> None:
        """Take in a step of the plan in force, which may change it for the next one."""
        if self._keeper is not None:
            self._keeper.observe(step_index, figures)
            self._use(self._keeper)

    @property
    def holds_state(self) -> bool:
        """Whether this rank's model is up to date: it took part in the last step."""
        return self.place.rank in self._members

    @property
    def planned_sizes(self) -> tuple[int, ...]:
        """Global batch sizes that there is a plan for."""
        return tuple(sorted(self._keepers))

    def keep_only(self, sizes: Collection[int]) -> None:
        """Drop the plans of other batch sizes: not all ranks came to have them."""
        self._keepers = {s: keeper for s, keeper in self._keepers.items() if s in sizes}
        if self._keeper not in self._keepers.values():
            self._keeper = None

    def known_rates(self) -> KnownRates:
        """By what to plan for those that take part, as this rank knows it."""
        order = self.place.groups.device_ids
        return self.rates.describe(self._keepers, order, self._current_size)

    def knows(self, device_id: str) -> bool:
        """Whether a device's speed is known."""
        return self.rates.knows(device_id, self._keepers.values())

    def adopt(self, rates: KnownRates) -> None:
        """Take on what the others plan by, also before this rank is one of them."""
        names = self.place.groups.device_ids
        for index, size in enumerate(rates.sizes):
            if size not in self._keepers:
                assert self.adopting is not None, "who joins says for which loader"
                profile = only_devices(rates.profiles[index], names)
                self._keepers[size] = adopt_keeper(
                    self._request(self.adopting, profile),
                    rates.workloads[index],
                    corrects=rates.are_corrected[index],
                )

    def regroup(self, rates: KnownRates, holders: tuple[int, ...]) -> None:
        """Plan anew for those that are left, and use that plan.

        Args:
            rates: The lead's.
            holders: Ranks that hold the state; who takes part without is given it.
        """
        groups = self.place.groups
        names = [groups.device_ids[rank] for rank in groups.members]
        self.adopt(rates)
        for index, size in enumerate(rates.sizes):
            known, is_declared = rates.profiles[index], rates.are_declared[index]
            profile = self.rates.of_members(size, known, names, groups.device_ids)
            keeper = self._keepers[size]
            keeper.device_ids = groups.device_ids
            keeper.regroup(profile, is_declared=is_declared)
        self._members, self._next_plan = holders, None
        if self.engine.averager is not None:
            # Each has a model of its own, and perhaps not all had the last average.
            self.engine.averager.collective = None
            send_state(groups, groups.members, self.state(), holders[0])
        if rates.current_size is not None:
            self._use(self._keepers[rates.current_size])
        else:  # lost before the first plan was made
            self._keeper = None
            self._use_members(holders)
        self._move_residuals()

    def relink(self, step_index: int) -> None:
        """Links changed: plan all batch sizes anew, and open the exchanges again."""
        groups = self.place.groups
        assert groups.hub is not None
        network = groups.hub.describe()
        for keeper in self._keepers.values():
            keeper.relink(network)
        self.engine.world = groups.collective()
        takes_part = self.place.rank in self._members
        group = groups.collective(self._members)
        self.engine.gradient_group = group if takes_part else None
        self._join_averages()
        self._move_residuals()
        if self._keeper is not None:
            self._use(self._keeper)
        self._tell_exchange(step_index)

    @property
    def _current_size(self) -> int | None:
        if self._keeper is None:
            return None
        return self._keeper.settings.workload.global_batch_size

    def expectation(self, sizes: Sequence[int], step_index: int) -> tuple[float, float]:
        """A left-out device's probe, if due, and what this rank's work should take.

        Args:
            sizes: Micro-batches that this rank ran, ghosts excluded.
            step_index: The step under way.
        """
        if self._keeper is None or self.place.world_size == 1:
            return 0.0, 0.0
        if self.place.rank not in self._members:
            return self._keeper.probe_if_due(self.place.rank, step_index)
        return 0.0, self._keeper.expected_s(self.place.rank, sizes)

    def apply_plan(self, plan: Plan) -> None:
        """Carry out another plan from the next batch on.

        Raises:
            ConfigError: If it does not fit, or ranks got different plans.
        """
        keeper = self._keepers.get(plan.global_batch_size)
        if keeper is None:
            known = ", ".join(str(size) for size in self._keepers) or "none yet"
            msg = (
                f"no loader has global_batch_size={plan.global_batch_size} (planned: "
                f"{known}); iterate the loader once, then apply a plan"
            )
            raise ConfigError(msg)
        plan = without_tail(plan)
        keeper.check_pinned(plan)
        check_agreement(self.place.groups, plan)
        self._next_plan = plan

    def measure(self, loader: ShareLoader) -> tuple[ComputeCurve, ...]:
        """How fast this rank computes; nobody is asked. Empty: it can't be measured."""
        return measure_alone(self._request(loader, None))

    def _request(
        self, loader: ShareLoader, profile: ModelProfile | None
    ) -> PlanningRequest:
        return PlanningRequest(
            place=self.place,
            loader=loader,
            calls=self.calls,
            engine=self.engine,
            settings=self.settings,
            spec=self.spec,
            recorder=self.recorder,
            profile=profile,
        )

    def _plan_for(self, loader: ShareLoader) -> PlanKeeper:
        profile = next((k.profile for k in self._keepers.values()), None)
        keeper = make_keeper(self._request(loader, profile))
        self._size_buckets(keeper)
        if self.settings.sync_batchnorm and self.place.world_size > 1:
            # After measuring: until now ranks ran different numbers of forward passes.
            group = self.place.groups.process_group(purpose=INSIDE_MODEL)
            convert_batchnorm(self.calls.model, group)
            self._share_statistics()
        elif self.place.world_size > 1 and has_batchnorm(self.calls.model):
            warnings.warn(
                "the model has BatchNorm and shares are uneven, so its statistics differ "
                "from one device's; pass setup(sync_batchnorm=True)",
                stacklevel=2,
            )
        return keeper

    def _tell_exchange(self, step_index: int = 0) -> None:
        """Record how gradients are exchanged, and what that was predicted to take."""
        group = self.engine.gradient_group
        if not isinstance(group, ScheduledCollective):
            return
        bucket_bytes = min(self.engine.settings.bucket_bytes, self.engine.gradient_bytes)
        schedule = group.book.schedule_for(bucket_bytes)
        codec = "exact" if schedule.codec == EXACT else schedule.codec
        self.recorder.add_event(
            step_index,
            "exchange",
            f"gradients go {schedule.algorithm}, {codec}, in buckets of "
            f"{format_bytes(bucket_bytes)} cut in {schedule.num_chunks}, "
            f"{format_seconds(group.predict_s(bucket_bytes))} a bucket",
            values={
                "bucket_bytes": float(bucket_bytes),
                "bucket_predicted_s": group.predict_s(bucket_bytes),
                "predicted_s": group.predict_s(self.engine.gradient_bytes),
                # Bounds are rates: that of another size is in proportion.
                "bound_s": schedule.bound_s
                * self.engine.gradient_bytes
                / max(schedule.num_bytes, 1),
            },
        )

    def _size_buckets(self, keeper: PlanKeeper) -> None:
        """Let a bucket's exchange hide behind an eighth of a backward pass.

        Sized once, by the first plan: all ranks see the same profile and predictions.
        """
        group = self.engine.gradient_group
        if self._keepers or not isinstance(group, ScheduledCollective):
            return
        micro_batches_s = [
            predict_s(keeper.curve_of(rank), replica.micro_batch_size)
            for rank, replica in zip(keeper.member_ranks, keeper.plan.replicas, strict=True)
            if replica.share
        ]
        backward_s = min(micro_batches_s) * DEFAULT_BACKWARD_FRACTION
        gradient_bytes = self.engine.gradient_bytes
        size = choose_bucket_bytes(backward_s, group.predict_s, gradient_bytes)
        if keeper.profile.network is not None:
            # Of buckets on their way together only the last one's start is waited for.
            size = min(size, largest_bucket_bytes(keeper.profile.network, gradient_bytes))
        self.engine.resize_buckets(size)
        self._move_residuals()

    def _use(self, keeper: PlanKeeper) -> None:
        """Point groups at the plan's members, and bring back whoever returns."""
        self._keeper = keeper
        members = keeper.member_ranks
        self._use_members(members)
        group = self.engine.gradient_group
        if isinstance(group, ScheduledCollective):
            keeper.note_exchange(group.book)

    def _use_members(self, members: tuple[int, ...]) -> None:
        if members == self._members and self.engine.gradient_group is not None:
            return
        groups = self.place.groups
        averager = self.engine.averager
        if averager is not None and members != self._members:
            averager.settle()  # whoever comes takes on the model of all
        returning = tuple(rank for rank in members if rank not in self._members)
        if returning:
            source = self._members[0]
            send_state(groups, (source, *returning), self.state(), source)
        gradient_group = groups.collective(members)
        takes_part = self.place.rank in members
        self.engine.gradient_group = gradient_group if takes_part else None
        if members != self._members:
            self._move_residuals()
        self._members = members
        self._join_averages()
        if self.settings.sync_batchnorm and self.place.world_size > 1:
            self._share_statistics()

    def _join_averages(self) -> None:
        """Models are averaged over the plan's members, in an exchange of its own."""
        averager = self.engine.averager
        if averager is not None:
            group = self.place.groups.collective(self._members, AVERAGES)
            averager.collective = group if self.place.rank in self._members else None

    def _move_residuals(self) -> None:
        """What compression owes goes to who codes it now; all ranks call it together."""
        if self.engine.residuals is not None:
            self.engine.residuals.follow(self.engine.gradient_group)

    def _share_statistics(self) -> None:
        """BatchNorm's group is that of the plan's members."""
        members = self._members
        group = self.place.groups.process_group(members, INSIDE_MODEL)
        is_alone = len(members) == 1 or self.place.rank not in members
        set_group(self.calls.model, group, is_alone=is_alone)
