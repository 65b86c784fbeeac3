"""Tell two spirals apart with DistributedDataParallel; start it with torchrun."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from spirals import make_model, make_spirals


def loss_fn(output: Tensor, batch: list[Tensor]) -> Tensor:
    """Return the loss of each sample, shape (batch,)."""
    return F.cross_entropy(output, batch[1], reduction="none")


dist.init_process_group("gloo")
dataset = make_spirals()
model = DistributedDataParallel(make_model())
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
sampler: DistributedSampler[tuple[Tensor, ...]] = DistributedSampler(dataset, shuffle=False)
loader = DataLoader(dataset, batch_size=64 // dist.get_world_size(), sampler=sampler)

for epoch in range(10):
    sampler.set_epoch(epoch)
    for batch in loader:
        loss = loss_fn(model(batch[0]), batch).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    if dist.get_rank() == 0:
        print(f"epoch {epoch}: loss {loss:.6f}")
dist.destroy_process_group()
