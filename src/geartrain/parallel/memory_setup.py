"""Connects a trainer with the agent of its node."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from geartrain.parallel.agent_connection import AgentConnection
from geartrain.parallel.agent_saves import AgentSaves
from geartrain.parallel.peer_memory import PeerMemory

if TYPE_CHECKING:
    from geartrain.parallel.trainer import Trainer

logger = logging.getLogger(__name__)


def make_memory(trainer: Trainer) -> PeerMemory | None:
    """What keeps the state in memory; None where the launcher started no agents.

    Models that are averaged now and then are not one state, and are not kept.
    """
    spec = trainer.spec
    if spec is None or spec.memory is None or trainer.engine.averager is not None:
        return None
    memory = spec.resume.memory if spec.resume is not None else None
    source = memory.source if memory is not None and not spec.joins else None
    groups = trainer.place.groups

    def tell(text: str) -> None:
        logger.info("%s", text)
        trainer.recorder.add_event(
            trainer.step_index, "note", text, groups.device_ids[groups.rank]
        )

    connection = AgentConnection(
        spec=spec.memory,
        member_id=groups.device_ids[groups.rank],
        base=(0, "") if source is None else (source.base_step, source.base_lineage),
        tell=tell,
    )
    made = PeerMemory(trainer, connection, spec.memory.settings, tell)
    if trainer.saves is not None and spec.saves is not None:
        saves = trainer.saves.agent = AgentSaves(made, spec.saves, trainer.saves.tell)
        made.on_sealed = saves.sealed
    return made


def settle_memory(trainer: Trainer) -> None:
    """Finish what is being copied, before the state is changed by other than a step."""
    if trainer.memory is not None:
        trainer.memory.settle()
