"""Tell two spirals apart: a training loop and nothing else."""

import torch
import torch.nn.functional as F
from torch import Tensor

import geartrain as gt
from spirals import make_model, make_spirals


def loss_fn(output: Tensor, batch: list[Tensor]) -> Tensor:
    """Return the loss of each sample, shape (batch,)."""
    return F.cross_entropy(output, batch[1], reduction="none")


dataset = make_spirals()
model = make_model()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
session = gt.Session(seed=0)
model, optimizer = session.setup(model, optimizer, loss_fn=loss_fn)
loader = session.setup_dataloader(dataset, global_batch_size=64, shuffle=False)

for epoch in range(10):
    for batch in loader:
        loss = session.step(batch)
    print(f"epoch {epoch}: loss {loss:.6f}")
