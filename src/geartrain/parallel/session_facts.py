"""What a session knows about itself: where it stands, and how far it has come."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from geartrain.errors import ConfigError
from geartrain.parallel.ranks import RankPlace
from geartrain.parallel.trainer import Trainer

if TYPE_CHECKING:
    from geartrain.planner import Plan


@dataclass(slots=True)
class SessionFacts:
    """The facts of a session, which its subclass fills in."""

    _place: RankPlace = field(init=False)
    _trainer: Trainer | None = field(init=False, default=None)

    @property
    def rank(self) -> int:
        """This process's rank, from 0."""
        return self._place.rank

    @property
    def world_size(self) -> int:
        """Number of ranks; each works one device."""
        return self._place.world_size

    @property
    def is_main(self) -> bool:
        """Whether this rank leads, and so prints and saves: the lowest that is left.

        It is rank 0, and the next one from when rank 0 is lost.
        """
        return self._place.groups.is_lead

    @property
    def device(self) -> torch.device:
        """This rank's device, where batches arrive."""
        return self._place.device.torch_device

    @property
    def device_id(self) -> str:
        """The device's name in the fleet, such as ``cuda:0``."""
        return self._place.device.profile.device_id

    @property
    def step_index(self) -> int:
        """Optimizer steps made so far, over all epochs."""
        return self._trainer.step_index if self._trainer is not None else 0

    @property
    def epoch(self) -> int:
        """The epoch of the loader being iterated, from 0."""
        loader = self._trainer.active_loader if self._trainer is not None else None
        return loader.epoch if loader is not None else 0

    @property
    def current_plan(self) -> Plan | None:
        """The plan in force; None before the first batch."""
        return self._trainer.director.plan if self._trainer is not None else None

    def print(self, *values: object) -> None:
        """Print on the rank that leads only."""
        if self.is_main:
            print(*values, flush=True)  # noqa: T201 - the user's own output

    def _trained(self) -> Trainer:
        if self._trainer is None:
            msg = "call session.setup(model, optimizer, loss_fn=...) first"
            raise ConfigError(msg)
        return self._trainer
