"""What geartrain is compared with: each device alone, and torch's own DDP."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from geartrain.bench.byte_gpt import (
    Batch,
    SourceWindows,
    byte_losses,
    make_model,
    make_optimizer,
)
from geartrain.bench.macro_settings import AlonePhase, ModelSize
from geartrain.data.order import GlobalOrder

_OPTIMIZER_REPEATS = 3

REFERENCE_MICRO_BATCH_SIZE = 16
"""The fastest of 1 to 16 on a core at full speed."""


@dataclass(slots=True)
class GlobalBatches:
    """The same global batches as a geartrain loader with this seed has, step by step."""

    windows: SourceWindows
    global_batch_size: int
    seed: int
    _order: GlobalOrder = field(init=False)
    _permutation: list[int] = field(init=False)
    _epoch: int = 0

    def __post_init__(self) -> None:
        self._order = GlobalOrder(
            num_samples=len(self.windows),
            global_batch_size=self.global_batch_size,
            seed=self.seed,
            drop_last=True,
        )
        self._permutation = self._order.permutation(0).tolist()

    def indices(self, step: int) -> list[int]:
        """Dataset indices of a step's global batch."""
        epoch, step_in_epoch = divmod(step, self._order.num_steps)
        if epoch != self._epoch:
            self._epoch = epoch
            self._permutation = self._order.permutation(epoch).tolist()
        start, stop = self._order.batch_bounds(step_in_epoch)
        return self._permutation[start:stop]

    def micro_batches(
        self, step: int, start: int, stop: int, micro_batch_size: int
    ) -> Iterator[Batch]:
        """Yield positions start..stop-1 of a step's global batch, some at a time."""
        chosen = self.indices(step)[start:stop]
        for first in range(0, len(chosen), micro_batch_size):
            yield self.windows.batch(chosen[first : first + micro_batch_size])


class AloneTrainer:
    """One device on its own: forward and backward for a while, no exchange."""

    def __init__(self, size: ModelSize, seed: int, batches: GlobalBatches) -> None:
        self._model = make_model(size, seed)
        self._optimizer = make_optimizer(self._model)
        self._batches = batches

    def run(
        self, device_id: str, round_index: int, micro_batch_size: int, seconds: float
    ) -> AlonePhase:
        """Work for about so many seconds."""
        total = self._batches.global_batch_size
        num_samples = 0
        started_at_s = time.perf_counter()
        elapsed_s = 0.0
        self._optimizer.zero_grad()
        while elapsed_s < seconds:
            for batch in self._batches.micro_batches(0, 0, total, micro_batch_size):
                byte_losses(self._model(batch[0]), batch).sum().backward()  # type: ignore[no-untyped-call]
                num_samples += len(batch[0])
                elapsed_s = time.perf_counter() - started_at_s
                if elapsed_s >= seconds:
                    break
        return AlonePhase(
            device_id=device_id,
            round_index=round_index,
            micro_batch_size=micro_batch_size,
            num_samples=num_samples,
            compute_s=elapsed_s,
            optimizer_s=self._time_optimizer(),
        )

    def _time_optimizer(self) -> float:
        self._optimizer.step()  # the first one allocates its state
        started_at_s = time.perf_counter()
        for _ in range(_OPTIMIZER_REPEATS):
            self._optimizer.step()
        return (time.perf_counter() - started_at_s) / _OPTIMIZER_REPEATS


class DdpTrainer:
    """Torch's DistributedDataParallel over fixed shares of each global batch.

    A share is computed in micro-batches, gradients exchanged with the last one, as a
    DDP user does whose memory is short. The loss of rank i is its sum times
    world_size / global batch, that is, its mean weighted by W * n_i / N, so that DDP's
    mean over the ranks is the mean over the samples.
    """

    def __init__(
        self,
        model: nn.Module,
        shares: tuple[int, ...],
        rank: int,
        micro_batch_size: int,
        batches: GlobalBatches,
    ) -> None:
        self._model = DistributedDataParallel(model)
        self._optimizer = make_optimizer(self._model)
        self._start = list(itertools.accumulate(shares, initial=0))[rank]
        self._stop = self._start + shares[rank]
        self._world_size = len(shares)
        self._micro_batch_size = micro_batch_size
        self._batches = batches
        self._step = 0

    def warm_up(self) -> None:
        """Two small steps: DDP orders its buckets anew after the first one."""
        start, stop = self._start, self._stop
        self._stop = min(stop, start + 1)
        for _ in range(2):
            self.step()
        self._stop = stop

    def step(self) -> float:
        """Make one optimizer step; returns this rank's part of the mean loss."""
        micro_batches = list(
            self._batches.micro_batches(
                self._step, self._start, self._stop, self._micro_batch_size
            )
        )
        self._optimizer.zero_grad()
        own = 0.0
        for index, batch in enumerate(micro_batches):
            is_last = index == len(micro_batches) - 1
            with nullcontext() if is_last else self._model.no_sync():
                losses = byte_losses(self._model(batch[0]), batch)
                weight = self._world_size / self._batches.global_batch_size
                loss = losses.mean(dim=1).sum() * weight
                loss.backward()  # type: ignore[no-untyped-call]
                own += float(loss.detach()) / self._world_size
        self._optimizer.step()
        self._step += 1
        return own


def train_plainly(
    size: ModelSize,
    seed: int,
    batches: GlobalBatches,
    *,
    micro_batch_size: int = REFERENCE_MICRO_BATCH_SIZE,
    device: torch.device | None = None,
) -> Iterator[float]:
    """The loop of one device; yields the mean loss of each global batch, without end.

    Args:
        size: The model's.
        seed: Of its weights.
        batches: The global batches, on the device.
        micro_batch_size: Samples of a forward pass.
        device: The CPU where None.
    """
    model = make_model(size, seed).to(device or "cpu")
    optimizer = make_optimizer(model)
    total = batches.global_batch_size
    for step in itertools.count():
        optimizer.zero_grad()
        sums = []
        for batch in batches.micro_batches(step, 0, total, micro_batch_size):
            losses = byte_losses(model(batch[0]), batch)
            loss = losses.sum() / (total * size.context)
            loss.backward()  # type: ignore[no-untyped-call]
            sums.append(losses.detach().double().sum())
        optimizer.step()
        yield float(torch.stack(sums).sum()) / (total * size.context)
