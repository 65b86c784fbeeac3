"""Keeps the plan in force on this rank, and corrects it as the run shows how it goes.

Every rank runs the same pure corrector on the same numbers (the trailer of each step),
so all reach the same plan without a message; the trailer's plan code proves it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from geartrain.data.sampler import ShareView
from geartrain.errors import ConfigError
from geartrain.parallel.tail_tickets import TailPace
from geartrain.planner import ComputeCurve, ModelProfile, Plan, Workload
from geartrain.planner.correction import (
    CorrectionSettings,
    CorrectionState,
    DeviceObservation,
    expected_compute_s,
    observe,
    start_correction,
)
from geartrain.planner.curve_fit import best_samples_per_s, predict_s
from geartrain.planner.pinned_plan import check_plan
from geartrain.planner.prediction import scale_profile
from geartrain.planner.solver import solve

if TYPE_CHECKING:
    from geartrain.parallel.run_recorder import RunRecorder
    from geartrain.parallel.trailer import RankFigures
    from geartrain.planner.exchange import ScheduleBook
    from geartrain.planner.model_profile import ExchangeNetwork

_CALIBRATING_STEP = 2
"""Without a measured profile rates are read off this step: the first one warms up."""

_PROBE_EVERY_STEPS = 20
"""How often a left-out device shows how fast it is now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeeperSettings:
    """How a plan is kept."""

    workload: Workload
    replan_threshold: float = 0.15
    corrects: bool = True
    is_declared: bool = False
    """The profile was declared, not measured: calibrate it from the first steps."""


