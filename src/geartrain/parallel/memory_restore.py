"""Go on from what agents hold in memory: a snapshot, and then the steps of the log.

The snapshot is read when the training is set up. The logged steps are applied when the
first batch is asked for, once the script tracks all that moves with a step; neither forward
nor backward is made again for them. All ranks do the same, or none does.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from geartrain.checkpoint.agent.read_state import read_components
from geartrain.checkpoint.agent.recovery import find_extra
from geartrain.checkpoint.gradient_log import GradientPart, LoggedStep, decode_step
from geartrain.checkpoint.ranges import check_tiling
from geartrain.data.loader import EpochOver
from geartrain.errors import CheckpointError
from geartrain.parallel.commit import ReducedStep, StepName
from geartrain.parallel.memory_log import read_vector
from geartrain.parallel.memory_shares import BUFFER_PREFIX, GRADIENT_PREFIX
from geartrain.parallel.saved_state import LoadedState, adopt_state

if TYPE_CHECKING:
    from geartrain.data.loader import ShareLoader
    from geartrain.parallel.save_spec import MemorySource
    from geartrain.parallel.trainer import Trainer

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    """What one rank has read."""

    components: dict[str, Any]  # Any: state dicts
    place: dict[str, Any]  # Any: JSON
    steps: list[list[bytes]]
    """Logged, coded, one of each member."""


@dataclass(slots=True)
class LoggedSteps:
    """Steps that this rank is still to apply.

    Args:
        trainer: At the state that the log goes on from.
        steps: Coded, in order; of each what every member has logged.
    """

    trainer: Trainer
    steps: Sequence[Sequence[bytes]]

    def apply(self, loader: ShareLoader) -> None:
        """Apply them all, before a batch of this loader is handed out.

        Raises:
            EpochOver: If its epoch has ended with them.
            CheckpointError: If one is not what was logged.
        """
        trainer, epoch = self.trainer, loader.position[0]
        for coded in self.steps:
            self._apply([decode_step(data) for data in coded])
        self.steps = ()
        trainer.logged_steps = None
        if trainer.regrouper is not None:
            trainer.regrouper.membership.reset(trainer.engine.name)
        if trainer.saves is not None:
            trainer.saves.resume_at(trainer.step_index)
        if loader.position[0] != epoch:
            raise EpochOver

    def _apply(self, logged: Sequence[LoggedStep]) -> None:
        trainer, first = self.trainer, logged[0]
        buckets = trainer.engine.buckets
        assert buckets is not None, "steps are logged where several ranks train"
        parts = [part for one in logged for part in one.parts]
        _fill_gradients(parts, buckets.views)
        name = StepName(step=first.step, lineage=first.lineage)
        apply_again(
            trainer,
            ReducedStep(
                vector=read_vector(first.update["vector"]),
                factor=float(first.update["factor"]),
                flats=buckets.flats,
                name=name,
            ),
            list(first.update["positions"]),
        )
        _fill(parts, BUFFER_PREFIX, dict(trainer.model.named_buffers()))
        if trainer.engine.name != name:
            msg = (
                f"step {first.step} of the log leads to another history than when it was "
                "made; start again with --resume, which goes on from disk"
            )
            raise CheckpointError(msg)


def apply_again(
    trainer: Trainer, step: ReducedStep, positions: list[dict[str, int | bool]]
) -> None:
    """Apply a step that was computed elsewhere, or before, and all that moves with it.

    Args:
        trainer: At the state before it.
        step: As it was about to be applied then.
        positions: Of the loaders after it.
    """
    outcome = trainer.engine.replay(step)
    trainer.step_scheduler(outcome.loss)
    trainer.step_index, trainer.last_loss = trainer.step_index + 1, outcome.loss
    trainer.move_to(positions)


def take_up_memory(trainer: Trainer, memory: MemorySource) -> LoadedState | None:
    """Take on what agents hold; all ranks call it.

    Args:
        trainer: Of this rank; it is given the steps that are still to be applied.
        memory: Which state.

    Returns:
        The state that the log goes on from; None where a rank could not read all, which
        is told: then none goes on from there.

    Raises:
        CheckpointError: If it is of another model.
    """
    problem, found = "", None
    try:
        found = _read(trainer, memory)
    except CheckpointError as error:
        problem = str(error)
        logger.warning("the state in memory can't be read: %s", problem)
    gathered = trainer.place.groups.rendezvous.gather("state in memory", problem, str)
    if found is None or any(gathered):
        return None
    where = f"step {memory.source.base_step} in memory"
    loaded = adopt_state(found.components, trainer.state(), where)
    place = found.place
    trainer.engine.take_shape(tuple(place["term_names"]), place["bucket_bytes"])
    trainer.last_loss = float(place["last_loss"])
    if found.steps:
        trainer.logged_steps = LoggedSteps(trainer, found.steps)
    return loaded


def _read(trainer: Trainer, memory: MemorySource) -> _Found:
    spec = trainer.spec
    node_id = spec.memory.node_id if spec is not None and spec.memory is not None else ""
    recovery = memory.access.open_recovery(node_id)
    try:
        return _Found(
            components=read_components(recovery, memory.source),
            place=find_extra(recovery, memory.source, "place"),
            steps=list(recovery.coded_steps(memory.source)),
        )
    finally:
        recovery.close()


def _fill_gradients(parts: Sequence[GradientPart], views: dict[str, torch.Tensor]) -> None:
    sizes = {GRADIENT_PREFIX + name: view.numel() for name, view in views.items()}
    logged = [p.range for p in parts if p.range.name.startswith(GRADIENT_PREFIX)]
    check_tiling(logged, sizes)
    _fill(parts, GRADIENT_PREFIX, views)


def _fill(
    parts: Sequence[GradientPart], prefix: str, places: dict[str, torch.Tensor]
) -> None:
    for part in parts:
        if not part.range.name.startswith(prefix) or not part.data:
            continue
        place = places.get(part.range.name.removeprefix(prefix))
        if place is None or part.dtype != str(place.dtype).removeprefix("torch."):
            msg = (
                f"{part.range} was logged as {part.dtype}, and the model has no such "
                "tensor; build it as it was"
            )
            raise CheckpointError(msg)
        flat = place.detach().view(-1)
        values = torch.frombuffer(bytearray(part.data), dtype=place.dtype)
        flat[part.range.start : part.range.stop].copy_(values)
