"""Agrees in each step how many samples the ranks have, beside the forward pass."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from geartrain.errors import ConfigError

WeightFunction = Callable[..., float]
"""From the arguments of a forward pass to the number of samples in it."""


class Pending(Protocol):
    """A sum under way, of whichever library."""

    def wait(self) -> object:
        """Block until it is there; what is returned is not looked at."""


@dataclass(slots=True)
class SampleWeights:
    """Agrees on how many samples the ranks have, beside the forward pass.

    A bucket leaves before the total is known, so it is multiplied by samples / nominal,
    where the nominal total is that of the step before, and scaled once it came if the
    total turned out to be another.
    """

    of_forward: WeightFunction | float
    device: torch.device
    nominal: float | None = None
    own: float = 1.0
    total: torch.Tensor | None = None
    pending: Pending | None = None

    def begin(
        self,
        args: tuple[Any, ...],  # Any: the model's own arguments
        kwargs: dict[str, Any],
        start: Callable[[torch.Tensor], Pending],
    ) -> None:
        """Tell the others this rank's samples; does not wait for theirs."""
        value = self.of_forward
        self.own = checked_weight(value(*args, **kwargs) if callable(value) else value)
        self.total = torch.tensor([self.own], dtype=torch.float32, device=self.device)
        self.pending = start(self.total)

    def part(self) -> float:
        """What this rank's gradients are multiplied by when they leave."""
        if self.nominal is None:
            # The first step only: nothing is known yet.
            self.nominal = self._total() or 1.0
        return self.own / self.nominal

    def end(self) -> None:
        """Take the total for the next step's nominal one."""
        self.nominal = self._total() or self.nominal

    def _total(self) -> float:
        if self.pending is None or self.total is None:
            msg = (
                "backward came without a forward pass that says how many samples it has; "
                "call the DDP model itself, not its .module"
            )
            raise ConfigError(msg)
        self.pending.wait()
        return float(self.total)


class NothingPending:
    """A sum over one rank."""

    def wait(self) -> None:
        """Return at once."""


def checked_weight(num_samples: float) -> float:
    """The number, if it can be one of samples.

    Raises:
        ConfigError: If it is negative or not finite.
    """
    number = float(num_samples)
    if not (math.isfinite(number) and number >= 0.0):
        msg = f"a rank's weight of {number} must be a number of samples, >= 0"
        raise ConfigError(msg)
    return number
