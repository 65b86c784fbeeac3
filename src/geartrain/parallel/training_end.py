"""How a training ends on one rank: with its script, or when it is asked to stop."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from geartrain.errors import TrainingStopped
from geartrain.parallel.memory_setup import settle_memory
from geartrain.parallel.regroup_training import save_surely
from geartrain.parallel.training_saves import finish

if TYPE_CHECKING:
    from geartrain.parallel.trainer import Trainer


def end(trainer: Trainer, *, gather_waits: bool) -> None:
    """Say goodbye to the others, and write what is still to be written.

    Args:
        trainer: Of this rank.
        gather_waits: Whether all get here, and none by an error.
    """
    groups, regrouper = trainer.place.groups, trainer.regrouper
    wait_s = trainer.engine.last_wait_s
    waits_s = [wait_s] * trainer.place.world_size
    if regrouper is not None:
        if gather_waits:
            groups.tell_last_wait(wait_s)
            regrouper.say_goodbye(trainer.step_index, lambda: finish(trainer))
        regrouper.close()
    elif gather_waits:
        waits_s = groups.collect_last_waits(wait_s)
    settle_memory(trainer)
    if trainer.saves is not None:
        trainer.saves.close()
    if trainer.memory is not None:
        trainer.memory.close()
    trainer.recorder.flush(waits_s)
    trainer.recorder.close()


def stop(trainer: Trainer) -> NoReturn:
    """Save the state and end: a stop was asked for; all ranks call it.

    Raises:
        TrainingStopped: Always.
        CheckpointError: On the lead, if the state can't be written.
        CommunicationError: If the others can't go on.
    """
    where = ""
    if trainer.spec is not None:  # all ranks stop after the same step
        path = Path(trainer.spec.run_dir) / "checkpoint"
        trainer.average_models()
        save_surely(trainer, path)
        where = f"; saved to {path}" if trainer.place.groups.is_lead else ""
    trainer.recorder.add_event(
        trainer.step_index, "stopped", f"stopped when asked to{where}"
    )
    msg = f"stopped after {trainer.step_index} steps because it was asked to{where}"
    raise TrainingStopped(msg)
