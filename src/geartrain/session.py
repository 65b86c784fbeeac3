"""The user's API: one Session a process, the same script on one device or on many.

    session = gt.Session()
    model, optimizer = session.setup(model, optimizer, loss_fn=loss_fn)
    loader = session.setup_dataloader(dataset, global_batch_size=512)
    for batch in loader:
        loss = session.step(batch)

This is the one place that reads the environment.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch
import torch.distributed as dist

from geartrain.errors import ConfigError
from geartrain.parallel.evaluation import MetricFunction, evaluate, reduce_metric
from geartrain.parallel.loss_terms import CountFunction, LossFunction, read_loss
from geartrain.parallel.low_communication import EXACT_ALGORITHM, Algorithm
from geartrain.parallel.model_calls import AUTOCAST_DTYPES, ForwardFunction
from geartrain.parallel.ranks import (
    RankPlace,
    adopt_group,
    connect_torchrun,
    connect_worker,
    stand_alone,
)
from geartrain.parallel.trainer import Trainer
from geartrain.parallel.trainer_settings import TrainerSettings, UserParts
from geartrain.parallel.worker_spec import WORKER_SPEC_VARIABLE, WorkerSpec
from geartrain.telemetry import read_document

if TYPE_CHECKING:
    from collections.abc import Iterator

    from geartrain.data.fetch import CollateFn, MapDataset
    from geartrain.data.loader import ShareLoader
    from geartrain.planner import Plan

logger = logging.getLogger(__name__)

_DEFAULT_TIMEOUT_S = 300.0

OptimizerT = TypeVar("OptimizerT", bound=torch.optim.Optimizer)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Environment:
    """What the environment says about this process."""

    spec: WorkerSpec | None
    local_rank: int | None
    """torchrun's; None where torchrun did not start this process."""
    meeting_point: str | None
    """Where the ranks of a torchrun, or of the script's own group, meet."""


def _read_environment() -> _Environment:
    spec_path = os.environ.get(WORKER_SPEC_VARIABLE)
    spec = read_document(Path(spec_path), WorkerSpec) if spec_path else None
    started_by_torchrun = {"RANK", "WORLD_SIZE", "MASTER_ADDR"} <= os.environ.keys()
    local_rank = int(os.environ.get("LOCAL_RANK", "0")) if started_by_torchrun else None
    meeting_point = os.environ.get("MASTER_ADDR")
    return _Environment(spec=spec, local_rank=local_rank, meeting_point=meeting_point)