@dataclass(slots=True)
class PlanKeeper:
    """The plan of one loader's global batches."""

    profile: ModelProfile
    plan: Plan
    device_ids: tuple[str, ...]
    settings: KeeperSettings
    recorder: RunRecorder
    probe: Callable[[int], float]
    _corrector: CorrectionState | None = field(init=False, default=None)
    _num_seen: int = 0

    def __post_init__(self) -> None:
        if self.settings.corrects and not self.settings.is_declared:
            self._start()

    @property
    def member_ranks(self) -> tuple[int, ...]:
        """Ranks that exchange gradients, rising."""
        members = {replica.device_id for replica in self.plan.replicas}
        return tuple(r for r, i in enumerate(self.device_ids) if i in members)

    @property
    def shares(self) -> tuple[int, ...]:
        """Samples of a full global batch, in rank order, without the tail."""
        shares = {replica.device_id: replica.share for replica in self.plan.replicas}
        return tuple(shares.get(device_id, 0) for device_id in self.device_ids)

    def share_view(self, rank: int) -> ShareView:
        """The shares in force, in rank order."""
        return ShareView(
            shares=self.shares,
            rank=rank,
            tail_samples=self.plan.tail_samples,
        )

    def tail_pace(self, rank: int) -> TailPace:
        """How fast a rank and the others that take part compute, as known by now."""
        factors = self._corrector.factors if self._corrector is not None else {}
        rates = [0.0] * len(self.device_ids)
        samples_s = [math.inf] * len(self.device_ids)
        for member in self.member_ranks:
            curve = self.curve_of(member)
            factor = factors.get(curve.device_id, 1.0)
            rates[member] = best_samples_per_s(curve) / factor
            samples_s[member] = predict_s(curve, 1) * factor
        return TailPace(
            samples_per_s=rates[rank],
            others_samples_per_s=math.fsum(r for i, r in enumerate(rates) if i != rank),
            sample_s=samples_s[rank],
            least_sample_s=min(samples_s),
        )

    def pin(self, plan: Plan) -> None:
        """Carry out a given plan from now on and stop correcting.

        Raises:
            ConfigError: If it does not fit.
        """
        self.check_pinned(plan)
        self._take(plan)
        self._corrector = None
        self.settings = replace(self.settings, corrects=False)

    def note_exchange(self, book: ScheduleBook) -> None:
        """Keep with the plan how its replicas exchange gradients."""
        if self.plan.exchange != book:
            self._take(replace(self.plan, exchange=book))

    def known_rates(self) -> tuple[ModelProfile, bool]:
        """The profile as corrected by now, and whether it still is only declared."""
        if self._corrector is None:
            is_declared = self.settings.corrects and self.settings.is_declared
            return self.profile, is_declared
        return scale_profile(self.profile, self._corrector.factors), False

    def regroup(self, profile: ModelProfile, *, is_declared: bool) -> None:
        """Plan anew for the devices of a profile, the only ones left.

        A given plan can't be kept without one of its devices; the new one is then
        carried out as it stands.

        Args:
            profile: Of rank 0, so that all plan by the same rates.
            is_declared: As of ``known_rates``.

        Raises:
            InfeasiblePlanError: If a sample does not fit on a device that must take part.
        """
        left = {curve.device_id for curve in profile.curves}
        required = self.settings.workload.required_device_ids
        workload = replace(
            self.settings.workload,
            required_device_ids=tuple(i for i in required if i in left),
        )
        self.settings = replace(self.settings, workload=workload, is_declared=is_declared)
        self.profile = profile
        self._corrector, self._num_seen = None, 0
        plan = solve(profile, workload)
        # Declared speeds are right among each other only: no rate can be held to them.
        has_bound = self.plan.bound_step_s > 0 and not is_declared
        self._take(plan if has_bound else replace(plan, bound_step_s=0.0))
        if self.settings.corrects and not is_declared:
            self._start()

    def relink(self, network: ExchangeNetwork) -> None:
        """Plan anew by the rates known, since links changed."""
        if self.profile.network is not None:  # whether they overlap has not changed
            network = replace(network, num_buckets=self.profile.network.num_buckets)
        self.profile = replace(self.profile, network=network)
        if not self.settings.corrects:
            return
        profile = self.profile
        if self._corrector is not None:
            profile = scale_profile(profile, self._corrector.factors)
        self._take(solve(profile, self.settings.workload))
        if self._corrector is not None:
            self._corrector = replace(self._corrector, profile=self.profile, plan=self.plan)

    def share_tail(self, num_samples: int) -> None:
        """Leave so many samples of each step to whoever is free, and plan anew.

        Raises:
            ConfigError: If the plan is carried out as it stands, or every rank must run
                the same number of micro-batches.
        """
        if not self.settings.corrects or self.settings.workload.uniform_micro_batches:
            msg = (
                f"a tail of {num_samples} samples can't be shared: the plan is given, "
                "deterministic, for one device, or for synchronized BatchNorm; train "
                "without these, or without a tail"
            )
            raise ConfigError(msg)
        workload = replace(self.settings.workload, tail_samples=num_samples)
        self.settings = replace(self.settings, workload=workload)
        profile = self.profile
        if self._corrector is not None:
            profile = scale_profile(profile, self._corrector.factors)
        self._take(solve(profile, workload))
        if self._corrector is not None:
            self._corrector = replace(self._corrector, workload=workload, plan=self.plan)

    def check_pinned(self, plan: Plan) -> None:
        """Check that a given plan can be carried out as it stands.

        Raises:
            ConfigError: If it does not fit, or says more than can be repeated.
        """
        workload = self.settings.workload
        left = [curve.device_id for curve in self.profile.curves]
        check_plan(plan, left, global_batch_size=workload.global_batch_size)
        if workload.uniform_micro_batches and not plan.uniform_micro_batches:
            msg = (
                "the plan has uniform_micro_batches=false, but sync_batchnorm=True needs "
                "the same number of micro-batches on every device; plan again"
            )
            raise ConfigError(msg)

    def expected_s(self, rank: int, micro_batch_sizes: Sequence[int]) -> float:
        """What the profile says this rank takes for the micro-batches it ran."""
        device_id = self.device_ids[rank]
        return expected_compute_s(self.profile, device_id, micro_batch_sizes)

    def probe_if_due(self, rank: int, step_index: int) -> tuple[float, float]:
        """On a left-out rank now and then: a micro-batch's measured and expected time."""
        if not self.settings.corrects or step_index % _PROBE_EVERY_STEPS:
            return 0.0, 0.0
        curve = self.curve_of(rank)
        size = min(curve.micro_batch_sizes[-1], curve.max_micro_batch_size)
        expected_s = expected_compute_s(
            self.profile, curve.device_id, [size], with_optimizer=False
        )
        seconds = self.probe(size)
        return (seconds, expected_s) if seconds else (0.0, 0.0)

    def observe(self, step_index: int, figures: Sequence[RankFigures]) -> None:
        """Take in a step; may change the plan for the next one."""
        if not self.settings.corrects:
            return
        self._num_seen += 1
        if self._corrector is None:
            if self._num_seen == _CALIBRATING_STEP:
                self._calibrate(step_index, figures)
            return
        self._correct(step_index, figures)

    def curve_of(self, rank: int) -> ComputeCurve:
        """How fast a rank's device computes, as it was measured."""
        device_id = self.device_ids[rank]
        return next(c for c in self.profile.curves if c.device_id == device_id)

    def _figures(self, figures: Sequence[RankFigures]) -> dict[str, RankFigures]:
        """By device, of those that the profile knows: lost ones are none of them."""
        left = {curve.device_id for curve in self.profile.curves}
        return {
            device_id: figure
            for device_id, figure in zip(self.device_ids, figures, strict=True)
            if device_id in left
        }

    def _start(self) -> None:
        self._corrector = start_correction(
            self.profile,
            self.settings.workload,
            self.plan,
            CorrectionSettings(threshold=self.settings.replan_threshold),
        )

    def _correct(self, step_index: int, figures: Sequence[RankFigures]) -> None:
        assert self._corrector is not None
        observations = [
            DeviceObservation(
                device_id=device_id,
                # Reading costs the device time too, and grows with its share.
                compute_s=figure.probe_s or figure.compute_s + figure.data_s,
                expected_s=figure.expected_s,
            )
            for device_id, figure in self._figures(figures).items()
        ]
        self._corrector, decision = observe(self._corrector, observations)
        for event in decision.events:
            self.recorder.add_event(
                step_index, event.kind, event.message, event.device_id, event.values
            )
        if decision.new_plan is not None:
            self._take(decision.new_plan)

    def _calibrate(self, step_index: int, figures: Sequence[RankFigures]) -> None:
        """Replace declared speeds by those of a step; all ranks see the same figures."""
        scales = [
            figure.compute_s / figure.expected_s
            for figure in figures
            if figure.expected_s > 0 and figure.compute_s > 0
        ]
        if not scales:
            self._num_seen = 0
            return
        typical = sorted(scales)[len(scales) // 2]
        factors = {
            device_id: figure.compute_s / figure.expected_s
            if figure.expected_s > 0 and figure.compute_s > 0
            else typical
            for device_id, figure in self._figures(figures).items()
        }
        self.profile = scale_profile(self.profile, factors)
        self._take(solve(self.profile, self.settings.workload))
        values = {
            "predicted_step_s": self.plan.predicted_step_s,
            "bound_step_s": self.plan.bound_step_s,
        }
        self.recorder.add_event(
            step_index, "replanned", "planned by the first steps' speeds", values=values
        )
        self._start()

    def _take(self, plan: Plan) -> None:
        self.plan = plan
        self.recorder.write_plan(plan)
