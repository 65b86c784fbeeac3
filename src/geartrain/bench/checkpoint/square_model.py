"""The model whose state is saved: four square layers with AdamW, and what to call it."""

from __future__ import annotations

import torch
from torch import nn

State = dict[str, torch.Tensor]

NUM_LAYERS = 4


class SquareTraining:
    """A training whose state is 12 bytes a parameter, and its steps.

    Args:
        dim: Of every layer.
        batch_size: Rows of the one batch, of shape (batch_size, dim).
    """

    def __init__(self, dim: int, batch_size: int) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(*(nn.Linear(dim, dim) for _ in range(NUM_LAYERS)))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), fused=True)
        self._batch = torch.randn(batch_size, dim)
        self.compute()
        self.apply()  # makes the moments

    def compute(self) -> None:
        """Forward and backward."""
        self.optimizer.zero_grad(set_to_none=False)
        loss: torch.Tensor = self.model(self._batch).square().mean()
        loss.backward()  # type: ignore[no-untyped-call]  # torch has no types for it

    def apply(self) -> None:
        """The optimizer's step."""
        self.optimizer.step()

    def state(self) -> State:
        """All tensors by name, without copies."""
        named = {f"model/{n}": p.detach() for n, p in self.model.named_parameters()}
        for name, parameter in self.model.named_parameters():
            for key, value in self.optimizer.state[parameter].items():
                named[f"optimizer/{name}.{key}"] = value
        return named

    def state_dicts(self) -> dict[str, object]:
        """What ``torch.distributed.checkpoint`` is given."""
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
        }
