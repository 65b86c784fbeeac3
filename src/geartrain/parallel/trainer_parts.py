"""Parts of a trainer that need the trainer itself: who plans, who keeps members in step."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

from geartrain.parallel.joining import Donor, take_place
from geartrain.parallel.plan_director import PlanDirector
from geartrain.parallel.regroup import Regrouper

if TYPE_CHECKING:
    from geartrain.parallel.membership import JoiningMembership
    from geartrain.parallel.trainer import Trainer

logger = logging.getLogger(__name__)


def make_director(trainer: Trainer) -> PlanDirector:
    """Plans, and points groups at who takes part."""
    return PlanDirector(
        place=trainer.place,
        calls=trainer.calls,
        engine=trainer.engine,
        settings=trainer.settings,
        spec=trainer.spec,
        recorder=trainer.recorder,
        state=trainer.state,
    )


def make_regrouper(
    trainer: Trainer, membership: JoiningMembership, run_dir: Path
) -> Regrouper:
    """Brings the training back in step when members come and go."""
    return Regrouper(
        membership=membership,
        groups=trainer.place.groups,
        director=trainer.director,
        engine=trainer.engine,
        recorder=trainer.recorder,
        state=trainer.state,
        run_dir=run_dir,
        num_in_vain=trainer.opened.num_computed,
        place=Donor(membership, trainer).place,
        take_place=lambda place: take_place(trainer, place),
        grow=trainer.grow,
        on_idle=trainer.serve,
        is_step_open=lambda: trainer.is_step_open,
        step_scheduler=trainer.step_scheduler,
    )


def tell_algorithm(trainer: Trainer) -> None:
    """Say so where steps are not those of one device."""
    algorithm = trainer.settings.algorithm
    if not isinstance(algorithm, str):
        trainer.recorder.add_event(0, "note", algorithm.description)
        if trainer.place.groups.is_lead:
            logger.warning("%s", algorithm.description)
