"""This rank's part of a step: which samples, in which micro-batches, ghosts, tail."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from geartrain.data.batch_split import batch_size_of, slice_batch
from geartrain.data.batch_tree import map_leaves
from geartrain.errors import ConfigError
from geartrain.parallel.micro_batches import split_evenly, split_share
from geartrain.parallel.sample_context import SampleContext, use_sample_context

if TYPE_CHECKING:
    from geartrain.data.loader import ShareLoader
    from geartrain.data.sampler import CurrentBatch
    from geartrain.parallel.tail_tickets import TailTickets
    from geartrain.planner import Replica


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """One micro-batch and the positions of the global batch that it holds."""

    batch: Any  # the user's structure
    start: int
    stop: int
    ends_share: bool = False
    """The last one of this rank's share, or one of the tail."""
    tickets: TailTickets | None = None
    is_ghost: bool = False

    @property
    def is_last(self) -> bool:
        """Whether nothing follows here, so that its backward may send gradients.

        To be asked right before the backward: with a shared tail it makes sure, where
        it says so, that this rank takes no more of it.
        """
        return self.ends_share and (self.tickets is None or self.tickets.none_left())

    @property
    def num_samples(self) -> int:
        """Samples that count: a ghost has none."""
        return 0 if self.is_ghost else self.stop - self.start


@dataclass(frozen=True, slots=True, kw_only=True)
class StepWork:
    """What this rank computes in a step.

    Args of the constructor:
        batch: The share that the loader handed out, perhaps transformed by the user.
        replica: This rank's place in the plan; None where it is left out.
        loader: The loader the batch came from.
        uniform_count: Micro-batches that every rank runs, ghosts included; None
            where ranks may run different numbers.
        tickets: The shared tail; None without one.
        on_read: Told how long reading the tail's samples took.
    """

    batch: Any  # the user's structure
    replica: Replica | None
    loader: ShareLoader
    uniform_count: int | None
    tickets: TailTickets | None
    on_read: Callable[[float], None]

    def micro_batches(self) -> Iterator[MicroBatch]:
        """Yield this rank's micro-batches, the tail's last."""
        if self.replica is None:
            return
        current = self.loader.current
        spans = self._spans(current.own_count)
        for index, (start, stop) in enumerate(spans):
            ends_share = index == len(spans) - 1
            if start == stop:
                yield self._ghost(ends_share=ends_share)
                continue
            yield MicroBatch(
                batch=slice_batch(self.batch, start, stop),
                start=current.start + start,
                stop=current.start + stop,
                ends_share=ends_share,
                tickets=self.tickets,
            )
        yield from self._tail(current)

    def _spans(self, num_samples: int) -> list[tuple[int, int]]:
        assert self.replica is not None
        if self.uniform_count is not None:
            return split_evenly(num_samples, self.uniform_count)
        return split_share(num_samples, self.replica.micro_batch_size)

    def _ghost(self, *, ends_share: bool) -> MicroBatch:
        current = self.loader.current
        if current.own_count:  # as the user may have transformed it
            start, batch = current.start, slice_batch(self.batch, 0, 1)
        elif self.batch is not self.loader.last_batch:
            start, batch = 0, map_leaves(self.batch, _row_of_zeros)
        else:
            started_at_s = time.perf_counter()
            start, batch = 0, self.loader.fetch(0, 1)
            self.on_read(time.perf_counter() - started_at_s)
        return MicroBatch(
            batch=batch,
            start=start,
            stop=start + 1,
            ends_share=ends_share,
            tickets=self.tickets,
            is_ghost=True,
        )

    def _tail(self, current: CurrentBatch) -> Iterator[MicroBatch]:
        if self.tickets is None:
            return
        while True:
            started_at_s = time.perf_counter()
            taken = self.tickets.take()
            if taken is None:
                self.on_read(time.perf_counter() - started_at_s)
                return
            start, stop = (current.tail_start + position for position in taken)
            batch = self.loader.fetch(start, stop)
            self.on_read(time.perf_counter() - started_at_s)
            yield MicroBatch(
                batch=batch, start=start, stop=stop, ends_share=True, tickets=self.tickets
            )


def _row_of_zeros(leaf: Any) -> Any:  # Any: a leaf of the user's batch
    """One row in the form of a batch without rows."""
    if isinstance(leaf, torch.Tensor) and leaf.dim() and not len(leaf):
        return leaf.new_zeros((1, *leaf.shape[1:]))
    return leaf


def check_share(batch: Any, current: CurrentBatch, *, has_tail: bool, is_own: bool) -> None:
    """Check that a batch handed to ``step`` is the share that the loader handed out.

    Args:
        batch: What ``step`` was given.
        current: The loader's global batch.
        has_tail: Whether part of the batch is handed out during the step.
        is_own: Whether the batch is the very object the loader handed out.

    Raises:
        ConfigError: If samples would be lost or counted twice.
    """
    size = batch_size_of(batch)
    if size != current.own_count:
        msg = (
            f"step() got {size} samples but this device's share is {current.own_count}; "
            "pass on the whole batch that the loader handed out"
        )
        raise ConfigError(msg)
    if has_tail and not is_own:
        msg = (
            "step() got another batch than the loader handed out, but the tail of the "
            "step is read from the loader and would miss your change; transform in the "
            "dataset or collate_fn, or run with --tail-fraction 0"
        )
        raise ConfigError(msg)


def sample_context(
    micro: MicroBatch, current: CurrentBatch | None, seed: int, step: int
) -> AbstractContextManager[None]:
    """Tell modules which samples a micro-batch holds."""
    if current is None:
        return nullcontext()
    indices = torch.tensor(current.sample_indices[micro.start : micro.stop])
    return use_sample_context(
        SampleContext(seed=seed, step=step, sample_indices=indices, is_ghost=micro.is_ghost)
    )
