"""How the user's model, loss and counts are called on a batch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from geartrain.errors import ConfigError
from geartrain.parallel.loss_terms import (
    CountFunction,
    LossFunction,
    LossTerm,
    read_counts,
    read_loss,
)

ForwardFunction = Callable[[torch.nn.Module, Any], Any]  # Any: the user's batch and output

AUTOCAST_DTYPES = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCalls:
    """The user's functions, called the same way everywhere."""

    model: torch.nn.Module
    device_type: str
    loss_fn: LossFunction | None = None
    forward_fn: ForwardFunction | None = None
    count_fn: CountFunction | None = None
    autocast_dtype: torch.dtype | None = None

    def forward(self, batch: Any) -> Any:  # Any: the user's batch and output
        """Call the model: ``model(inputs)``, ``model(**mapping)``, or forward_fn.

        Raises:
            ConfigError: If the batch has another form and there is no forward_fn.
        """
        if self.forward_fn is not None:
            return self.forward_fn(self.model, batch)
        if isinstance(batch, Mapping):
            return self.model(**batch)
        if isinstance(batch, tuple | list) and len(batch) == 2:  # noqa: PLR2004 - a pair
            return self.model(batch[0])
        msg = (
            f"a batch of type {type(batch).__name__} is neither a pair (inputs, target) "
            "nor a mapping of the model's arguments; pass setup(forward_fn=...)"
        )
        raise ConfigError(msg)

    def loss_terms(self, batch: Any) -> dict[str, LossTerm]:  # Any: the user's batch
        """Forward pass and loss of a batch, as sums and counts.

        Raises:
            ConfigError: If no loss_fn was given, or it returns something else.
        """
        loss_fn = self.require_loss()
        with self.autocast():
            output = loss_fn(self.forward(batch), batch)
        # Pairs carry their own counts.
        counts = None
        if self.count_fn is not None and isinstance(output, torch.Tensor):
            counts = self.count_fn(batch)
        return read_loss(output, counts)

    def require_loss(self) -> LossFunction:
        """The user's loss_fn.

        Raises:
            ConfigError: If setup got none.
        """
        if self.loss_fn is None:
            msg = (
                "step() needs setup(loss_fn=...); with an own forward use micro_batches(), "
                "backward() and optimizer_step()"
            )
            raise ConfigError(msg)
        return self.loss_fn

    def counts(self, batch: Any) -> dict[str, float] | None:  # Any: the user's batch
        """What count_fn says of a batch; None without one."""
        return None if self.count_fn is None else read_counts(self.count_fn(batch))

    def autocast(self) -> contextlib.AbstractContextManager[object]:
        """Mixed precision where it was asked for."""
        if self.autocast_dtype is None:
            return contextlib.nullcontext()
        return torch.autocast(self.device_type, dtype=self.autocast_dtype)
