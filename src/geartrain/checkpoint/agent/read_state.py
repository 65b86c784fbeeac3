"""A training's components out of what agents hold."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from geartrain.checkpoint.agent.recovery import (
    STRUCTURE_EXTRA,
    Recovery,
    RecoverySource,
    find_extra,
)
from geartrain.checkpoint.ranges import StateRange
from geartrain.checkpoint.state_tensors import read_component
from geartrain.checkpoint.tree import Tree


@dataclass(frozen=True, slots=True)
class _MemoryReader:
    recovery: Recovery
    source: RecoverySource

    def read(self, targets: Iterable[tuple[StateRange, memoryview]]) -> None:
        self.recovery.read(self.source, dict(targets))


def read_components(recovery: Recovery, source: RecoverySource) -> dict[str, Tree]:
    """Read the state that a log goes on from, whole.

    Args:
        recovery: Of the agents.
        source: What it found.

    Returns:
        State dicts by name, as a member had taken them apart.

    Raises:
        CheckpointError: If a part is undamaged nowhere, or it was no whole state.
    """
    structure = find_extra(recovery, source, STRUCTURE_EXTRA)
    facts, reader = recovery.tensors(source), _MemoryReader(recovery, source)
    return {
        name: read_component(reader, facts, (name, part))
        for name, part in structure.items()
    }
