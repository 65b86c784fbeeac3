"""When a training is saved, and what becomes of a save whose writer is lost."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from geartrain.errors import CheckpointError
from geartrain.parallel.memory_restore import take_up_memory
from geartrain.parallel.regroup import Save
from geartrain.parallel.resume import take_up
from geartrain.parallel.saved_state import save_state, whole_state
from geartrain.parallel.tiered_saves import TieredSaves

if TYPE_CHECKING:
    from collections.abc import Sequence

    from geartrain.parallel.residual_state import SavedResiduals
    from geartrain.parallel.save_spec import ResumeSpec
    from geartrain.parallel.saved_state import LoadedState
    from geartrain.parallel.step_update import StepOutcome
    from geartrain.parallel.trailer import RankFigures
    from geartrain.parallel.trainer import Trainer
    from geartrain.telemetry import EventKind

logger = logging.getLogger(__name__)


def save(trainer: Trainer, path: Path, positions: Sequence[dict[str, int | bool]]) -> None:
    """Save everything: the lead writes, the others return at once.

    Args:
        trainer: Of this rank.
        path: Of the snapshot.
        positions: Of the loaders.

    Raises:
        CheckpointError: On the lead, if it can't be written.
        CommunicationError: If the others can't go on.
    """
    residuals = None
    if trainer.residuals.are_coded:
        residuals = trainer.together(trainer.residuals.collect)
    if trainer.place.groups.is_lead:
        _write(trainer, path, positions, residuals)
    if trainer.regrouper is not None:
        trainer.regrouper.last_save = Save(path=path, step=trainer.step_index)


def save_again(trainer: Trainer) -> None:
    """Make a save that a lead was lost over; all ranks call it after the same step.

    The script's call has returned long ago, or said on another rank what was wrong. So
    where it can't be made now either, that is told and training goes on.
    """
    path = _owed(trainer)
    if path is None:
        return
    try:
        save(trainer, path, trainer.positions())
    except CheckpointError as error:
        trainer.recorder.add_event(trainer.step_index, "unsaved", str(error))
        logger.warning("training goes on, but %s", error)


def finish(trainer: Trainer) -> None:
    """What the lead does once all have made their last step."""
    path = _owed(trainer)
    if path is not None:
        if trainer.residuals.are_coded:
            logger.warning("%s lacks what compression owed, lost with its writer", path)
        _write(trainer, path, trainer.positions(), None)
    wait_s = trainer.engine.last_wait_s
    trainer.recorder.flush(trainer.place.groups.collect_last_waits(wait_s))


def make_saves(trainer: Trainer) -> TieredSaves | None:
    """What saves while the training goes on; None where the launcher wants none."""
    spec = trainer.spec
    if spec is None or spec.saves is None or spec.mode == "plan":
        return None

    def tell(kind: EventKind, text: str) -> None:
        trainer.recorder.add_event(trainer.step_index, kind, text)

    return TieredSaves(spec.saves, tell)


def is_save_due(trainer: Trainer) -> bool:
    """Whether this rank, as the lead, wants the state after the open step saved."""
    if trainer.saves is None or not trainer.place.groups.is_lead:
        return False
    return trainer.saves.is_due(trainer.step_index + 1)


def figures_of(trainer: Trainer) -> RankFigures:
    """This rank's figures of the open step."""
    memory = trainer.memory
    return replace(
        trainer.opened.figures(trainer.step_index),
        save_due=float(is_save_due(trainer)),
        snapshot_wish=float(memory.wish()) if memory is not None else 0.0,
    )


def save_in_tiers(trainer: Trainer, outcome: StepOutcome) -> None:
    """Save where that is due; all ranks call it after the same step.

    Raises:
        CommunicationError: If the others can't go on.
    """
    if trainer.memory is not None:
        trainer.memory.after_step(outcome)
    if trainer.saves is None:
        return
    trainer.saves.report()
    if not any(rank.save_due for rank in outcome.trailer.ranks):
        return
    trainer.average_models()
    residuals = None
    if trainer.residuals.are_coded:
        residuals = trainer.together(trainer.residuals.collect)
    if trainer.place.groups.is_lead:
        state = trainer.state()
        components = whole_state(state, trainer.positions(), residuals)
        trainer.saves.save(components, state.step_index, state.lineage)


def resume(trainer: Trainer) -> list[dict[str, int | bool]]:
    """Go on from what the launcher found, if anything; all ranks call it.

    Returns:
        The loaders' positions.

    Raises:
        CheckpointError: If it is damaged in all its stores, or of another model.
    """
    spec = trainer.spec.resume if trainer.spec is not None else None
    if spec is None:
        return []
    loaded, place = _take_up(trainer, spec)
    positions = trainer.go_on_from(loaded)
    logged = trainer.logged_steps
    num_logged = len(logged.steps) if logged is not None else 0
    text = f"goes on after step {trainer.step_index + num_logged}, from {place}"
    if num_logged:
        text += f": that after step {trainer.step_index}, and {num_logged} logged steps"
    trainer.recorder.add_event(trainer.step_index, "resumed", text)
    for change in loaded.changed_settings if trainer.place.groups.is_lead else ():
        logger.warning("the script differs from what is gone on with: %s", change)
    return positions


def _take_up(trainer: Trainer, spec: ResumeSpec) -> tuple[LoadedState, str]:
    """The state that is gone on with, and where it was; disk where memory fails."""
    if spec.memory is not None:
        loaded = take_up_memory(trainer, spec.memory)
        if loaded is not None:
            return loaded, "the memory of its nodes"
    if spec.snapshot is None and not spec.stores:
        msg = (
            f"the state after step {spec.step} can't be read from memory, and nothing was "
            "saved to disk; start anew"
        )
        raise CheckpointError(msg)
    return take_up(spec, trainer.state()), spec.snapshot or spec.stores[0]


def _owed(trainer: Trainer) -> Path | None:
    regrouper = trainer.regrouper
    if regrouper is None or not regrouper.owes_save:
        return None
    regrouper.owes_save = False
    return regrouper.last_save.path if regrouper.last_save is not None else None


def _write(
    trainer: Trainer,
    path: Path,
    positions: Sequence[dict[str, int | bool]],
    residuals: SavedResiduals | None,
) -> None:
    save_state(path, trainer.state(), positions, residuals)
    trainer.recorder.add_event(trainer.step_index, "saved", f"saved to {path}")
