"""What a trainer is made of: the exchange, the followed ranks, model and engine.

Each function makes one part from the ones before it; the trainer puts them together in
an order that all ranks share, since several of them wait for the other ranks.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from geartrain.collectives.exchange_hub import ExchangeHub, HubPlace, uses_vendor_library
from geartrain.parallel.commit import ExchangeCommitter
from geartrain.parallel.dropout import convert_dropout
from geartrain.parallel.low_communication import AVERAGES, ModelAverager
from geartrain.parallel.model_calls import ModelCalls
from geartrain.parallel.residual_state import ResidualState
from geartrain.parallel.state_sync import broadcast_model, check_same_model
from geartrain.parallel.step_engine import StepEngine
from geartrain.parallel.step_update import EngineSettings
from geartrain.parallel.survivors import Survivors
from geartrain.parallel.worker_spec import STOP_SIGNAL_NAME

if TYPE_CHECKING:
    from geartrain.parallel.membership import JoiningMembership
    from geartrain.parallel.process_group import RankGroups
    from geartrain.parallel.ranks import RankPlace
    from geartrain.parallel.trainer_settings import TrainerSettings, UserParts
    from geartrain.parallel.worker_spec import WorkerSpec


MakeMembers = Callable[["RankGroups", "WorkerSpec"], "JoiningMembership | None"]


def no_members(groups: RankGroups, spec: WorkerSpec) -> JoiningMembership | None:  # noqa: ARG001 - protocol
    """No coordinator: the ranks find out among themselves who is left."""
    return None


def install_stop_handler(request_stop: Callable[[], None]) -> None:
    """Have a function called when the launcher asks this process to stop."""

    def on_signal(_signal: int, _frame: object) -> None:
        request_stop()

    signal.signal(getattr(signal, STOP_SIGNAL_NAME), on_signal)


def install_leave_handler(leave: Callable[[str], None]) -> None:
    """Have a function called, with the reason, when this process is asked to end.

    SIGTERM is what schedulers send before they take a machine away. The second one ends the
    process as it would without a handler.
    """

    def on_signal(number: int, _frame: object) -> None:
        signal.signal(number, signal.SIG_DFL)
        # Not here: the thread that was interrupted may hold what leaving needs.
        threading.Thread(
            target=leave, args=("it was asked to end (SIGTERM)",), daemon=True
        ).start()

    signal.signal(signal.SIGTERM, on_signal)


def make_hub(
    place: RankPlace, settings: TrainerSettings, spec: WorkerSpec | None
) -> ExchangeHub | None:
    """What carries out exchanges along the links found; None where it is not needed.

    Args:
        place: This rank among the others.
        settings: How to train.
        spec: What the launcher said; None without one.
    """
    network, groups = place.network, place.groups
    if network is None or groups.store is None or uses_vendor_library(network):
        return None
    hub = ExchangeHub(
        place=HubPlace(
            rank=groups.rank,
            device_ids=groups.device_ids,
            store=groups.store,
            rendezvous=groups.rendezvous,
            timeout_s=groups.timeout_s,
            device=place.device.torch_device,
        ),
        network=network,
        compression=settings.compression,
        explains=spec is not None and spec.mode == "plan",
        _codecs=place.codecs,
    )
    pinned = settings.pinned_plan
    if pinned is not None and pinned.exchange is not None:
        members = {replica.device_id for replica in pinned.replicas}
        ranks = [r for r, name in enumerate(groups.device_ids) if name in members]
        hub.pin(ranks, pinned.exchange)
    return hub


def make_membership(
    groups: RankGroups,
    spec: WorkerSpec | None,
    settings: TrainerSettings,
    make_members: MakeMembers,
) -> JoiningMembership | None:
    """Who takes part is followed where the launcher goes on without a lost worker.

    Args:
        groups: With the hub in place.
        spec: What the launcher said; None without one.
        settings: How to train. Steps that are not exact are not committed one by one, and
            with synchronized BatchNorm all wait for each other within a step.
        make_members: Makes the membership that the coordinator of the run decides on.
    """
    if groups.hub is None or groups.store is None or spec is None:
        return None
    if spec.on_loss == "stop" or spec.mode == "plan":
        return None
    is_committed = isinstance(settings.algorithm, str) and not settings.sync_batchnorm
    membership: JoiningMembership | None = None
    if is_committed:
        membership = make_members(groups, spec)
    if membership is None:
        membership = Survivors(
            groups.store, groups.rank, groups.hub, min_devices=spec.min_devices
        )
    groups.rendezvous.interruption = membership.interruption
    return membership


def prepare_model(
    place: RankPlace, parts: UserParts, settings: TrainerSettings
) -> torch.nn.Module:
    """The user's model on this rank's device, with rank 0's weights.

    Raises:
        CommunicationError: If a peer was lost.
        ConfigError: If ranks built different models.
    """
    model = parts.model.to(place.device.torch_device)
    if settings.invariant_dropout:
        model = convert_dropout(model)
    if len(place.groups.members) > 1:
        check_same_model(place.groups, model)
        broadcast_model(place.groups, model)
    return model


def make_calls(
    place: RankPlace, parts: UserParts, settings: TrainerSettings, model: torch.nn.Module
) -> ModelCalls:
    """How the user's functions are called, on this rank's device.

    Args:
        place: This rank among the others.
        parts: The user's functions.
        settings: How to train.
        model: As prepared.
    """
    return ModelCalls(
        model=model,
        device_type=place.device.torch_device.type,
        loss_fn=parts.loss_fn,
        forward_fn=parts.forward_fn,
        count_fn=parts.count_fn,
        autocast_dtype=settings.autocast_dtype,
    )


def make_engine(
    place: RankPlace, parts: UserParts, settings: TrainerSettings, model: torch.nn.Module
) -> StepEngine:
    """What runs the steps, among all ranks at first.

    Args:
        place: This rank among the others.
        parts: The user's optimizer is taken from them.
        settings: How to train.
        model: As prepared.
    """
    groups = place.groups
    everyone = groups.collective()

    def agree_names(names: tuple[str, ...]) -> tuple[str, ...]:
        gathered = groups.rendezvous.gather("loss terms", list(names), list[str])
        return tuple(sorted({name for part in gathered for name in part}))

    return StepEngine(
        model=model,
        optimizer=parts.optimizer,
        settings=EngineSettings(
            max_grad_norm=settings.max_grad_norm,
            overlap=settings.overlap,
            loss_scaling=settings.loss_scaling,
        ),
        rank=place.rank,
        world=everyone,
        num_ranks=place.world_size,
        agree_names=agree_names,
        synchronize=place.device.synchronize,
        gradient_group=everyone,
        averager=_make_averager(place, settings, model),
    )


def make_committer(groups: RankGroups, engine: StepEngine) -> ExchangeCommitter | None:
    """Steps are committed where the others go on without a lost rank.

    Args:
        groups: Of this rank.
        engine: Whose ranks vote.
    """
    if engine.averager is not None:
        return None  # each rank's step is its own
    return ExchangeCommitter(
        world=lambda: engine.world,
        members=lambda: engine.members,
        rank=groups.rank,
        device_ids=groups.device_ids,
    )


def make_residuals(groups: RankGroups, engine: StepEngine) -> ResidualState:
    """What compressed exchanges owe, kept in step with the engine.

    Args:
        groups: Of this rank.
        engine: Told of what is owed.
    """
    residuals = ResidualState(
        groups=groups,
        buckets=lambda: engine.buckets,
        loss_scale=lambda: engine.scaler.get_scale() if engine.scaler else 1.0,
    )
    residuals.follow(engine.gradient_group)
    engine.residuals = residuals
    return residuals


def _make_averager(
    place: RankPlace, settings: TrainerSettings, model: torch.nn.Module
) -> ModelAverager | None:
    algorithm = settings.algorithm
    if isinstance(algorithm, str):
        return None
    trainable = [p for p in model.parameters() if p.requires_grad]
    averager = ModelAverager(trainable, algorithm, place.rank)
    averager.collective = place.groups.collective(purpose=AVERAGES)
    return averager
