"""The log of reduced gradients between two snapshots in memory, as far as it is cheap."""

from __future__ import annotations

import base64
import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from geartrain.checkpoint.agent.messages import LogStep
from geartrain.checkpoint.agent.shard_layout import copy_gradients

if TYPE_CHECKING:
    from collections.abc import Sequence

    from geartrain.checkpoint.agent.link import AgentLink
    from geartrain.checkpoint.ranges import StateRange
    from geartrain.parallel.commit import ReducedStep

_KEPT = 16
_ENOUGH = 4
_TRIED_AGAIN_AFTER_STEPS = 500


@dataclass(slots=True)
class LogBudget:
    """Whether the log is worth its time: pure, from seconds that were measured.

    Args:
        max_fraction: Of a step's time that the trainer's copy and the agent's coding of it
            may take together, as if both had the same core.
    """

    max_fraction: float
    _costs_s: deque[float] = field(default_factory=lambda: deque(maxlen=_KEPT))
    _steps_off: int = 0

    @property
    def is_on(self) -> bool:
        """Whether steps are logged now."""
        return not self._steps_off

    def note(self, cost_s: float, step_s: float) -> None:
        """Take note of a step that was logged.

        Args:
            cost_s: Of logging it.
            step_s: Typical time of a step.
        """
        self._costs_s.append(cost_s)
        middle_s = sorted(self._costs_s)[len(self._costs_s) // 2]
        if len(self._costs_s) >= _ENOUGH and middle_s > self.max_fraction * step_s:
            self._steps_off = _TRIED_AGAIN_AFTER_STEPS
            self._costs_s.clear()

    def skip(self) -> None:
        """A step was not logged, for its cost; now and then it is tried again."""
        self._steps_off = max(0, self._steps_off - 1)


def log_step(
    link: AgentLink,
    step: ReducedStep,
    parts: Sequence[tuple[StateRange, torch.Tensor]],
    about: dict[str, Any],  # Any: JSON
) -> float | None:
    """Hand this rank's part of a step to the agent.

    Args:
        link: To the agent.
        step: About to be applied.
        parts: Of the gradients and buffers.
        about: ``previous_lineage``, and ``positions`` of the loaders after the step.

    Returns:
        Seconds that it took here; None where the agent has not caught up.

    Raises:
        CheckpointError: If the parts have grown.
        CommunicationError: If the agent is gone.
    """
    began_s = time.perf_counter()
    slot = link.log_slot()
    if slot is None:
        return None
    index, view = slot
    vector = step.vector.to(torch.float64).contiguous()
    update = {
        "factor": step.factor,
        "vector": base64.b64encode(vector.view(torch.uint8).numpy().tobytes()).decode(),
        "positions": about["positions"],
    }
    link.log(
        LogStep(
            slot_index=index,
            step=step.name.step,
            previous_lineage=about["previous_lineage"],
            lineage=step.name.lineage,
            update=update,
            parts=copy_gradients(parts, view),
        )
    )
    return time.perf_counter() - began_s


def read_vector(text: str) -> torch.Tensor:
    """What ``log_step`` wrote of a step's vector, float64, shape (num_elements,).

    Raises:
        ValueError: If it is none.
    """
    data = bytearray(base64.b64decode(text, validate=True))
    return torch.frombuffer(data, dtype=torch.float64)
