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
import os
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch

from geartrain.elastic.worker import make_members
from geartrain.errors import ConfigError
from geartrain.parallel.evaluation import MetricFunction, evaluate, reduce_metric
from geartrain.parallel.loss_terms import CountFunction, LossFunction, read_own_loss
from geartrain.parallel.low_communication import EXACT_ALGORITHM, Algorithm
from geartrain.parallel.model_calls import ForwardFunction
from geartrain.parallel.ranks import StartedBy, find_place
from geartrain.parallel.session_settings import (
    check_global_batch_size,
    find_autocast_dtype,
    find_pinned_plan,
    tail_samples,
)
from geartrain.parallel.session_state import SessionState
from geartrain.parallel.trainer import Trainer
from geartrain.parallel.trainer_settings import TrainerSettings, UserParts
from geartrain.parallel.training_saves import resume
from geartrain.parallel.worker_spec import WORKER_SPEC_VARIABLE, WorkerSpec
from geartrain.telemetry import read_document

if TYPE_CHECKING:
    from collections.abc import Iterator

    from geartrain.data.fetch import CollateFn, MapDataset
    from geartrain.data.loader import ShareLoader
    from geartrain.planner import Plan

_DEFAULT_TIMEOUT_S = 300.0

OptimizerT = TypeVar("OptimizerT", bound=torch.optim.Optimizer)


def _read_environment() -> StartedBy:
    spec_path = os.environ.get(WORKER_SPEC_VARIABLE)
    spec = read_document(Path(spec_path), WorkerSpec) if spec_path else None
    started_by_torchrun = {"RANK", "WORLD_SIZE", "MASTER_ADDR"} <= os.environ.keys()
    local_rank = int(os.environ.get("LOCAL_RANK", "0")) if started_by_torchrun else None
    meeting_point = os.environ.get("MASTER_ADDR")
    return StartedBy(spec=spec, local_rank=local_rank, meeting_point=meeting_point)


@dataclass(slots=True)
class Session(SessionState):
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

    def __post_init__(self) -> None:
        started_by = _read_environment()
        self.spec = self.spec or started_by.spec
        if self.spec is not None:
            self.deterministic = self.deterministic or self.spec.deterministic
        self._place = find_place(
            replace(started_by, spec=self.spec),
            _DEFAULT_TIMEOUT_S,
            deterministic=self.deterministic,
        )
        if self.deterministic:
            torch.use_deterministic_algorithms(mode=True)
        torch.manual_seed(self.seed)
        atexit.register(self.close)

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
            autocast_dtype=find_autocast_dtype(precision, self._place.device),
            loss_scaling=precision == "fp16",
            micro_batch_size=micro_batch_size,
            overlap=overlap,
            compression=compression,
            algorithm=algorithm,
            total_steps=total_steps,
            deterministic=self.deterministic,
            pinned_plan=find_pinned_plan(self.plan, self.spec),
        )
        self._trainer = Trainer(
            self._place,
            parts,
            settings,
            self.spec,
            make_members=make_members,
            positions=self._positions,
            move_to=self._move_to,
            tracked=self._tracked,
        )
        if not self._place.groups.joins:  # else a member gives it the state
            self._saved_positions = resume(self._trainer)
        self._trainer.begin()
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
        check_global_batch_size(global_batch_size, self.world_size)
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
        return self._trained().own_forward.micro_batches(batch)

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
        self._trained().own_forward.backward(read_own_loss(loss, count, reduction))

    def optimizer_step(self) -> float:
        """Finish a step opened by ``micro_batches``; returns the global mean loss."""
        return self._trained().own_forward.optimizer_step()

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
        num_samples = tail_samples(fraction, self.current_plan)
        self._trained().director.keeper.share_tail(num_samples)

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

    # -- the end ------------------------------------------------------------------

    def close(self) -> None:
        """Write the last records and leave the other ranks; called at exit as well."""
        atexit.unregister(self.close)
        error = sys.exc_info()[0] or getattr(sys, "last_type", None)
        if self._trainer is not None:
            self._trainer.close(gather_waits=error is None)
        self._place.groups.leave()
