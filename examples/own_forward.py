"""Two forward passes a step: the session adds up and exchanges, the rest is yours."""

import torch
import torch.nn.functional as F

import geartrain as gt
from spirals import make_model, make_spirals

model = make_model()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
session = gt.Session(seed=0)
model, optimizer = session.setup(model, optimizer)
loader = session.setup_dataloader(make_spirals(), global_batch_size=64)

for epoch in range(10):
    # begin loop
    for batch in loader:
        for points, labels in session.micro_batches(batch):
            # Turned by half a turn, each spiral lies on the other one.
            losses = F.cross_entropy(model(points), labels, reduction="none")
            losses += F.cross_entropy(model(-points), 1 - labels, reduction="none")
            session.backward(losses)
        loss = session.optimizer_step()
    # end loop
    print(f"epoch {epoch}: loss {loss:.6f}")
