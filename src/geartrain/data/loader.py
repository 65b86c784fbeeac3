"""The loader of one rank: its share of each global batch, on its device."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from geartrain.data.batch_tree import Batch
from geartrain.data.fetch import (
    CollateFn,
    MapDataset,
    SampleFetcher,
    check_map_style,
    wants_pinning,
)
from geartrain.data.order import ORDER_VERSION, GlobalOrder
from geartrain.data.placement import move_batch
from geartrain.data.prefetch import Prefetcher
from geartrain.data.sampler import CurrentBatch, ShareView, locate_batch
from geartrain.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderConfig:
    """What a loader reads, apart from the shares."""

    global_batch_size: int
    seed: int = 0
    shuffle: bool = True
    drop_last: bool = False
    prefetch: bool = True
    """Fetch the next step's share on a thread; what is fetched is the same."""

    def __post_init__(self) -> None:
        size: object = self.global_batch_size  # whatever an untyped script passes
        if not isinstance(size, int):
            msg = f"global_batch_size={size!r} must be a whole number of samples"
            raise ConfigError(msg)


class EpochOver(Exception):  # noqa: N818 - no error
    """Raised by an assignment: the loop ends, since the position is in another epoch."""


class ShareLoader:
    """Iterates over global batches and yields this rank's share of each.

    One ``for`` loop is one epoch; the next loop is the next epoch, also after a
    ``break``. After ``load_state_dict`` the first loop continues where the state was
    taken: a batch counts as done once it has been handed out. An empty share yields a
    batch of 0 rows, so that every rank takes every step.

    Args:
        dataset: A map-style dataset, read by one thread at a time.
        config: Batch size, seed and order.
        assignment: Called once a step for the shares in force.
        device: Where batches are put.
        collate_fn: Makes a batch of a list of samples; torch's default where None.

    Raises:
        ConfigError: If the dataset is not map-style or smaller than a global batch.
    """

    def __init__(
        self,
        dataset: MapDataset,
        *,
        config: LoaderConfig,
        assignment: Callable[[], ShareView],
        device: torch.device,
        collate_fn: CollateFn | None = None,
    ) -> None:
        check_map_style(dataset)
        self.config = config
        self.last_wait_s = 0.0
        """Time that the last ``next`` waited for data."""
        self.last_batch: Batch | None = None
        """The share handed out last; None before the first."""
        self._order = GlobalOrder(
            num_samples=len(dataset),
            global_batch_size=config.global_batch_size,
            seed=config.seed,
            shuffle=config.shuffle,
            drop_last=config.drop_last,
        )
        self._fetcher = SampleFetcher(
            dataset, seed=config.seed, collate_fn=collate_fn, pin=wants_pinning(device)
        )
        self._assignment = assignment
        self._device = device
        self._current: CurrentBatch | None = None
        self._handed_out: tuple[int, ...] = ()  # all samples of the current batch
        self._epoch = 0
        self._step = 0  # batches handed out in this epoch
        self._continues = False  # the next loop goes on at _step
        self._num_loops = 0
        self._permutation: tuple[int, npt.NDArray[np.int64]] | None = None

    def __len__(self) -> int:
        """Return the number of global batches in an epoch."""
        return self._order.num_steps

    @property
    def num_samples(self) -> int:
        """Samples of the dataset."""
        return self._order.num_samples

    @property
    def epoch(self) -> int:
        """The epoch of the running loop, or of the next one when none is running."""
        return self._epoch

    @property
    def current(self) -> CurrentBatch:
        """The global batch handed out last.

        Raises:
            ConfigError: If none has been handed out yet.
        """
        if self._current is None:
            msg = "no batch has been handed out yet; iterate over the loader first"
            raise ConfigError(msg)
        return self._current

    def __iter__(self) -> Iterator[Batch]:
        """Yield this rank's share of each global batch of one epoch.

        Raises:
            ConfigError: In ``next``, if another loop over this loader was begun, or a
                state was loaded, meanwhile.
        """
        self._num_loops += 1
        loop = self._num_loops
        if self._step and not self._continues:
            self._begin_next_epoch()
        self._continues = False
        with closing(Prefetcher[Batch]()) as prefetcher:
            while self._step < self._order.num_steps:
                entered_s = time.perf_counter()
                try:
                    view = self._assignment()
                except EpochOver:
                    return
                self._continues = False  # the assignment may have moved the position
                current = self._locate(self._order, self._epoch, self._step, view)
                batch = self._fetch_step(prefetcher, self._order, current, view)
                self._current, self._handed_out = current, current.sample_indices
                self._step += 1
                self.last_wait_s = time.perf_counter() - entered_s
                self.last_batch = batch
                yield batch
                self._check_only_loop(loop)
        self._begin_next_epoch()

    def evaluation_pass(self) -> Generator[Batch]:
        """Yield this rank's share of each batch, every sample of the dataset once.

        In the order of epoch 0, the last partial batch included and without a tail;
        random transforms draw the same each time. Position and ``current`` of
        training are as before when it ends.
        """
        order = replace(self._order, drop_last=False)
        training_batch = self._current
        try:
            with closing(Prefetcher[Batch]()) as prefetcher:
                for step in range(order.num_steps):
                    view = replace(self._assignment(), tail_samples=0)
                    current = self._locate(order, 0, step, view)
                    batch = self._fetch_step(prefetcher, order, current, view)
                    self._current = current
                    yield batch
        finally:
            self._current = training_batch

    def fetch(self, start: int, stop: int) -> Batch:
        """Fetch positions start..stop-1 of the current global batch, on the device.

        Raises:
            ConfigError: If the positions do not lie in the current global batch.
        """
        current = self.current
        if not 0 <= start <= stop <= current.global_count:
            msg = (
                f"positions {start}..{stop} do not lie in a global batch of "
                f"{current.global_count} samples; take them from loader.current"
            )
            raise ConfigError(msg)
        return move_batch(self._fetch_host(current, start, stop), self._device)

    def reassign(self, view: ShareView, positions: Sequence[int] | None = None) -> Batch:
        """Hand the current global batch out again, by other shares.

        Args:
            view: The shares.
            positions: What is left of the batch, rising; None: all of it, also what an
                earlier call had left out.

        Raises:
            ConfigError: If none has been handed out yet.
        """
        before = self.current
        indices = self._handed_out
        if positions is not None:
            indices = tuple(before.sample_indices[position] for position in positions)
        self._current = current = locate_batch(
            before.epoch, before.step_in_epoch, indices, view
        )
        batch = self._fetch_host(current, current.start, current.stop)
        self.last_batch = move_batch(batch, self._device)
        return self.last_batch

    @property
    def position(self) -> tuple[int, int]:
        """Epoch, and batches handed out in it."""
        return self._epoch, self._step

    def move_to(self, state: Mapping[str, int | bool]) -> None:
        """Go on elsewhere, also in the middle of a loop that waits for its shares.

        Args:
            state: As ``state_dict`` made it.

        Raises:
            ConfigError: If the state belongs to another order of samples.
        """
        self._check_identity(state)
        self._epoch, self._step = int(state["epoch"]), int(state["step_in_epoch"])
        self._continues = True

    def state_before(self) -> dict[str, int | bool]:
        """As ``state_dict``, from before the current batch was handed out."""
        current = self.current
        position = {"epoch": current.epoch, "step_in_epoch": current.step_in_epoch}
        return {**position, **self._identity()}

    def hand_back(self) -> None:
        """Let the position that is saved be before the current global batch."""
        self._epoch, self._step = self.current.epoch, self.current.step_in_epoch
        self._num_loops += 1  # a loop that is still open must not go on
        self._continues = True

    def fetch_profile_batch(self, num_samples: int) -> Batch:
        """Fetch the first samples of this epoch's order, to measure a model with.

        The position does not move. Samples repeat where the dataset has fewer.

        Args:
            num_samples: Rows of the batch, >= 1.
        """
        indices = self._epoch_indices(self._epoch)
        chosen = [int(indices[i % len(indices)]) for i in range(num_samples)]
        return move_batch(self._fetcher.fetch(chosen, self._epoch), self._device)

    def state_dict(self) -> dict[str, int | bool]:
        """Describe the position: plain numbers that ``load_state_dict`` takes."""
        epoch, step = self._epoch, self._step
        if step == self._order.num_steps:
            epoch, step = epoch + 1, 0
        return {"epoch": epoch, "step_in_epoch": step, **self._identity()}

    def load_state_dict(self, state: Mapping[str, int | bool]) -> None:
        """Continue exactly where a state was taken, also in the middle of an epoch.

        Raises:
            ConfigError: If the state belongs to another order of samples.
        """
        self.move_to(state)
        self._num_loops += 1  # a loop that is still open must not go on
        self._current = None

    def _check_identity(self, state: Mapping[str, int | bool]) -> None:
        for name, own in self._identity().items():
            if state.get(name) != own:
                msg = (
                    f"the saved position has {name}={state.get(name)} but this loader has "
                    f"{name}={own}; set up the loader as it was, or don't load its position"
                )
                raise ConfigError(msg)

    def _identity(self) -> dict[str, int | bool]:
        return {
            "order_version": ORDER_VERSION,
            "num_samples": self._order.num_samples,
            "global_batch_size": self._order.global_batch_size,
            "seed": self._order.seed,
            "shuffle": self._order.shuffle,
            "drop_last": self._order.drop_last,
        }

    def _begin_next_epoch(self) -> None:
        self._epoch += 1
        self._step = 0

    def _check_only_loop(self, loop: int) -> None:
        if loop != self._num_loops:
            msg = (
                "this loop over the loader was overtaken: another loop was begun or a "
                "state was loaded meanwhile; keep one loop at a time"
            )
            raise ConfigError(msg)

    def _epoch_indices(self, epoch: int) -> npt.NDArray[np.int64]:
        if self._permutation is None or self._permutation[0] != epoch:
            self._permutation = (epoch, self._order.permutation(epoch))
        return self._permutation[1]

    def _locate(
        self, order: GlobalOrder, epoch: int, step: int, view: ShareView
    ) -> CurrentBatch:
        start, stop = order.batch_bounds(step)
        indices = tuple(self._epoch_indices(epoch)[start:stop].tolist())
        return locate_batch(epoch, step, indices, view)

    def _fetch_step(
        self,
        prefetcher: Prefetcher[Batch],
        order: GlobalOrder,
        current: CurrentBatch,
        view: ShareView,
    ) -> Batch:
        ahead = prefetcher.take(_key(current))
        if ahead is None:
            batch = self._fetch_host(current, current.start, current.stop)
        else:
            batch = ahead.result()
        step = current.step_in_epoch + 1
        if self.config.prefetch and step < order.num_steps:
            # With the shares of now: they change rarely, and take() notices.
            following = self._locate(order, current.epoch, step, view)
            if following.own_count:
                prefetcher.start(
                    _key(following),
                    lambda is_cancelled: self._fetch_host(
                        following, following.start, following.stop, is_cancelled
                    ),
                )
        return move_batch(batch, self._device)

    def _fetch_host(
        self,
        current: CurrentBatch,
        start: int,
        stop: int,
        is_cancelled: Callable[[], bool] = lambda: False,
    ) -> Batch:
        if start == stop:
            return self._fetcher.fetch_empty(current.sample_indices[0], current.epoch)
        indices = current.sample_indices[start:stop]
        return self._fetcher.fetch(indices, current.epoch, is_cancelled)


def _key(current: CurrentBatch) -> tuple[int, int, int, int]:
    return current.epoch, current.step_in_epoch, current.start, current.stop
