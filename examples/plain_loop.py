"""Tell two spirals apart: a training loop and nothing else."""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader

from spirals import make_model, make_spirals


def loss_fn(output: Tensor, batch: list[Tensor]) -> Tensor:
    """Return the loss of each sample, shape (batch,)."""
    return F.cross_entropy(output, batch[1], reduction="none")


dataset = make_spirals()
model = make_model()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
loader = DataLoader(dataset, batch_size=64)

for epoch in range(10):
    for batch in loader:
        loss = loss_fn(model(batch[0]), batch).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"epoch {epoch}: loss {loss:.6f}")
