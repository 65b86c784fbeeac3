"""One training, run by a plain loop on one device or by a session on several ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

import geartrain as gt
from geartrain.data.order import GlobalOrder
from geartrain.planner import Plan, Replica, Stage
from small_models import Mlp, device_ids, mean_cross_entropy, vectors

BATCH = 12
NUM_SAMPLES = 2 * BATCH + 7  # the last batch of an epoch is a part of one


def make_sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def make_adamw(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)


@dataclass(frozen=True, kw_only=True)
class Job:
    """What to train and for how long."""

    make_model: Callable[[], torch.nn.Module] = Mlp
    make_data: Callable[[int, torch.dtype], Any] = vectors
    make_optimizer: Callable[[torch.nn.Module], torch.optim.Optimizer] = make_sgd
    make_scheduler: Callable[[torch.optim.Optimizer], Any] | None = None
    loss_fn: Callable[[Any, Any], Any] = mean_cross_entropy
    num_steps: int = 7
    batch_size: int = BATCH
    num_samples: int = NUM_SAMPLES
    dtype: torch.dtype = torch.float64
    max_grad_norm: float | None = None
    options: dict[str, Any] = field(default_factory=dict)
    """Further arguments of ``Session.setup``."""

    def model(self) -> torch.nn.Module:
        torch.manual_seed(5)
        return self.make_model().to(self.dtype)

    def data(self) -> Any:
        return self.make_data(self.num_samples, self.dtype)


@dataclass(frozen=True, kw_only=True)
class Result:
    """How a training went on one rank."""

    losses: list[float]
    parameters: torch.Tensor
    """All of them, flat, float64."""
    lr: float


def result_of(
    losses: list[float], model: torch.nn.Module, optimizer: torch.optim.Optimizer
) -> Result:
    return Result(
        losses=losses,
        parameters=flat_parameters(model),
        lr=float(optimizer.param_groups[0]["lr"]),
    )


def flat_parameters(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten().double() for p in model.parameters()])


def global_batches(job: Job) -> Iterator[Any]:
    """Collated global batches, epoch after epoch, as one device reads them."""
    data = job.data()
    order = GlobalOrder(num_samples=len(data), global_batch_size=job.batch_size)
    epoch = 0
    while True:
        permutation = order.permutation(epoch).tolist()
        for step in range(order.num_steps):
            start, stop = order.batch_bounds(step)
            yield torch.utils.data.default_collate(
                [data[i] for i in permutation[start:stop]]
            )
        epoch += 1


def mean_loss(output: Any) -> torch.Tensor:
    """The mean loss of a whole batch, from what a loss_fn returned."""
    if isinstance(output, torch.Tensor):
        return output.mean()
    terms = [output] if isinstance(output, tuple) else list(output.values())
    total: torch.Tensor = sum(loss_sum / max(int(count), 1) for loss_sum, count in terms)
    return total


def call(model: torch.nn.Module, batch: Any) -> Any:
    return model(**batch) if isinstance(batch, dict) else model(batch[0])


def train_plainly(job: Job) -> Result:
    """A plain PyTorch loop on one device."""
    model = job.model()
    optimizer = job.make_optimizer(model)
    scheduler = job.make_scheduler(optimizer) if job.make_scheduler else None
    losses: list[float] = []
    for batch in global_batches(job):
        optimizer.zero_grad()
        loss = mean_loss(job.loss_fn(call(model, batch), batch))
        loss.backward()  # type: ignore[no-untyped-call]
        if job.max_grad_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), job.max_grad_norm)
        optimizer.step()
        losses.append(loss.item())
        if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
            scheduler.step(losses[-1])
        elif scheduler is not None:
            scheduler.step()
        if len(losses) == job.num_steps:
            break
    return result_of(losses, model, optimizer)


def train_by_session(
    job: Job, session: gt.Session, plans: dict[int, Plan] | None = None
) -> Result:
    """The same through a session; ``plans`` are applied after so many steps."""
    model = job.model()
    optimizer = job.make_optimizer(model)
    scheduler = job.make_scheduler(optimizer) if job.make_scheduler else None
    model, optimizer = session.setup(
        model,
        optimizer,
        loss_fn=job.loss_fn,
        lr_scheduler=scheduler,
        max_grad_norm=job.max_grad_norm,
        **job.options,
    )
    loader = session.setup_dataloader(job.data(), global_batch_size=job.batch_size)
    losses = run_steps(session, loader, job.num_steps, plans)
    session.close()
    return result_of(losses, model, optimizer)


def run_steps(
    session: gt.Session, loader: Any, num_steps: int, plans: dict[int, Plan] | None = None
) -> list[float]:
    losses: list[float] = []
    while len(losses) < num_steps:
        for batch in loader:
            losses.append(session.step(batch))
            if plans and len(losses) in plans:
                session.apply_plan(plans[len(losses)])
            if len(losses) == num_steps:
                break
    return losses


def train_on_ranks(rank: int, world_size: int, job: Job, plans: dict[int, Plan]) -> Result:
    """For run_ranks: train on the plan for step 0, and on others from their step on."""
    return train_by_session(job, gt.Session(plan=plans[0]), plans)


def partial_plan(shares: dict[int, int], world_size: int, *, uniform: bool = False) -> Plan:
    """A plan in which only some ranks take part; the others are left out."""
    ids = device_ids(world_size)
    replicas = tuple(
        Replica(
            device_id=ids[rank],
            share=share,
            micro_batch_size=max(share, 1) if uniform else 2,
            num_micro_batches=1 if uniform else -(-share // 2),
        )
        for rank, share in shares.items()
    )
    return Plan(
        global_batch_size=sum(shares.values()),
        stages=(Stage(stage_index=0, replicas=replicas),),
        left_out=tuple(ids[rank] for rank in range(world_size) if rank not in shares),
        uniform_micro_batches=uniform,
    )


def largest_difference(a: list[float], b: list[float]) -> float:
    """Largest relative difference of two loss curves."""
    return max(abs(x - y) / max(abs(y), 1e-12) for x, y in zip(a, b, strict=True))


def relative_error(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).norm() / b.norm())
