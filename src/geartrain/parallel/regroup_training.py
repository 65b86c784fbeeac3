"""What a training does when a rank is lost: the step again, or save and say why not."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from geartrain.data.sampler import positions_without
from geartrain.errors import CommunicationError
from geartrain.parallel.handover import PlacesDifferError
from geartrain.parallel.memory_setup import settle_memory
from geartrain.parallel.training_saves import save

if TYPE_CHECKING:
    from geartrain.data.loader import ShareLoader
    from geartrain.data.sampler import ShareView
    from geartrain.parallel.trainer import Trainer

T = TypeVar("T")


def check_members(trainer: Trainer) -> None:
    """Look whether a rank was lost, without waiting.

    Raises:
        CommunicationError: If so.
    """
    if trainer.regrouper is not None:
        trainer.regrouper.membership.check()


def retried(trainer: Trainer, operation: Callable[[], T]) -> T:
    """Do what needs all ranks; again with those left, where one is lost meanwhile.

    Raises:
        CommunicationError: If the others can't go on.
    """
    while True:
        try:
            return operation()
        except CommunicationError as error:
            go_on(trainer, error)


def do_again(trainer: Trainer, error: CommunicationError, batch: Any) -> Any:  # Any: user's
    """Go on with those that are left.

    Args:
        trainer: Of this rank.
        error: What ended the step.
        batch: This rank's part of the global batch, as ``step`` was given it.

    Returns:
        This rank's new part of it; the same where the step was applied.

    Raises:
        CommunicationError: If the others can't go on, or the step can't be done again.
    """
    loader, steps_before = trainer.active_loader, trainer.step_index
    if trainer.regrouper is None or loader is None:
        raise error
    was_open, members = trainer.is_step_open, trainer.place.groups.members
    if was_open and batch is not loader.last_batch:
        _give_up(
            trainer,
            error,
            "the batch is not as the loader handed it out, and other devices' parts "
            "of it can't be read; transform in the dataset or collate_fn",
        )
    old_view = trainer.director.keeper.share_view(trainer.place.rank)
    go_on(trainer, error)
    if not was_open or trainer.step_index > steps_before:
        return batch
    # Perhaps anew: not all ranks may have had the plan by which the batch was cut.
    view = retried(trainer, lambda: trainer.director.assign(loader))
    if trainer.step_index > steps_before:
        return batch
    lost = set(members) - set(trainer.place.groups.members)
    left = _positions_left(trainer, loader, old_view, lost)
    trainer.regrouper.cut_anew(trainer.step_index)
    return loader.reassign(view, left)


def _positions_left(
    trainer: Trainer, loader: ShareLoader, view: ShareView, lost: Collection[int]
) -> tuple[int, ...] | None:
    """What the interrupted step is made of; None: the whole global batch.

    Args:
        trainer: Of this rank.
        loader: Whose batch it is.
        view: The shares that it was cut by.
        lost: Ranks whose samples may be left out.
    """
    regrouper = trainer.regrouper
    assert regrouper is not None
    assert trainer.spec is not None
    if trainer.spec.on_loss != "shrink" or not regrouper.have_all_begun:
        return None
    count = loader.current.global_count
    left = positions_without(count, view, lost)
    if len(left) in {0, count}:
        return None
    regrouper.changes.tell_left_out(count - len(left), len(left), trainer.step_index)
    return left


def go_on(trainer: Trainer, error: CommunicationError) -> None:
    """Come back in step with those that are left.

    Raises:
        CommunicationError: The one given, if nobody was lost; else why it can't be.
        TrainingStopped: If a stop was asked for in a step that others had finished.
    """
    regrouper = trainer.regrouper
    if regrouper is None:
        raise error
    settle_memory(trainer)  # the state may be taken over from others
    if trainer.settings.sync_batchnorm:
        _give_up(trainer, error, "synchronized BatchNorm belongs to all devices")
    try:
        outcome = regrouper.settle(error, trainer.step_index)
    except PlacesDifferError as apart:
        _save_and_raise(trainer, apart, str(apart))
    trainer.after_regrouping(outcome)


def save_surely(trainer: Trainer, path: Path) -> None:
    """Save where the run ends: all wait until it is done, by the next lead if need be.

    Raises:
        CheckpointError: On the lead, if it can't be written.
        CommunicationError: If the others can't go on.
    """

    def attempt() -> None:
        save(trainer, path, trainer.positions())
        rendezvous = trainer.place.groups.rendezvous
        rendezvous.gather("saved state", trainer.step_index, int)

    if trainer.regrouper is None:
        save(trainer, path, trainer.positions())
    else:
        retried(trainer, attempt)


@contextmanager
def own_forward(trainer: Trainer) -> Iterator[None]:
    """A part of a step that only the script itself could do again."""
    try:
        yield
    except CommunicationError as error:
        if trainer.regrouper is None:
            raise
        _give_up(trainer, error, "only the script can run its own forward again")


def _give_up(trainer: Trainer, error: CommunicationError, why: str) -> NoReturn:
    """Save the state before the step, and raise what to do with it."""
    regrouper = trainer.regrouper
    assert regrouper is not None
    gathering = regrouper.gather(error, trainer.step_index)
    _save_and_raise(
        trainer,
        error,
        f"{gathering.reason}. The step was not applied and can't be done again: {why}",
    )


def _save_and_raise(trainer: Trainer, error: CommunicationError, reason: str) -> NoReturn:
    assert trainer.spec is not None
    assert trainer.regrouper is not None
    trainer.regrouper.buffers.restore()
    if trainer.is_step_open and trainer.active_loader is not None:
        trainer.active_loader.hand_back()
    path = Path(trainer.spec.run_dir) / "checkpoint"
    save_surely(trainer, path)
    msg = (
        f"{reason}. The state after {trainer.step_index} steps is in {path}; start again "
        "and session.load() it: nothing is lost"
    )
    raise CommunicationError(msg) from error