@dataclass(slots=True)
class Session:
    """Trains one model on this process's device, in step with all other ranks.

    Started by ``geartrain run`` it takes its place in that run's fleet; by torchrun,
    in that world; by plain ``python``, it trains on one device with the same code.

    Args:
        seed: Seeds model initialisation (alike on all ranks) and, once ``setup`` is
            called, every rank's generators by (seed, step, rank).
        plan: Carry out this plan as it stands, and never correct it.
        deterministic: Two runs of the same script on the same fleet agree to the bit:
            shares follow from the fleet file instead of from measurements, nothing is
            corrected while running, and torch's deterministic algorithms are on.
        spec: What the launcher says; read from the environment where None.

    Raises:
        CommunicationError: If the other ranks can't be reached in time.
        ConfigError: If the environment contradicts itself.
    """

    seed: int = 0
    plan: Plan | None = None
    deterministic: bool = False
    spec: WorkerSpec | None = None
    _place: RankPlace = field(init=False)
    _trainer: Trainer | None = field(init=False, default=None)
    _loaders: list[ShareLoader] = field(init=False, default_factory=list)
    _saved_positions: list[dict[str, int | bool]] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        environment = _read_environment()
        if self.spec is None:
            self.spec = environment.spec
        if self.spec is not None:
            self.deterministic = self.deterministic or self.spec.deterministic
        self._place = self._connect(environment)
        if self.deterministic:
            torch.use_deterministic_algorithms(mode=True)
        torch.manual_seed(self.seed)
        atexit.register(self.close)

    # -- where am I ---------------------------------------------------------------

    @property
    def rank(self) -> int:
        """This process's rank, from 0."""
        return self._place.rank

    @property
    def world_size(self) -> int:
        """Number of ranks; each works one device."""
        return self._place.world_size

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, which prints and saves."""
        return self.rank == 0

    @property
    def device(self) -> torch.device:
        """This rank's device, where batches arrive."""
        return self._place.device.torch_device

    @property
    def device_id(self) -> str:
        """The device's name in the fleet, such as ``cuda:0``."""
        return self._place.device.profile.device_id

    @property
    def step_index(self) -> int:
        """Optimizer steps made so far, over all epochs."""
        return self._trainer.step_index if self._trainer is not None else 0

    @property
    def epoch(self) -> int:
        """The epoch of the loader being iterated, from 0."""
        loader = self._trainer.active_loader if self._trainer is not None else None
        return loader.epoch if loader is not None else 0

    @property
    def current_plan(self) -> Plan | None:
        """The plan in force; None before the first batch."""
        return self._trainer.director.plan if self._trainer is not None else None

    def print(self, *values: object) -> None:
        """Print on rank 0 only."""
        if self.is_main:
            print(*values, flush=True)  # noqa: T201 - the user's own output

    # -- set-up -------------------------------------------------------------------

    def setup(  # noqa: PLR0913 - the user's one call; each is a keyword
        self,
        model: torch.nn.Module,
        optimizer: OptimizerT,
        *,
        loss_fn: LossFunction | None = None,
        lr_scheduler: Any = None,  # Any: torch's schedulers share no public base
        max_grad_norm: float | None = None,
        forward_fn: ForwardFunction | None = None,
        count_fn: CountFunction | None = None,
        sync_batchnorm: bool = False,
        invariant_dropout: bool = False,
        precision: Literal["fp32", "bf16", "fp16"] = "fp32",
        micro_batch_size: int | None = None,
        overlap: bool = True,
        compression: str | None = None,
        algorithm: Algorithm = EXACT_ALGORITHM,
        total_steps: int | None = None,
    ) -> tuple[torch.nn.Module, OptimizerT]:
        """Take the model, its optimizer, and how its loss is made.

        The model is called as ``model(inputs)`` for batches ``(inputs, target)`` and as
        ``model(**batch)`` for mappings, unless ``forward_fn`` says otherwise. All ranks
        get rank 0's weights. The model is measured when the first batch is asked for.

        Args:
            model: Any module; moved to this rank's device.
            optimizer: Any torch optimizer over the model's parameters.
            loss_fn: ``loss_fn(output, batch)`` returns an unreduced tensor, a pair
                ``(loss_sum, count)``, or a mapping of names to such pairs, each
                normalised by its own count over all devices. It sees only the output
                and its own batch. A mean is accepted only with ``count_fn``.
            lr_scheduler: Stepped once after each optimizer step.
            max_grad_norm: Clips the norm of the aggregated gradient.
            forward_fn: ``forward_fn(model, batch)`` returns the output.
            count_fn: ``count_fn(batch)`` returns what the loss is a mean over (samples,
                or unmasked tokens), or a mapping of names to counts. It may see a part
                of a batch, or one without samples.
            sync_batchnorm: BatchNorm uses the statistics of all devices, and all
                devices run the same number of micro-batches.
            invariant_dropout: Dropout masks depend on (seed, step, layer, sample), so
                that another plan leaves the loss curve unchanged.
            precision: Autocast dtype; fp16 scales the loss, alike on all ranks.
            micro_batch_size: The largest on any device; a plan takes smaller ones where
                they are faster. To fix them, give a plan.
            overlap: Send gradients while the last micro-batch's backward runs.
            compression: How gradients are coded where racks (or hosts) are joined by a
                slow link. None exchanges them exactly; ``"auto"`` codes where the link,
                not the processor, is the limit and only in ways that held the loss within
                1 % of exact; a name (``fp16 bf16 fp8 int8 int4 topk topk:FRACTION``)
                takes that one. What a code loses is added in the next step.
            algorithm: ``"exact"``: every step is that of a single device. For very slow
                links ``LocalSGD(sync_every=8)`` and ``DiLoCo(sync_every=100)`` let each
                device make its own steps and average the models now and then, weighted
                by samples. That changes the algorithm, and so the result.
            total_steps: For the display's estimate of the time left.

        Returns:
            The model, with converted layers where asked for, and the optimizer.

        Raises:
            ConfigError: If an argument is wrong, or ranks built different models.
        """
        if self._trainer is not None:
            msg = "setup() was called twice; make a new Session for another model"
            raise ConfigError(msg)
        parts = UserParts(
            model=model,
            optimizer=optimizer,
            lr_scheduler=lr_scheduler,
            loss_fn=loss_fn,
            forward_fn=forward_fn,
            count_fn=count_fn,
        )
        settings = TrainerSettings(
            seed=self.seed,
            max_grad_norm=max_grad_norm,
            sync_batchnorm=sync_batchnorm,
            invariant_dropout=invariant_dropout,
            autocast_dtype=self._autocast_dtype(precision),
            loss_scaling=precision == "fp16",
            micro_batch_size=micro_batch_size,
            overlap=overlap,
            compression=compression,
            algorithm=algorithm,
            total_steps=total_steps,
            deterministic=self.deterministic,
            pinned_plan=self._pinned_plan(),
        )
        self._trainer = Trainer(
            self._place, parts, settings, self.spec, positions=self._positions
        )
        return self._trainer.model, optimizer

    def setup_dataloader(  # noqa: PLR0913 - the user's one call; each is a keyword
        self,
        dataset: MapDataset,
        *,
        global_batch_size: int,
        seed: int | None = None,
        shuffle: bool = True,
        drop_last: bool = False,
        collate_fn: CollateFn | None = None,
        prefetch: bool | None = None,
    ) -> ShareLoader:
        """Make a loader that hands out this device's share of each global batch.

        The order is one permutation by (seed, epoch), whatever the shares. A dataset
        that draws random numbers takes them from ``geartrain.data.sample_generator()``,
        which depends on (seed, epoch, sample index) alone.

        Args:
            dataset: A map-style dataset.
            global_batch_size: Samples of an optimizer step, over all devices.
            seed: Of the order; the session's where None.
            shuffle: Whether to permute; an evaluation set needs none.
            drop_last: Leave out the last, shorter batch of an epoch.
            collate_fn: Makes a batch of a list of samples.
            prefetch: Read the next share on a thread; by default on accelerators only,
                since on a CPU device the thread competes with the compute it feeds.

        Raises:
            ConfigError: If the dataset can't be used, is smaller than the global batch,
                or the global batch has fewer samples than there are devices.
        """
        from geartrain.data.loader import LoaderConfig, ShareLoader  # noqa: PLC0415

        config = LoaderConfig(
            global_batch_size=global_batch_size,
            seed=self.seed if seed is None else seed,
            shuffle=shuffle,
            drop_last=drop_last,
            prefetch=self.device.type != "cpu" if prefetch is None else prefetch,
        )
        if global_batch_size < self.world_size:
            msg = (
                f"global_batch_size={global_batch_size} is smaller than the number of "
                f"devices, {self.world_size}; give a larger one or use fewer devices"
            )
            raise ConfigError(msg)
        index = len(self._loaders)
        loader = ShareLoader(
            dataset,
            config=config,
            assignment=lambda: self._trained().assign(self._loaders[index]),
            device=self.device,
            collate_fn=collate_fn,
        )
        self._loaders.append(loader)
        if index < len(self._saved_positions):
            loader.load_state_dict(self._saved_positions[index])
        return loader

    # -- training -----------------------------------------------------------------

    def step(self, batch: Any) -> float:  # Any: the user's batch
        """Make one optimizer step of which ``batch`` is this device's share.

        Splits the share into micro-batches, runs forward and backward, exchanges
        gradients, clips, and updates. Membership and shares change only here.

        Returns:
            The mean loss over the whole global batch, the same on all ranks.

        Raises:
            CommunicationError: If a peer was lost; the step was applied nowhere.
            TrainingStopped: If a stop was asked for; the state has been saved.
        """
        return self._trained().step(batch)

    def micro_batches(self, batch: Any) -> Iterator[Any]:  # Any: the user's batch
        """Open a step and yield this device's micro-batches, for an own forward.

        Call ``backward`` once for each and ``optimizer_step`` after the last. A device
        whose share is empty gets none and still takes part in ``optimizer_step``.
        """
        return self._trained().micro_batches(batch)

    def backward(
        self,
        loss: torch.Tensor,
        *,
        count: float | torch.Tensor | None = None,
        reduction: Literal["mean", "sum"] = "mean",
    ) -> None:
        """Run backward of one micro-batch of an own forward.

        Args:
            loss: A tensor with one value an element, or a scalar with its ``count``.
            count: Elements that the loss is over: samples, or unmasked tokens.
            reduction: Whether the scalar is their mean, as torch's losses return by
                default, or their sum.

        Raises:
            ConfigError: If a scalar comes without a count, or no step is open.
        """
        if reduction not in ("mean", "sum"):
            msg = f"reduction={reduction!r} must be 'mean' or 'sum', as the loss was made"
            raise ConfigError(msg)
        output: object = loss
        if not isinstance(output, torch.Tensor):
            msg = f"backward() got {type(loss).__name__}; expected the loss as a tensor"
            raise ConfigError(msg)
        if loss.dim() == 0 and count is None:
            msg = (
                "backward() got a scalar, so its weight is unknown; give it unreduced "
                "losses (reduction='none'), or say backward(loss, count=n) for a mean over "
                "n samples or tokens"
            )
            raise ConfigError(msg)
        if loss.dim() == 0 and count is not None and reduction == "sum":
            output = (loss, count)
        self._trained().backward(read_loss(output, count))

    def optimizer_step(self) -> float:
        """Finish a step opened by ``micro_batches``; returns the global mean loss."""
        return self._trained().optimizer_step()

    def apply_plan(self, plan: Plan) -> None:
        """Carry out another plan from the next batch on; all ranks must call it.

        Raises:
            ConfigError: If the plan does not fit the fleet or the global batch.
        """
        self._trained().director.apply_plan(plan)

    def share_tail(self, fraction: float) -> None:
        """Leave this part of each step to whoever is free; all ranks must call it.

        Takes the place of ``geartrain run --tail-fraction`` from the next batch on, and
        plans anew by the speeds known by now.

        Args:
            fraction: Part of the global batch, 0 to 1, 1 left out.

        Raises:
            ConfigError: If no batch was handed out yet, or the plan can't have a tail.
        """
        if not 0 <= fraction < 1:
            msg = f"fraction={fraction} must lie in 0..1, 1 left out"
            raise ConfigError(msg)
        plan = self.current_plan
        if plan is None:
            msg = "share_tail() came before the first batch; take a batch from a loader"
            raise ConfigError(msg)
        keeper = self._trained().director.keeper
        keeper.share_tail(round(plan.global_batch_size * fraction))

    # -- measuring ----------------------------------------------------------------

    def evaluate(self, loader: ShareLoader, metric_fn: MetricFunction) -> dict[str, float]:
        """Average metrics over a dataset, each sample once, whatever the shares.

        Args:
            loader: Made by ``setup_dataloader``; its training position does not move.
            metric_fn: ``metric_fn(output, batch)`` returns a mapping of names to pairs
                (sum, count).

        Returns:
            Mean of each metric over all devices, the same on all ranks.
        """
        return evaluate(self._trained(), loader, metric_fn)

    def all_reduce_metric(self, value_sum: float, count: float) -> float:
        """Mean of a value over all devices, from each one's sum and count."""
        groups = self._place.groups
        if self._trainer is None:
            return reduce_metric(groups, value_sum, count)
        return self._trainer.together(lambda: reduce_metric(groups, value_sum, count))

    def average_models(self) -> None:
        """Give all devices one model now; all ranks must call it.

        For ``LocalSGD`` and ``DiLoCo``, before the model is used outside the session;
        ``evaluate`` and a stop do it by themselves. Exact steps leave nothing to do.

        Raises:
            CommunicationError: If a peer was lost.
        """
        self._trained().average_models()

    # -- saving -------------------------------------------------------------------

    def save(self, path: str | Path) -> None:
        """Save everything needed to go on: rank 0 writes, the others return at once.

        With ``setup(compression=...)`` on several hosts all ranks must call it, after the
        same step: each keeps a part of what its codes lost, and hands it to rank 0. To
        call it on all ranks is right in any case.

        Raises:
            CheckpointError: If it can't be written; an older snapshot there is kept.
            CommunicationError: If a rank's part of what compression owes did not come.
        """
        self._trained().save(Path(path), self._positions())

    def load(self, path: str | Path) -> None:
        """Continue from a snapshot, on this or any other fleet; all ranks call it.

        What the saved run's compression owed goes to whoever codes that part of the
        gradient now; parts that nobody codes any more are dropped with a warning.

        Raises:
            CheckpointError: If it is damaged or belongs to another model.
        """
        self._saved_positions = self._trained().load(Path(path))
        for loader, position in zip(self._loaders, self._saved_positions, strict=False):
            loader.load_state_dict(position)

    def close(self) -> None:
        """Write the last records and leave the other ranks; called at exit as well."""
        atexit.unregister(self.close)
        failing = (
            sys.exc_info()[0] is not None or getattr(sys, "last_type", None) is not None
        )
        if self._trainer is not None:
            self._trainer.close(gather_waits=not failing)
        self._place.groups.leave()

    # -- internals ----------------------------------------------------------------

    def _connect(self, environment: _Environment) -> RankPlace:
        if self.spec is not None:
            return connect_worker(self.spec, deterministic=self.deterministic)
        if dist.is_available() and dist.is_initialized():
            return adopt_group(
                _DEFAULT_TIMEOUT_S,
                environment.meeting_point,
                deterministic=self.deterministic,
            )
        if environment.local_rank is not None:
            meeting_point = environment.meeting_point
            assert meeting_point is not None  # torchrun sets both or neither
            return connect_torchrun(
                environment.local_rank,
                _DEFAULT_TIMEOUT_S,
                meeting_point,
                deterministic=self.deterministic,
            )
        return stand_alone(_DEFAULT_TIMEOUT_S)

    def _positions(self) -> list[dict[str, int | bool]]:
        return [loader.state_dict() for loader in self._loaders]

    def _trained(self) -> Trainer:
        if self._trainer is None:
            msg = "call session.setup(model, optimizer, loss_fn=...) first"
            raise ConfigError(msg)
        return self._trainer

    def _pinned_plan(self) -> Plan | None:
        from geartrain.planner import Plan as PlanDocument  # noqa: PLC0415

        if self.plan is None and self.spec is not None and self.spec.plan_path:
            return read_document(Path(self.spec.plan_path), PlanDocument)
        return self.plan

    def _autocast_dtype(self, precision: str) -> torch.dtype | None:
        if precision not in AUTOCAST_DTYPES:
            msg = f"precision={precision!r} must be one of {', '.join(AUTOCAST_DTYPES)}"
            raise ConfigError(msg)
        dtype = AUTOCAST_DTYPES[precision]
        if dtype is None:
            return None
        name = str(dtype).removeprefix("torch.")
        device = self._place.device
        supported = device.adapter.supported_dtypes(device.local_id)
        if name not in supported:
            msg = (
                f"precision={precision!r} needs {name}, which {self.device_id} does not "
                f"support (it has {', '.join(supported)}); choose another precision"
            )
            raise ConfigError(msg)
        return dtype
